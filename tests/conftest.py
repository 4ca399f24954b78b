"""Marks the slow tests; on request notes what each test takes, and runs several files at once."""

from pathlib import Path

import pytest

from tests import at_once, slow


def pytest_addoption(parser):
    at_once.add_options(parser)
    parser.addoption(
        "--seconds-to",
        type=Path,
        metavar="FILE",
        help="note there what each test takes, for python -m tests.slow",
    )


def pytest_configure(config):
    at_once.register(config)
    if config.getoption("--seconds-to") is not None:
        config.pluginmanager.register(slow.Clock(config.getoption("--seconds-to").absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    listed = slow.read()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
