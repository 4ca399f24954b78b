"""`--part K/N`: each test is in one of the parts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests/mpi", *options]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = found.stdout.splitlines()
    counts = dict(line.split(": ") for line in lines if line.startswith("tests/"))
    return found.returncode, counts, found.stdout + found.stderr


@pytest.mark.slow
def test_parts_hold_each_file_once():
    _, whole, _ = collected()
    parts = [collected("--part", f"{k}/3")[1] for k in (1, 2, 3)]
    assert len(whole) >= 3 and sum(map(len, parts)) == len(whole)
    assert parts[0] | parts[1] | parts[2] == whole


@pytest.mark.slow
def test_a_part_that_is_none_is_an_error():
    code, _, text = collected("--part", "4/3")
    assert code and "--part is K/N, with K from 1 to N, such as 2/3" in text
