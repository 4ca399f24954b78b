"""The factor that PowerSGD's next step starts with: over restarts, new plans, other wires."""

import io
import re

import pytest
import torch
from torch import nn

from fastsync import FastDDP, PowerSGD, RankMismatchError, Wire
from fastsync.engine.sizing import Sizing
from fastsync.plan.policy import BucketPolicy
from fastsync.testing import run_ranks
from tests.test_wire_state import inputs, load, residual_of, run, states_of, train, wrap

STEPS = 8
WIRES = {
    "rank 2": Wire(PowerSGD(2)),
    "without feedback": Wire(PowerSGD(1), error_feedback=False),
    "cold": Wire(PowerSGD(2, warm_start=False)),
    "after a warm-up": Wire(PowerSGD(2), warmup_steps=3),
    "with exceptions": Wire(PowerSGD(4), overrides={"0.*": "int4", "2.*": "fp32"}),
}


def factors_of(wrapped):
    return wrapped.sync_state_dict()["factors"]


def factors_in(checkpoint):
    return torch.load(io.BytesIO(checkpoint), weights_only=True)[2]["factors"]


def are_equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


@pytest.mark.slow(but=("after a warm-up-1",))
@pytest.mark.parametrize("kept", [1, 5])
@pytest.mark.parametrize("name", WIRES)
def test_a_restart_changes_no_bit(name, kept):
    """The first plan lives for one step; a warm-up ends after the third."""
    wire = WIRES[name]
    whole = run_ranks(run, 2, wire, range(STEPS), None)
    first = run_ranks(run, 2, wire, range(kept), None)
    second = run_ranks(run, 2, wire, range(kept, STEPS), [checkpoint for checkpoint, _, _ in first])
    for one, two in zip(whole, second, strict=True):
        assert torch.equal(one[1], two[1])
        assert are_equal(one[2], two[2])
        factors = factors_in(one[0])
        assert are_equal(factors, factors_in(two[0]))
        assert bool(factors) == (name != "cold")
    assert are_equal(factors_in(whole[0][0]), factors_in(whole[1][0]))  # the same on both ranks


def without_factors(rank, world, wire, checkpoints):
    wrapped, optimizer = wrap(wire)
    state = load(wrapped, optimizer, checkpoints[rank])
    wrapped.load_sync_state_dict({**state, "factors": {}})
    train(wrapped, optimizer, range(5, STEPS), rank)
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()]).double()


@pytest.mark.slow
def test_the_factors_are_what_makes_a_restart_exact():
    """So that the test above means something."""
    wire = WIRES["rank 2"]
    whole = run_ranks(run, 2, wire, range(STEPS), None)
    first = run_ranks(run, 2, wire, range(5), None)
    bare = run_ranks(without_factors, 2, wire, [checkpoint for checkpoint, _, _ in first])
    assert not torch.equal(whole[0][1], bare[0])


def rewound(rank, world, wire):
    """Loads, after some steps, the state that was there before the first of them."""
    weights = []
    wrapped, optimizer = wrap(wire)
    train(wrapped, optimizer, range(2), rank)
    file = io.BytesIO()
    parts = (wrapped.module.state_dict(), optimizer.state_dict(), wrapped.sync_state_dict())
    torch.save(parts, file)
    for _ in range(2):
        wrapped.load_sync_state_dict(load(wrapped, optimizer, file.getvalue()))
        train(wrapped, optimizer, range(2, 6), rank)
        weights.append(torch.cat([p.detach().flatten() for p in wrapped.parameters()]))
    return len(parts[2]["factors"]), weights


@pytest.mark.slow("rank 2")
@pytest.mark.parametrize("name", ["rank 2", "after a warm-up"])
def test_a_state_replaces_what_the_model_has_learnt(name):
    for learnt, (one, two) in run_ranks(rewound, 2, WIRES[name]):
        assert (learnt > 0) == (name == "rank 2")
        assert torch.equal(one, two)


def replanned(rank, world, cap):
    wrapped, optimizer = wrap(WIRES["rank 2"])
    train(wrapped, optimizer, range(3), rank)
    before, engine = factors_of(wrapped), wrapped._engine
    order = [index for bucket in engine.plan.buckets for index in bucket.params]
    count = len(engine.plan.buckets)
    engine.sizing = Sizing(engine.core, BucketPolicy((cap,)), torch.device("cpu"))
    engine._install(order[::-1])
    return before, factors_of(wrapped), count, len(engine.plan.buckets)


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("cap", [1, 1 << 30])
def test_another_plan_changes_no_bit(cap):
    for before, after, one, other in run_ranks(replanned, 2, cap):
        assert one != other
        assert are_equal(before, after)
        assert {name: tuple(t.shape) for name, t in after.items()} == {
            "0.weight": (2, 300),
            "1.weight": (2, 200),
            "2.weight": (2, 200),
        }


