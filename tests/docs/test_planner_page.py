"""docs/planner.md: its tables are those that docs/make_planner.py makes, and its commands parse."""

import re
import shlex
from pathlib import Path

import pytest

from docs import make_planner
from fastsync.planner.command import _parser

PAGE = (Path(__file__).parents[2] / "docs/planner.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", make_planner.TABLES)
def test_tables_are_those_that_are_made(name):
    found = re.search(rf"<!-- planner:{name} -->\n(.*?)\n<!-- /planner:{name} -->", PAGE, re.S)
    assert found, f"docs/planner.md has no table {name}"
    assert found[1] == make_planner.TABLES[name]()


def test_commands_of_the_page_are_understood():
    block = re.search(r"```sh\n(.*?)```", PAGE, re.S)[1]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert commands
    for words in commands:
        _parser().parse_args(words[words.index("fastsync.plan") + 1 :])


def test_options_of_the_page_exist():
    options = set(re.findall(r"--[a-z][a-z-]+", _parser().format_help()))
    shown = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert shown - options <= {"--help"}
