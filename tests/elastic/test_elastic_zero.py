"""Sharded optimizers that survive ranks: real processes, real signals, and the weights of the rest.

The survivors must have, bit for bit, the weights and the optimizer's state of a training without
sharing whose ranks are theirs from the step on that they say. Wherever a rank dies.
"""

import re

import pytest

from tests.elastic.elastic_script import ANY, STEPS
from tests.elastic.elastic_zero_script import PLACES
from tests.elastic.test_elastic import check, drawn, errors, outcomes_of
from tests.helpers.scripts import cases_asked_for

SCRIPT = "tests.elastic.elastic_zero_script"
PLAIN = {"zero": 0, "lags": [], "loads": -1}
GLOO = {"memory": False}
# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "forward": (3, [(1, 2, "forward")], {}),
    "before-gloo": (4, [(2, 3, "before")], GLOO),
    "between": (3, [(0, 2, "between")], {"clips": True}),
    "after-gloo": (3, [(2, 2, "after")], {**GLOO, "zero": 2, "destroys": True}),
    "optimizer": (4, [(1, 2, "optimizer")], {"clips": True}),
    "optimizer-gloo": (3, [(0, 2, "optimizer")], {**GLOO, "destroys": True}),
    "stepping": (4, [(2, 2, "stepping")], {}),
    "stepping-gloo": (3, [(1, 3, "stepping")], GLOO),
    "sending": (3, [(1, 2, "sending")], {}),
    "sending-gloo": (4, [(3, 2, "sending")], {**GLOO, "destroys": True}),
    "first-step": (3, [(1, 0, "stepping")], {}),
    "first-step-gloo": (4, [(0, 0, "sending")], GLOO),
    "before-the-first": (3, [(1, 0, "between")], {}),
    "two-to-one": (2, [(0, 2, "stepping")], {}),
    "two-to-one-gloo": (2, [(1, 2, "forward")], GLOO),
    "lag": (4, [(3, 2, "stepping")], {"lags": [(1, 2)], "clips": True}),
    "lag-gloo": (4, [(0, 2, "stepping")], {**GLOO, "lags": [(2, 2)]}),
    "lag-first-step": (4, [(3, 0, "stepping")], {"lags": [(0, 0)]}),
    "lag-halves": (4, [(3, 2, "stepping")], {"lags": [(1, 2)], "halves": True}),
    "one-by-one": (4, [(3, 1, "between"), (0, 3, "sending")], {}),
    "one-by-one-gloo": (4, [(1, 1, "stepping"), (2, 3, "forward")], GLOO),
    "down-to-one": (4, [(1, 1, "after"), (2, 2, "sending"), (0, 4, "stepping")], {}),
    "two-at-once": (4, [(0, 2, "forward"), (2, 2, "between")], {}),
    "dies-while-sharing": (4, [(1, 2, "forward"), (3, ANY, "sharing")], {}),
    "dies-while-sharing-gloo": (4, [(2, 2, "stepping"), (0, ANY, "sharing")], GLOO),
    "dies-once-shared": (4, [(1, 2, "sending"), (2, ANY, "shared")], {}),
    "dies-late": (4, [(3, 2, "stepping"), (1, ANY, "late")], {"lags": [(0, 2)]}),
    "momentum": (3, [(1, 2, "sending")], {"optimizer": "momentum"}),
    "fused": (3, [(1, 2, "stepping")], {"optimizer": "fused"}),
    "tensors": (3, [(2, 2, "stepping")], {"optimizer": "Adafactor"}),
    "tensors-gloo": (4, [(1, 2, "forward")], {**GLOO, "optimizer": "Adafactor"}),
    "halves": (3, [(1, 2, "stepping")], {"halves": True}),
    "masters": (3, [(1, 2, "stepping")], {"masters": True}),
    "masters-gloo": (4, [(2, 2, "between"), (1, 4, "sending")], {**GLOO, "masters": True}),
    "wire": (3, [(1, 2, "stepping")], {"wire": "int8"}),
    "wire-gloo": (4, [(3, 2, "sending"), (1, 4, "forward")], {**GLOO, "wire": "bf16"}),
    "wire-lag": (4, [(3, 2, "stepping")], {"lags": [(1, 2)], "wire": "int8", "halves": True}),
    "wire-to-one": (2, [(0, 2, "stepping")], {"wire": "int8"}),
    "wire-masters": (3, [(1, 2, "stepping")], {"wire": "int8", "masters": True}),
    "accumulates": (3, [(1, 2, "stepping")], {"local": True, "zero": 2}),
    "raises": (3, [(1, 2, "stepping")], {"fails": True}),
    "sum": (3, [(1, 2, "sending")], {"elastic": {"rescale": "sum_of_start"}, "divisor": 3}),
    "last-step": (4, [(1, 5, "stepping")], {}),
    "collecting": (4, [(2, 1, "after"), (1, 5, "collecting")], {}),
    "collecting-gloo": (3, [(0, 5, "collecting")], GLOO),
    "loads": (3, [(1, 3, "stepping")], {"loads": 2}),
}


def trained(folder, cases):
    cases = {n: (world, deaths, {"zero": 1, **own}) for n, (world, deaths, own) in cases.items()}
    return outcomes_of(folder, cases, SCRIPT, PLAIN)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    return trained(tmp_path_factory.mktemp("elastic-zero"), cases_asked_for(request, CASES))


def check_states(outcome):
    for rank in outcome.left:
        assert outcome.seen[rank]["state"] == outcome.expected[rank]["state"], outcome.said


@pytest.mark.slow(but=("stepping",))
@pytest.mark.parametrize("case", CASES)
def test_survivors_weights_and_states_are_those_of_fewer_ranks(outcomes, case):
    outcome = outcomes[case]
    check(outcome)
    # Who reads what a rank has that has died asks the next one, and all go on at their next step.
    assert case.startswith("collecting") or outcome.changes[-1][1] == outcome.left
    check_states(outcome)


@pytest.mark.slow
def test_deaths_at_any_time(tmp_path):
    """Wherever that finds the ranks: two neighbours in one step are too many, and no others."""
    for name, outcome in trained(tmp_path, {f"{s}": drawn(s) for s in range(8)}).items():
        assert None not in outcome.codes, (name, outcome.said)
        lost = [rank for rank in outcome.left if "so it is lost" in errors_of(outcome, rank)]
        if not lost:
            check(outcome)
            continue
        dead = sorted(rank for rank, _, _ in outcome.job["deaths"])
        assert lost == outcome.left and dead in ([0, 1], [1, 2], [2, 3], [0, 3]), outcome.said


def errors_of(outcome, rank):
    return outcome.seen[rank].get("error", "")


@pytest.mark.slow
@pytest.mark.parametrize("memory", [True, False])
def test_the_death_of_both_that_have_a_share_is_named_by_all(tmp_path, memory):
    deaths = [(0, 2, "between"), (1, 2, "between")]
    texts = errors(tmp_path, SCRIPT, world=4, deaths=deaths, zero=1, memory=memory)
    assert len(texts) == 2
    for text in texts:
        # Who has not been waited for is known to have ended, but not how.
        assert re.match(r"SyncFault: fastsync: rank 0 [^;]*; rank 1 ", text), text
        assert "Only ranks 0 and 1 had rank 0's share" in text, text


def test_every_place_of_a_step_is_died_at():
    assert {*PLACES, "forward", "between", "optimizer"} <= {
        place for _, deaths, _ in CASES.values() for _, _, place in deaths
    }
    assert STEPS > 4