def around_the_second_plan(rank, world):
    """FastDDP makes its second plan at the end of the first step."""
    wrapped, optimizer = wrap(WIRES["rank 2"])
    engine, first = wrapped._engine, wrapped._engine.plan
    make_plan, seen = engine._replan, []

    def watched():
        seen.append(factors_of(wrapped))
        make_plan()
        seen.append(factors_of(wrapped))

    engine._replan = watched
    train(wrapped, optimizer, range(2), rank)
    return seen, first != engine.plan


def test_the_second_plan_keeps_what_the_first_step_learnt():
    for (before, after), changed in run_ranks(around_the_second_plan, 2):
        assert changed
        assert before and are_equal(before, after)


class WithEmpty(nn.Module):
    """Parameters without elements around one that is compressed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Parameter(torch.empty(0)) for _ in range(2))
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).sum() + self.first.sum() + self.last.sum()


def beside_empty(rank, world):
    wrapped = FastDDP(WithEmpty(), wire=PowerSGD(2))
    for step in range(3):
        wrapped.zero_grad()
        wrapped(inputs(step, rank)[:, :64]).backward()
    state = wrapped.sync_state_dict()
    wrapped.load_sync_state_dict(state)
    return state["factors"], factors_of(wrapped)


def test_parameters_without_elements_touch_no_factor():
    for before, after in run_ranks(beside_empty, 2):
        assert list(before) == ["layer.weight"]
        assert are_equal(before, after)


def frozen_and_thawed(rank, world):
    wrapped, optimizer = wrap(WIRES["rank 2"])
    train(wrapped, optimizer, range(3), rank)
    weight = wrapped.module.get_submodule("1").weight
    weight.requires_grad_(False)
    train(wrapped, optimizer, range(3, 12), rank)  # long enough to leave the plan
    kept = factors_of(wrapped)
    train(wrapped, optimizer, range(12, 14), rank)
    others = factors_of(wrapped)
    weight.requires_grad_(True)
    wrapped(inputs(14, rank))  # plans anew
    return kept, others, factors_of(wrapped)


def test_a_frozen_parameter_keeps_its_factor():
    for kept, others, thawed in run_ranks(frozen_and_thawed, 2):
        assert torch.equal(kept["1.weight"], thawed["1.weight"])
        assert not torch.equal(kept["0.weight"], others["0.weight"])
        assert are_equal(others, thawed)


def other_wires(rank, world):
    wrapped, optimizer = wrap(WIRES["rank 2"])
    train(wrapped, optimizer, range(3), rank)
    found = [factors_of(wrapped)]
    for wire in (
        Wire(PowerSGD(2), error_feedback=False),
        Wire(PowerSGD(3)),
        Wire("int8", error_feedback=True),
        Wire(PowerSGD(3)),
    ):
        wrapped.set_wire(wire)
        found.append(factors_of(wrapped))
    return found


def test_another_wire_goes_on_where_the_rank_is_the_same():
    for first, same, higher, none, again in run_ranks(other_wires, 2):
        assert are_equal(first, same)
        assert {tuple(t.shape) for t in higher.values()} == {(3, 300), (3, 200)}
        assert none == {}
        assert {tuple(t.shape) for t in again.values()} == {(3, 300), (3, 200)}


def continued(rank, world, states):
    wrapped, _ = wrap(WIRES["rank 2"])
    wrapped.load_sync_state_dict(states)
    return factors_of(wrapped)


@pytest.mark.slow("2-3", "3-2")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_another_number_of_ranks_goes_on_with_the_same_factors(before, after):
    states = run_ranks(states_of, before, WIRES["rank 2"])
    for found in run_ranks(continued, after, states):
        assert found and are_equal(found, states[0]["factors"])


def rename(factors):
    factors["conv.weight"] = factors.pop("0.weight")


def reshape(factors):
    factors["0.weight"] = torch.zeros(3, 300)


def misfit(rank, world, change, on):
    wrapped, optimizer = wrap(WIRES["rank 2"])
    train(wrapped, optimizer, range(2), rank)
    state = wrapped.sync_state_dict()
    if on in (rank, None):
        change(state["factors"])
    before = factors_of(wrapped), residual_of(wrapped)
    with pytest.raises((ValueError, RankMismatchError)) as error:
        wrapped.load_sync_state_dict(state)
    assert are_equal(before[0], factors_of(wrapped))
    assert are_equal(before[1], residual_of(wrapped))
    train(wrapped, optimizer, range(2, 4), rank)
    return str(error.value)


@pytest.mark.slow(but=("1-rename-'conv.weight'.*keeps none of it",))
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (rename, "'conv.weight'.*keeps none of it"),
        (reshape, r"\(3, 300\).*keeps one of \(2, 300\)"),
    ],
)
@pytest.mark.parametrize("on", [None, 1])
def test_a_factor_that_does_not_fit_is_refused_on_every_rank(change, text, on):
    for found in run_ranks(misfit, 2, change, on):
        assert re.search(text, found)
