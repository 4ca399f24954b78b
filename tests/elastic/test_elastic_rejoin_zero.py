"""Ranks that come back to a training whose optimizer's state is shared.

All must have, bit for bit, the weights and the state of a training without sharing and without
elastic= that has had those ranks from those steps on. Deaths after a return show that the copies of
each share are complete again.
"""

import pytest

from tests.elastic.test_elastic_rejoin import drawn, outcomes_of, run
from tests.helpers.scripts import cases_asked_for

SCRIPT = "tests.elastic.rejoin_zero_script"
PLAIN = {"zero": 0, "sharing": [], "used": False, "passes": "all"}
GLOO = {"memory": False}
# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "one": (3, [(1, 3, "between")], {}),
    "stage-2": (3, [(1, 3, "optimizer")], {"zero": 2, "local": True}),
    "first-rank-gloo": (4, [(0, 2, "after")], {**GLOO, "zero": 2, "optimizer": "momentum"}),
    "two-to-one": (2, [(1, 2, "after")], {"buffers": True}),
    "two-to-one-gloo": (2, [(0, 3, "between")], {**GLOO, "halves": True}),
    "both": (4, [(0, 3, "between"), (2, 3, "between")], {}),
    "down-to-one-gloo": (3, [(1, 2, "forward"), (2, 4, "between")], GLOO),
    "halves": (3, [(1, 2, "between")], {"halves": True, "optimizer": "momentum"}),
    "tensors": (3, [(2, 2, "between")], {"optimizer": "Adafactor"}),
    "masters": (3, [(1, 2, "between")], {"masters": True}),
    "wire-to-one": (2, [(1, 2, "between")], {"wire": "int8", "halves": True}),
    "wire-masters-gloo": (3, [(0, 2, "between")], {**GLOO, "wire": "int8", "masters": True}),
    "joins": (2, [], {"joins": 1, "zero": 1, "halves": True}),
    "joins-gloo": (3, [(0, 3, "between")], {**GLOO, "joins": 1, "zero": 2}),
    "wrapped-gloo": (3, [(1, 2, "between")], {**GLOO, "passes": "wrapped", "every": 3}),
    "used-before": (3, [(1, 2, "between")], {"used": True, "halves": True}),
}


def trained(folder, cases):
    cases = {n: (world, deaths, {"zero": 1, **own}) for n, (world, deaths, own) in cases.items()}
    return outcomes_of(folder, cases, SCRIPT, PLAIN)


def check(outcome):
    outcome.check()
    for (rank, attempt), seen in outcome.seen.items():
        assert seen.get("state") in (None, outcome.expected.seen[rank, 0]["state"]), (rank, attempt)
    assert {rank for (rank, _), seen in outcome.seen.items() if "state" in seen} == {*outcome.world}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Return the outcome of each case that a test of this run asks for."""
    return trained(tmp_path_factory.mktemp("rejoin-zero"), cases_asked_for(request, CASES))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_and_states_are_those_of_a_training_with_as_many_ranks(outcomes, case):
    outcome = outcomes[case]
    outcome.check_returns()
    check(outcome)


# Deaths of ranks that have been there, or have come back, once all have been there again.
AGAIN = {
    "who-came-back": (3, [(1, 2, "between")], {"again": [(1, 1, 3, "between")]}),
    "next-gloo": (4, [(1, 2, "between")], {**GLOO, "again": [(2, 0, 2, "after")]}),
    "before": (3, [(1, 2, "between")], {"again": [(0, 0, 2, "optimizer")], "zero": 2}),
    "at-once-gloo": (3, [(0, 2, "between")], {**GLOO, "again": [(1, 0, 0, "forward")]}),
    "again-masters": (3, [(2, 2, "after")], {"masters": True, "again": [(0, 0, 1, "optimizer")]}),
}


@pytest.fixture(scope="module")
def again(tmp_path_factory, request):
    return trained(tmp_path_factory.mktemp("again"), cases_asked_for(request, AGAIN))


@pytest.mark.slow
@pytest.mark.parametrize("case", AGAIN)
def test_the_copies_of_each_share_are_complete_after_a_return(again, case):
    outcome = again[case]
    outcome.check_returns()
    check(outcome)
    world = list(range(outcome.job["world"]))
    (rank, _, _, _) = outcome.job["again"][0]
    assert [ranks for _, ranks in outcome.members if ranks == world] == [world] * 3
    assert [r for r in world if r != rank] in [ranks for _, ranks in outcome.members]


ODD = {
    "joining_rank-sharing": (3, [(1, 2, "between")], {"sharing": [(1, 1, "sharing")]}),
    "joining_rank-shared-gloo": (3, [(0, 2, "between")], {**GLOO, "sharing": [(0, 1, "shared")]}),
    "other-sharing": (4, [(1, 2, "between")], {"sharing": [(3, 0, "sharing")]}),
    "giver-sharing-gloo": (3, [(1, 2, "between")], {**GLOO, "sharing": [(0, 0, "sharing")]}),
    "other-shared": (4, [(2, 2, "between")], {"sharing": [(1, 0, "shared")]}),
    "joining_rank-taking": (3, [(1, 2, "between")], {"odd": {"1": "dies taking"}}),
    "giver-giving": (3, [(1, 2, "between")], {"giver_dies": True}),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory, request):
    return trained(tmp_path_factory.mktemp("odd"), cases_asked_for(request, ODD))


@pytest.mark.slow
@pytest.mark.parametrize("case", ODD)
def test_a_death_during_a_return_is_survived_and_all_come_back(odd, case):
    check(odd[case])
    assert not odd[case].errors


@pytest.mark.slow
def test_an_optimizer_that_catch_up_was_not_given_is_named_on_the_rank_that_comes_back(tmp_path):
    job = {"world": 2, "deaths": [(1, 2, "between")], "zero": 1}
    jobs = [(passes, {**job, "passes": passes}) for passes in ("schedules", "within")]
    for outcome in run(tmp_path, jobs, SCRIPT).values():
        assert outcome.ended_well == [0], outcome.said
        (error,) = outcome.errors
        assert "share the state of an optimizer, AdamW, which catch_up() was not given" in error


@pytest.mark.slow
def test_deaths_and_returns_at_any_time(tmp_path):
    for outcome in trained(tmp_path, {f"{s}": drawn(s) for s in range(4)}).values():
        check(outcome)
        assert not outcome.errors, outcome.said
