"""Trainings with faults at drawn places and times: none hangs, and no rank ends with other weights.

One schedule again: python -m tests.random_faults --case N
"""

import pytest

from tests.scripts import finish_all, start

FEW, MANY = 3, 40


def check(first, count, at_once=1):
    """Processes share the schedules, whose ranks mostly wait."""
    each = count // at_once
    assert each * at_once == count
    given = ("--count", each, "--seconds", 600)
    starts = range(first, first + count, each)
    processes = [start("tests.random_faults", "--start", first, *given) for first in starts]
    for output in finish_all(processes, timeout=700):
        assert f" {each} schedules" in output, output


def test_a_few_schedules():
    check(0, FEW)


@pytest.mark.slow
def test_many_schedules():
    check(FEW, MANY, at_once=2)
