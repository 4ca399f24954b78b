"""Slow cases, and ranks that the tests of a file share.

`@pytest.mark.slow` leaves a test to `make test-all`; `slow("a", "b")` those of its cases alone,
`slow(but=("a", "b"))` all cases but those, and `slow(turns="stage")` all but one stage for each
combination of the other parameters, which take stages in turns. `--part 2/3` runs the second third
of the files. Files begin with those that take longest, so that none is begun last and waited for.
"""

import operator
import signal
import zlib
from collections import Counter

import pytest

from tests.helpers import teams

# Files whose few tests take long, the longest first.
LONG = (
    "test_simulated_features.py",
    "test_mpi_training.py",
    "test_random.py",
    "test_simulated_faults.py",
    "test_mpi_launch.py",
    "test_fsdp_compile.py",
    "test_dtensor_states.py",
    "test_random_faults.py",
    "test_zero_dtensors.py",
    "test_random_sync.py",
    "test_random_membership.py",
    "test_zero_models.py",
    "test_elastic_zero.py",
    "test_mpi_errors.py",
    "test_preemption.py",
    "test_dispatched_ops.py",
    "test_lost_store.py",
    "test_cut_link.py",
    "test_zero_page.py",
)


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
            turns = "turns" in mark.kwargs and _has_its_turn(item, mark.kwargs["turns"])
            if turns or case in but or (mark.args and case not in mark.args):
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
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (_place_in_line(item), -counts[item.path], str(item.path)))


def _place_in_line(item):
    return LONG.index(item.path.name) if item.path.name in LONG else len(LONG)


def _has_its_turn(item, name):
    """Return whether a case is the one that make test runs of those that differ in `name` alone."""
    turn, place, count = 0, 0, 0
    for names, values in (mark.args for mark in item.iter_markers("parametrize")):
        if names == name:
            place, count = _place_of(item, [names], values), len(values)
        else:
            turn += _place_of(item, [names] if isinstance(names, str) else names, values)
    if not count:
        raise pytest.UsageError(f"{item.nodeid}: slow(turns={name!r}), but there is no {name!r}")
    return place == turn % count


def _place_of(item, names, values):
    """Return the position of a case's parameters among the values of a parametrize()."""
    given = [item.callspec.params[name] for name in names]
    rows = [[value] if len(names) == 1 else list(value) for value in values]
    return next(i for i, row in enumerate(rows) if all(map(operator.is_, row, given)))


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        teams.end()
