"""Marks the slow tests, and says at the start how long the chosen ones take."""

from collections import defaultdict

import pytest

from tests import slow


def pytest_addoption(parser):
    parser.addoption(
        "--choose-slow",
        type=float,
        metavar="SECONDS",
        help="rewrite tests/slow.txt: what `make test` leaves out to take this long (use -m '')",
    )


def pytest_configure(config):
    if config.getoption("--choose-slow") is not None:
        config.pluginmanager.register(Chooser(config.getoption("--choose-slow")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    listed = slow.read()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)


class Chooser:
    """Adds up what every test takes; at the end writes the list of slow ones."""

    def __init__(self, budget):
        self.budget = budget
        self.seconds = defaultdict(float)
        self.marked = set()

    def pytest_collection_finish(self, session):
        listed = slow.read()
        self.marked = {
            item.nodeid
            for item in session.items
            if item.nodeid not in listed and item.get_closest_marker("slow")
        }

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        seconds = {name: t for name, t in self.seconds.items() if name not in self.marked}
        left_out = slow.choose(seconds, self.budget)
        slow.write(left_out)
        rest = sum(t for name, t in seconds.items() if name not in left_out)
        terminalreporter.write_line(
            f"{slow.LIST.name}: {len(left_out)} tests are left out, the others take {rest:.0f} s"
        )
