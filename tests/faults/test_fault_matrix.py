"""The faults that trainings meet, and where they strike: each cell has a test, or cannot be.

A fault at a place is a cell, and so is a fault with a way to synchronise, or among a number of
ranks. Faults that end a rank are drawn in all combinations by tests/fuzz/random_faults.
"""

import ast
import itertools
from functools import cache
from pathlib import Path

import pytest

from tests.faults import test_faults
from tests.faults.fault_table import FAULTS, PLACES, REASONS, WAYS, WHERE, WORLDS, in_matrix, jobs
from tests.faults.test_cut_link import CUTS
from tests.faults.test_full_disk import WAYS as DISK_WAYS
from tests.fuzz.random_faults.schedule import PLACES as DRAWN_PLACES
from tests.fuzz.random_faults.schedule import Schedule

ENDS = ("kill", "raise", "exit")
DRAWN = 1100  # schedules
# Tests beside test_faults.py, and what each of their cases shows: fault, place, way, ranks.
ELSEWHERE = {
    "test_replicas.py::test_a_flipped_bit_of_a_weight_is_found_at_the_next_comparison": [
        ("flipped bit", "forward", "fp32", 4),
        ("flipped bit", "forward", "int8", 3),
        ("flipped bit", "forward", "zero1", 3),
        ("flipped bit", "forward", "zero2", 4),
    ],
    "test_replicas.py::test_a_repair_leaves_no_trace": [
        ("flipped bit", "backward", "fp32", 3),
        ("flipped bit", "backward", "int8", 3),
        ("flipped bit", "backward", "zero1", 3),
        ("flipped bit", "backward", "zero2", 3),
    ],
    "test_replicas.py::test_two_ranks_have_no_majority": [
        ("flipped bit", "forward", "fp32", 2),
    ],
    "test_cut_link.py::test_the_rank_that_cannot_be_reached_is_named": [
        ("cut link", *cut, 3) for cut in CUTS
    ],
    "test_full_disk.py::test_every_rank_learns_whose_disk_is_full_and_trains_on": [
        ("full disk", "checkpoint", way, world) for way, (world, *_) in DISK_WAYS.items()
    ],
}
# Numbers of ranks that a fault needs no test with.
ENOUGH = {
    ("cut link", 2): "either of two ranks is cut off from the other: it looks like a stop",
    ("cut link", 4): "as with three",
}


def cells():
    """Fault, and where, with which way, or among how many ranks."""
    return list(itertools.product(FAULTS, (*PLACES, *WAYS, *WORLDS)))


@cache
def known_tests():
    """Each cell that has tests, with their names."""
    found = {}
    names = {short: fault for fault, shorts in FAULTS.items() for short in shorts}
    for short, *others in test_faults.JOBS:
        job = "-".join(map(str, (short, *others)))
        for other in others:
            found.setdefault((names[short], in_matrix(other)), []).append(job)
    for test, shown in ELSEWHERE.items():
        for fault, *others in shown:
            for other in others:
                found.setdefault((fault, other), []).append(test)
    return found


def reason(fault, other):
    """Return why there is no such cell, or need be none."""
    impossible = other in PLACES and other not in WHERE.get(fault, PLACES)
    return REASONS[fault] if impossible else ENOUGH.get((fault, other))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_cell_has_a_test_or_cannot_be(fault):
    bare = [c for c in cells() if c[0] == fault and c not in known_tests() and not reason(*c)]
    assert not bare, "cells without a test"


def test_no_reason_is_given_for_what_is_tested():
    assert not [pair for pair in known_tests() if reason(*pair)]
    assert set(REASONS) == set(WHERE) <= set(FAULTS)


def test_a_cell_of_each_pair_is_among_those_that_are_run():
    """By tests/faults/fault_cells.py, all of them."""
    run = {(job[0], other) for job in jobs() for other in map(in_matrix, job[1:])}
    names = {short: fault for fault, shorts in FAULTS.items() for short in shorts}
    pairs = {(names[short], other) for short, other in run}
    assert pairs >= {cell for cell in cells() if not reason(*cell)}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_named_tests_exist(name):
    path, _, function = name.partition("::")
    tree = ast.parse(Path(__file__).with_name(path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_faults_that_end_a_rank_are_drawn_with_every_way_and_number_of_ranks():
    drawn = [Schedule.draw(number) for number in range(DRAWN)]
    assert set(itertools.product(ENDS, WAYS, WORLDS)) <= {
        (s.fault, s.wrapper, s.world) for s in drawn
    }
    assert set(itertools.product(ENDS, DRAWN_PLACES)) <= {(s.fault, s.place) for s in drawn}
