"""Trainings with faults at drawn places and times: none hangs, and no rank ends with other weights.

One schedule again: python -m tests.fuzz.random_faults --case N
"""

import pytest

from tests.fuzz.random_faults.schedule import Schedule
from tests.fuzz.random_faults.team import Tally
from tests.helpers.scripts import Forked, finish_all

FEW, MANY = 1, 42


def check(first, count, at_once=1):
    """Processes share the schedules, whose ranks mostly wait."""
    each = count // at_once
    assert each * at_once == count
    given = ("--count", each, "--seconds", 600)
    starts = range(first, first + count, each)
    processes = [Forked("tests.fuzz.random_faults", "--start", first, *given) for first in starts]
    for output in finish_all(processes, timeout=700):
        assert f" {each} schedules" in output, output


def test_a_few_schedules():
    check(0, FEW)


@pytest.mark.slow
def test_many_schedules():
    check(FEW, MANY, at_once=2)


def test_a_tally_counts_what_failed_and_is_continued(tmp_path):
    drawn = [Schedule.draw(number) for number in range(200)]
    first, second, third = [s.number for s in drawn if s.fault == "kill"][:3]
    wrong = {str(second): ["rank 0 hangs"], str(third): ["rank 1 has other weights after step 3"]}
    Tally([first], {"kill": [0.5, 0.1, 0.2]}, wrong).write(tmp_path / "tally")
    tally = Tally.read(tmp_path / "tally")
    assert [n for n in range(third + 1) if tally.has(n)] == [first, second, third]
    fault, count, *places, hang, unequal, rest, middle, nearly, most = next(tally.rows())
    assert (fault, count, hang, unequal, rest) == ("kill", "3", "1", "1", "0")
    assert sum(map(int, places)) == 3 and (middle, nearly, most) == ("0.20", "0.50", "0.50")
