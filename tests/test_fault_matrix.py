"""The faults that trainings meet, and where they strike: each cell has a test, or cannot be.

A fault at a place is a cell, and so is a fault with a way to synchronise, or among a number of
ranks. Faults that end a rank are drawn in all combinations by tests/random_faults.
"""

import ast
import itertools
from functools import cache
from pathlib import Path

import pytest

from tests import test_faults
from tests.random_faults.schedule import PLACES as DRAWN_PLACES
from tests.random_faults.schedule import Schedule

WAYS = ("fp32", "int8", "zero1", "zero2")
WORLDS = (2, 3, 4)
# "pieces": between two collectives of a bucket.
PLACES = ("forward", "backward", "pieces", "vote", "wrap", "checkpoint")
# As the jobs of tests/test_faults.py call them.
FAULTS = {
    "kill -9": ("kill",),
    "SIGSTOP": ("stop",),
    "sleep": ("sleep",),
    "exception": ("raise",),
    "early exit": ("exit", "leave", "fade"),
    "skipped batch": ("skip",),
    "one step fewer": ("fewer",),
    "thaw alone": ("thaw",),
    "other shapes": ("shapes",),
    "other order": ("order",),
    "other settings": ("settings",),
    "NaN": ("nan",),
    "flipped bit": (),
    "cut link": (),
    "full disk": (),
    "no store": ("store",),
}
ENDS = ("kill", "raise", "exit")
DRAWN = 1100  # schedules
# Tests beside tests/test_faults.py: of which fault, where, and with what.
ELSEWHERE = {
    "tests/test_replicas.py::test_a_flipped_bit_of_a_weight_is_found_at_the_next_comparison": (
        "flipped bit",
        ("forward",),
        WAYS,
        (3, 4),
    ),
    "tests/test_replicas.py::test_a_repair_leaves_no_trace": (
        "flipped bit",
        ("backward",),
        ("fp32", "int8", "zero1"),
        (3,),
    ),
    "tests/test_replicas.py::test_two_ranks_have_no_majority": (
        "flipped bit",
        ("forward",),
        ("fp32",),
        (2,),
    ),
    "tests/test_cut_link.py::test_the_rank_that_cannot_be_reached_is_named": (
        "cut link",
        ("forward", "backward"),
        WAYS,
        (3,),
    ),
    "tests/test_full_disk.py::test_every_rank_learns_whose_disk_is_full_and_trains_on": (
        "full disk",
        ("checkpoint",),
        WAYS,
        WORLDS,
    ),
}
_COMPARED = "settings and parameters are compared where the model is wrapped"
_LOOP = "a script leaves out a batch in its forward or backward"
_NO_GRADIENT = "no gradient is computed there"
_ONCE = "what flips at any time is found at the next comparison, which comes behind a backward"
_STOPPED = "to the others that rank has stopped, and they see a stop at this place"
# Cells that cannot be, or are others under another name; `None`: at any other place.
REASONS = {
    ("skipped batch", None): _LOOP,
    ("one step fewer", None): "a script leaves its loop between two steps",
    ("thaw alone", None): "a thaw takes effect in the vote on a plan",
    ("other shapes", None): _COMPARED,
    ("other order", None): _COMPARED,
    ("other settings", None): _COMPARED,
    ("NaN", None): _NO_GRADIENT,
    ("flipped bit", None): _ONCE,
    ("cut link", None): _STOPPED,
    (
        "cut link",
        2,
    ): "either of two ranks is cut off from the other: the errors are those of a stop",
    ("cut link", 4): "as with three",
    ("full disk", None): "nothing else writes to a disk",
    ("no store", "forward"): "nobody needs the store there, as in a backward",
    ("no store", "pieces"): "nobody needs the store there, as in a backward",
}


def cells():
    """Fault, and where, with which way, or among how many ranks."""
    return list(itertools.product(FAULTS, (*PLACES, *WAYS, *WORLDS)))


def in_matrix(value):
    """What a job calls "between" or "loop" makes the others wait in the next forward."""
    renamed = {"between": "forward", "loop": "forward", "groups": "wrap", "before": "wrap"}
    renamed |= {"arrived": "wrap", "unlinked": "wrap", "connect": "wrap"}
    renamed |= {"wrapped": "wrap"}
    renamed |= {"nonfinite": "vote", "skips": "vote", "codec": "int8"}
    return renamed.get(value, value)


@cache
def known_tests():
    """Each cell that has tests, with their names."""
    found = {}
    names = {short: fault for fault, shorts in FAULTS.items() for short in shorts}
    for short, *others in test_faults.JOBS:
        job = "-".join(map(str, (short, *others)))
        for other in others:
            found.setdefault((names[short], in_matrix(other)), []).append(job)
    for test, (fault, *lists) in ELSEWHERE.items():
        for other in itertools.chain(*lists):
            found.setdefault((fault, other), []).append(test)
    return found


def reason(fault, other):
    place = None if other in PLACES else other
    return REASONS.get((fault, other)) or REASONS.get((fault, place))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_cell_has_a_test_or_cannot_be(fault):
    bare = [c for c in cells() if c[0] == fault and c not in known_tests() and not reason(*c)]
    assert not bare, "cells without a test"


def test_no_reason_is_given_for_what_is_tested():
    named = [pair for pair in REASONS if pair[1] is not None]
    assert not [pair for pair in named if pair in known_tests()]
    assert {fault for fault, _ in REASONS} <= set(FAULTS)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_named_tests_exist(name):
    path, _, function = name.partition("::")
    tree = ast.parse((Path(__file__).parents[1] / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_lists_of_jobs_are_those_that_tests_take():
    taken = set()
    for name, function in vars(test_faults).items():
        for mark in getattr(function, "pytestmark", ()) if name.startswith("test_") else ():
            if mark.name == "parametrize" and mark.args[0] == "job":
                taken.update(mark.args[1])
    assert taken == set(test_faults.JOBS)


def test_faults_that_end_a_rank_are_drawn_with_every_way_and_number_of_ranks():
    drawn = [Schedule.draw(number) for number in range(DRAWN)]
    assert set(itertools.product(ENDS, WAYS, WORLDS)) <= {
        (s.fault, s.wrapper, s.world) for s in drawn
    }
    assert set(itertools.product(ENDS, DRAWN_PLACES)) <= {(s.fault, s.place) for s in drawn}
