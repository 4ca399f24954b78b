"""Trainings in wire formats that survive the death of ranks, and the residuals of their error
feedback.

After each step the survivors must have, bit for bit, the weights and the residuals of a training
without elastic= that goes on with their own residuals, and without those of the dead.
"""

import random

import pytest

from tests.elastic.elastic_script import TIMEOUT
from tests.elastic.test_elastic import check, outcomes_of
from tests.elastic.test_elastic_rejoin import outcomes_of as returns_of
from tests.helpers.scripts import cases_asked_for

SCRIPT = "tests.elastic.elastic_races"


def wire(name, **settings):
    settings = {"error_feedback": True, **settings}
    return {"options": {"wire": {"format": name, **settings}}}


INT8, E4M3, E5M2, INT4 = map(wire, ("int8", "fp8_e4m3", "fp8_e5m2", "int4"))
GLOO = {"memory": False}
PIECES = {"width": 400, **wire("int8", piece_bytes=20_000)}  # some ten for each layer
# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "int8-forward": (3, [(1, 2, "forward")], INT8),
    "int8-before": (4, [(2, 3, "before")], {**INT8, **GLOO}),
    "int8-between": (3, [(1, 2, "between")], INT8),
    "int8-between-of-four": (4, [(0, 3, "between")], {**INT8, **GLOO, "destroys": True}),
    "int8-after": (4, [(3, 2, "after")], INT8),
    "int8-sending": (3, [(1, 3, "sending")], INT8),
    "int8-optimizer": (4, [(1, 2, "optimizer")], INT8),
    "int8-first-step": (3, [(2, 0, "between")], INT8),
    "int8-two-to-one": (2, [(0, 2, "between")], INT8),
    "int8-one-by-one": (4, [(3, 1, "between"), (0, 3, "forward")], INT8),
    "int8-down-to-one": (3, [(1, 2, "between"), (0, 4, "between")], {**INT8, **GLOO}),
    "int8-two-at-once": (4, [(1, 2, "forward"), (3, 2, "between")], INT8),
    "int8-raises": (3, [(1, 2, "forward")], {**INT8, "fails": True}),
    "int8-accumulates": (3, [(1, 2, "between")], {**INT8, "local": True}),
    "int8-sum": (
        3,
        [(1, 2, "between")],
        {**INT8, "elastic": {"rescale": "sum_of_start"}, "divisor": 3},
    ),
    "int8-at-random": (4, [(1, 2, "after")], wire("int8", stochastic=True)),
    "int8-gathered": (4, [(1, 2, "between")], wire("int8", form="gather")),
    "int8-pieces": (3, [(1, 2, "between")], PIECES),
    "int8-pieces-sending": (4, [(2, 3, "sending")], PIECES),
    "e4m3-forward": (4, [(1, 2, "forward")], E4M3),
    "e4m3-between": (3, [(0, 2, "between")], {**E4M3, **GLOO, "destroys": True}),
    "e4m3-after": (3, [(1, 2, "after")], E4M3),
    "e4m3-sending": (4, [(3, 2, "sending")], E4M3),
    "e5m2-between": (4, [(2, 3, "between")], E5M2),
    "int4-after": (3, [(1, 3, "after")], INT4),
    "warming-up": (3, [(1, 2, "between")], wire("int8", warmup_steps=3)),
    "warmed-up": (4, [(1, 3, "between")], wire("int8", warmup_steps=3)),
    "some-fp32": (3, [(1, 2, "between")], wire("int8", overrides={"*bias": "fp32"})),
    "without-feedback": (3, [(1, 2, "after")], wire("int8", error_feedback=False)),
    "bf16": (4, [(1, 2, "between")], wire("bf16")),
}
# A rank dies while others rebuild.
REBUILDS = {
    "int8-links": (4, [(1, 2, "between"), (3, 2, "links")], INT8),
    "int8-links-first": (4, [(1, 2, "after"), (0, 2, "links")], {**INT8, **GLOO}),
    "e4m3-plans": (4, [(1, 2, "between"), (0, 2, "plans")], E4M3),
    "int8-gathers": (4, [(1, 2, "between"), (3, 2, "gathers")], INT8),
    "warm-links": (3, [(1, 2, "links")], wire("int8", warmup_steps=3)),
}
# Rank 1 dies when the others have all averages of step 3, and none has their votes.
TAKES = {
    "int8-sent": (3, [(1, 3, "sent")], INT8),
    "int8-sent-of-four": (4, [(1, 3, "sent")], {**INT8, **GLOO}),
    "e4m3-sent": (3, [(1, 3, "sent")], E4M3),
    "e4m3-sent-to-one": (2, [(1, 3, "sent")], E4M3),
    "int8-sent-then-connects": (4, [(1, 3, "sent"), (2, 3, "connects")], INT8),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Return the outcome of each case that a test of this run asks for."""
    wanted = cases_asked_for(request, {**CASES, **REBUILDS, **TAKES})
    return outcomes_of(tmp_path_factory.mktemp("wires"), wanted, SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *REBUILDS])
def test_survivors_weights_and_residuals_are_those_of_fewer_ranks(outcomes, case):
    outcome = outcomes[case]
    check(outcome)
    assert outcome.changes[-1][1] == outcome.left
    if len(outcome.left) > 1:
        for rank in outcome.left:  # who rebuilds has less patience
            assert outcome.seen[rank]["patience"] == [TIMEOUT, TIMEOUT]


@pytest.mark.slow
def test_chains_that_hang_harm_nobody_who_ends(tmp_path):
    """Each rank's end closes connections, which wakes chains in those that are still ending."""
    cases = {name: CASES[name] for name in ("int8-pieces-sending", "int8-between-of-four")}
    cases["gloo"] = (4, [(2, 3, "sending")], {**PIECES, **GLOO})
    for outcome in outcomes_of(tmp_path, cases, "tests.elastic.elastic_exits").values():
        check(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("case", TAKES)
def test_averages_that_are_taken_bring_their_residuals(outcomes, case):
    outcome = outcomes[case]
    check(outcome)
    assert outcome.changes == [[5, outcome.left]], outcome.said


def drawn(seed):
    """Deaths of one or two of three or four ranks, at any time of a step in many pieces."""
    draw = random.Random(seed)
    world = draw.choice((3, 4))
    dead = draw.sample(range(world), draw.choice((1, 2)))
    deaths = [(rank, draw.randrange(1, 6), round(draw.uniform(0, 60), 1)) for rank in dead]
    settings = wire(draw.choice(("int8", "fp8_e4m3")), piece_bytes=20_000)
    return world, deaths, {"width": 400, "memory": draw.random() < 0.5, **settings}


@pytest.mark.slow
def test_deaths_at_any_time(tmp_path):
    """Wherever that finds the ranks; perhaps at their end."""
    cases = {f"{seed}": drawn(seed) for seed in range(8)}
    for name, outcome in outcomes_of(tmp_path, cases, SCRIPT).items():
        assert None not in outcome.codes, (name, outcome.said)
        check(outcome)


RETURNS = {
    "int8": (3, [(1, 3, "between")], INT8),
    "e4m3-of-four": (4, [(2, 3, "forward")], {**E4M3, **GLOO, "buffers": True}),
    "int8-two-to-one": (2, [(0, 3, "between")], INT8),
    "e4m3-both": (3, [(0, 3, "between"), (2, 3, "between")], E4M3),
    "int8-one-by-one": (3, [(1, 2, "between"), (2, 5, "between")], {**INT8, **GLOO}),
    "int8-at-random": (3, [(1, 3, "after")], wire("int8", stochastic=True)),
    "int8-loads": (3, [(1, 3, "between")], {**INT8, "odd": {"1": "loads a checkpoint"}}),
    "int8-joins": (2, [], {**INT8, "joins": 1}),
    "e4m3-join-and-back": (3, [(0, 3, "between")], {**E4M3, **GLOO, "joins": 2, "buffers": True}),
    "other-wire-joins": (2, [], {**INT8, "wires": {"2": {"format": "int4"}}, "joins": 1}),
    "other-wire": (3, [(1, 4, "between")], {**INT8, "wires": {"2": {"format": "int4"}}}),
}


@pytest.fixture(scope="module")
def returns(tmp_path_factory, request):
    wanted = cases_asked_for(request, RETURNS, "back")
    return returns_of(tmp_path_factory.mktemp("returns"), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("back", RETURNS)
def test_a_rank_that_comes_back_keeps_nothing_back_and_the_others_what_they_have(returns, back):
    returns[back].check_returns()
