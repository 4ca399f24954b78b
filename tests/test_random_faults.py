"""Trainings with faults at drawn places and times: none hangs, and no rank ends with other weights.

One schedule again: python -m tests.random_faults --case N
"""

import pytest

from tests.scripts import finish, start

FEW, MANY = 3, 40


def check(first, count):
    given = ("--start", first, "--count", count, "--seconds", 600)
    output = finish(start("tests.random_faults", *given), timeout=700)
    assert f" {count} schedules" in output, output


def test_a_few_schedules():
    check(0, FEW)


@pytest.mark.slow
def test_many_schedules():
    check(FEW, MANY)
