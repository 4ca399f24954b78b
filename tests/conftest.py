"""Slow cases, and ranks that the tests of a file share.

`@pytest.mark.slow` leaves a test to `make test-all`; `slow("a", "b")` those of its cases alone, and
`slow(but=("a", "b"))` all cases but those. `--part 2/3` runs the second third of the files.
"""

import signal
import zlib

import pytest

from tests.helpers import teams


def pytest_addoption(parser):
    parser.addoption(
        "--part", default="1/1", metavar="K/N", help="the K-th of N parts of the files"
    )


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background. What tests start would ignore it too, and they interrupt some.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    named = {}  # by test function and name of a case: whether there is such a case
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        for mark in [mark for mark in item.own_markers if mark.name == "slow"]:
            but = mark.kwargs.get("but", ())
            if case in but or (mark.args and case not in mark.args):
                item.own_markers.remove(mark)
            for name in (*mark.args, *but):
                place = f"{item.nodeid.partition('[')[0]}[{name}]"
                named[place] = named.get(place, False) or name == case
    # With tests chosen by name, or those that failed before, not all cases are here.
    chosen = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    if missing := [] if chosen else [place for place, there in named.items() if not there]:
        raise pytest.UsageError(f"marked as slow, but not there: {', '.join(missing)}")
    part, parts = map(int, config.getoption("part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError("--part is K/N, with K from 1 to N, such as 2/3")
    items[:] = [i for i in items if zlib.crc32(i.path.name.encode()) % parts == part - 1]


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        teams.end()
