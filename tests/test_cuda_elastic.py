"""Trainings on GPUs that outlive their ranks: the weights of the rest, as in test_elastic.py."""

import pytest

from tests.devices import needs_gpu
from tests.test_elastic import check, outcomes_of

pytestmark = needs_gpu
# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "forward": (3, [(1, 2, "forward")], {}),
    "before": (3, [(2, 3, "before")], {}),
    "between": (4, [(2, 3, "between")], {"destroys": True}),
    "after": (3, [(1, 2, "after")], {}),
    "optimizer": (3, [(1, 2, "optimizer")], {}),
    "first-rank": (3, [(0, 3, "between")], {}),
    "first-step": (3, [(0, 0, "after")], {}),
    "two-to-one": (2, [(1, 3, "after")], {}),
    "one-by-one": (4, [(1, 2, "after"), (3, 4, "before")], {}),
    "two-at-once": (4, [(1, 2, "forward"), (3, 2, "between")], {}),
    "raises": (3, [(2, 2, "forward")], {"fails": True}),
    "accumulates": (3, [(1, 2, "between")], {"local": True}),
    "copies": (3, [(1, 2, "after")], {"options": {"gradient_as_bucket_view": False}}),
    "streams": (3, [(1, 2, "between")], {"streams": True}),
    "streams-accumulates": (3, [(1, 3, "after")], {"streams": True, "local": True}),
    "wide": (3, [(1, 2, "between")], {"width": 1024}),
    "sum": (3, [(1, 2, "between")], {"elastic": {"rescale": "sum_of_start"}, "divisor": 3}),
    "bf16": (3, [(1, 2, "between")], {"options": {"wire": {"format": "bf16", "form": "native"}}}),
}


def at_once(cases, number=3):
    """Of each batch of cases that ranks run at the same time, the names."""
    names = list(cases)
    return [names[first : first + number] for first in range(0, len(names), number)]


@pytest.mark.parametrize("names", at_once(CASES), ids=", ".join)
def test_survivors_weights_are_those_of_fewer_ranks(tmp_path, names):
    """Over Gloo, which moves what lies on GPUs."""
    cases = {}
    for name in names:
        world, deaths, options = CASES[name]
        cases[name] = (world, deaths, {**options, "device": "cuda"})
    for outcome in outcomes_of(tmp_path, cases).values():
        check(outcome)
        assert outcome.changes[-1][1] == outcome.left
