"""Residuals of error feedback: over restarts, new plans, freezing, other ranks and wires."""

import io
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, RankMismatchError, Wire
from fastsync.config.policy import BucketPolicy
from fastsync.reducer.sync_checkpoint import VERSION, deal
from tests.helpers.teams import run_ranks

SIZES = (300, 200, 200, 7)
FEEDBACK = {
    "int4": Wire("int4", form="two_shot"),
    "int4, gathered": Wire("int4", form="gather"),
    "int4, at random": Wire("int4", form="two_shot", stochastic=True),
    "int8, at random": Wire("int8", form="two_shot", stochastic=True, error_feedback=True),
    "after a warm-up": Wire("int4", form="two_shot", warmup_steps=5, stochastic=True),
    "with exceptions": Wire("int4", form="two_shot", overrides={"*.bias": "fp32", "0.*": "bf16"}),
}


class Backwards(nn.Module):
    """Layers that are registered last first, so that the first plan is not the one to stay."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(n, m) for n, m in pairwise(SIZES)]
        for number, layer in reversed(list(enumerate(layers))):
            self.add_module(str(number), layer)

    def forward(self, x):
        for number in range(len(SIZES) - 1):
            x = self.get_submodule(str(number))(x).relu()
        return x


def model():
    torch.manual_seed(0)
    return Backwards()


def inputs(step, rank):
    return torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(100 * step + rank))


def wrap(wire, **options):
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=0.1, **options)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)


def train(wrapped, optimizer, steps, rank):
    for step in steps:
        optimizer.zero_grad()
        wrapped(inputs(step, rank)).square().mean().backward()
        optimizer.step()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).double()


def residual_of(wrapped):
    return wrapped.sync_state_dict()["residuals"]


def mass(wrapped):
    """The sum over ranks of all residuals, fp64."""
    total = flat(residual_of(wrapped).values())
    dist.all_reduce(total)
    return total


def saved(wrapped, optimizer):
    """A checkpoint as bytes, by way of torch.save."""
    file = io.BytesIO()
    parts = (wrapped.module.state_dict(), optimizer.state_dict(), wrapped.sync_state_dict())
    torch.save(parts, file)
    return file.getvalue()


def load(wrapped, optimizer, checkpoint):
    parts = torch.load(io.BytesIO(checkpoint), weights_only=True)
    wrapped.module.load_state_dict(parts[0])
    optimizer.load_state_dict(parts[1])
    return parts[2]


def run(rank, world, wire, steps, checkpoints):
    """Train in a process of its own, from this rank's checkpoint where there is one."""
    wrapped, optimizer = wrap(wire)
    if checkpoints is not None:
        wrapped.load_sync_state_dict(load(wrapped, optimizer, checkpoints[rank]))
    train(wrapped, optimizer, steps, rank)
    return saved(wrapped, optimizer), flat(wrapped.parameters()), residual_of(wrapped)


@pytest.mark.slow(but=("int4, at random-4",))
@pytest.mark.parametrize("kept", [1, 4])
@pytest.mark.parametrize("name", FEEDBACK)
def test_a_restart_changes_no_bit(name, kept):
    restart_changes_no_bit(kept, lambda *args: run_ranks(run, 2, FEEDBACK[name], *args))


def restart_changes_no_bit(kept, trained):
    """Assert that 8 steps are those of `kept` steps, a checkpoint, and the others after it."""
    whole = trained(range(8), None)
    first = trained(range(kept), None)
    second = trained(range(kept, 8), [checkpoint for checkpoint, _, _ in first])
    for one, two in zip(whole, second, strict=True):
        assert torch.equal(one[1], two[1])
        assert one[2].keys() == two[2].keys()
        for parameter, residual in one[2].items():
            assert torch.equal(residual, two[2][parameter]), parameter
        assert any(residual.any() for residual in one[2].values())


def apart_from_the_model(rank, world):
    wrapped, optimizer = wrap("int4")
    train(wrapped, optimizer, range(2), rank)
    plain = [f"module.{name}" for name in model().state_dict()]
    return list(wrapped.state_dict()) == plain, sorted(wrapped.sync_state_dict())


def test_checkpoints_of_the_model_stay_as_they_are():
    for same, keys in run_ranks(apart_from_the_model, 2):
        assert same
        assert keys == [
            "latency",
            "order",
            "rank",
            "rate",
            "residuals",
            "steps",
            "version",
            "wire",
            "world_size",
        ]


def measured_rates(rank, world, deterministic):
    """Return how fast buckets travelled in the first step, which decides how large they grow."""
    torch.use_deterministic_algorithms(deterministic)
    states = []
    for _ in range(2):
        wrapped, optimizer = wrap("int4")
        if states:
            wrapped.load_sync_state_dict(states[-1])
            assert wrapped._engine.network.known != deterministic
        train(wrapped, optimizer, range(3), rank)
        states.append(wrapped.sync_state_dict())
    return [(state["rate"], state["latency"]) for state in states]


def test_what_was_measured_of_the_network_stays():
    for first, second in run_ranks(measured_rates, 2, False):
        assert first[0] == second[0] > 0
        assert first[1] == second[1] > 0


def test_nothing_is_measured_where_runs_must_repeat():
    assert run_ranks(measured_rates, 2, True) == [[(0, 0), (0, 0)], [(0, 0), (0, 0)]]


def replanned(rank, world, cap):
    """Residuals before and after another plan of other buckets."""
    wrapped, optimizer = wrap("int4")
    train(wrapped, optimizer, range(3), rank)
    before = residual_of(wrapped)
    engine = wrapped._engine
    plan = engine.plan
    order = list(plan.params)
    engine._buckets = BucketPolicy((cap,))
    engine._install(order[::-1])
    after = residual_of(wrapped)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return same, len(plan.buckets), len(engine.plan.buckets), any(r.any() for r in after.values())


@pytest.mark.slow("1")
@pytest.mark.parametrize("cap", [1, 1 << 30])
def test_another_plan_changes_no_bit(cap):
    for same, one, other, something in run_ranks(replanned, 2, cap):
        assert same
        assert one != other
        assert something


def frozen_and_thawed(rank, world):
    wrapped, optimizer = wrap("int4")
    train(wrapped, optimizer, range(3), rank)
    weight = wrapped.module.get_submodule("1").weight
    kept = [residual_of(wrapped)["1.weight"]]
    for frozen in (True, False):
        weight.requires_grad_(not frozen)
        if frozen:
            train(wrapped, optimizer, range(3, 12), rank)
        else:
            wrapped.train()
            wrapped(inputs(12, rank))  # plans anew
        engine = wrapped._engine
        planned = [engine.params[i].name for b in engine.plan.buckets for i in b.params]
        kept.append(residual_of(wrapped)["1.weight"])
        assert ("1.weight" in planned) != frozen
    return torch.equal(kept[0], kept[1]), torch.equal(kept[0], kept[2]), bool(kept[0].any())


def test_a_frozen_parameter_keeps_its_residual():
    assert run_ranks(frozen_and_thawed, 2) == [(True, True, True)] * 2


def continued(rank, world, wire, states):
    """Load the states of other ranks; give the sum over ranks, and the state to go on from."""
    wrapped, optimizer = wrap(wire)
    wrapped.load_sync_state_dict(states)
    total, steps = mass(wrapped), wrapped._engine.core.steps()
    before = wrapped.sync_state_dict()
    train(wrapped, optimizer, range(2), rank)
    return total, steps, before


def states_of(rank, world, wire):
    wrapped, optimizer = wrap(wire)
    train(wrapped, optimizer, range(3), rank)
    return wrapped.sync_state_dict()


def owed_by(states):
    return sum(flat(state["residuals"].values()) for state in states)


@pytest.mark.slow(but=("3-2",))
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1), (2, 2), (1, 2)])
def test_another_number_of_ranks_keeps_the_sum(before, after):
    wire = Wire("int4", form="two_shot")
    states = run_ranks(states_of, before, wire)
    results = run_ranks(continued, after, wire, states)
    owed = owed_by(states)
    exact = after >= before
    rounding = (
        0 if exact else 2.0**-24 * sum(flat(state["residuals"].values()).abs() for state in states)
    )
    for total, steps, _ in results:
        assert ((total - owed).abs() <= rounding).all()
        assert steps == 3
    assert bool(owed.any()) == (before > 1)


def test_there_and_back_again():
    """A single rank codes nothing, and still owes what it was given."""
    wire = Wire("int4", form="two_shot")
    states = run_ranks(states_of, 2, wire)
    ((_, _, alone),) = run_ranks(continued, 1, wire, states)
    total, _, _ = run_ranks(continued, 2, wire, [alone])[0]
    rounding = 2.0**-24 * sum(flat(state["residuals"].values()).abs() for state in states)
    assert ((total - owed_by(states)).abs() <= rounding).all()


def small_state(rank=0, world=2, **changes):
    state = {
        "version": VERSION,
        "wire": "int4",
        "rank": rank,
        "world_size": world,
        "steps": 3,
        "order": ["a"],
        "rate": 0.0,
        "latency": 0.0,
        "residuals": {"a": torch.ones(2)},
    }
    return {**state, **changes}


BAD_STATES = {
    "another world size": (small_state(world=3), "saved by one of 3 ranks.*list of the states"),
    "another rank's": (small_state(rank=1), "that of rank 1, but this is rank 0"),
    "no state": ({"a": torch.ones(2)}, "lacks version.*not model.state_dict"),
    "nothing like one": (7, "list|iterable"),
    "none": ([], "empty list"),
    "one missing": ([small_state()], "2 ranks, but 1 are given; those of ranks .1. are missing"),
    "one twice": ([small_state(), small_state(), small_state(1)], "2 ranks, but 3 are given"),
    "of two steps": ([small_state(), small_state(1, steps=4)], "steps is 3 and 4"),
    "of two wires": ([small_state(), small_state(1, wire="int8")], "wire is int4 and int8"),
    "of two models": (
        [small_state(), small_state(1, residuals={"b": torch.ones(2)})],
        "'a' is in that of rank 0 or rank 1 alone",
    ),
    "of a version to come": (small_state(version=9), "version 9"),
    "of an old version": ({"version": 1, "residuals": {}}, "version 1, but this fastsync reads"),
}


@pytest.mark.slow(but=("of a version to come",))
@pytest.mark.parametrize("label", BAD_STATES)
def test_states_that_do_not_fit_together(label):
    state, text = BAD_STATES[label]
    with pytest.raises((ValueError, TypeError), match=text):
        deal(state, 0, 2)


def test_two_shapes_of_one_residual():
    other = small_state(1, residuals={"a": torch.ones(3)})
    with pytest.raises(ValueError, match=r"'a' are of different shapes: \(2,\), \(3,\)"):
        deal([small_state(), other], 0, 1)


def load_misfit(rank, world, wire, change, on):
    wrapped, optimizer = wrap(wire)
    train(wrapped, optimizer, range(2), rank)
    good, _ = wrap("int4")
    train(good, torch.optim.SGD(good.parameters(), lr=0), range(2), rank)
    state = good.sync_state_dict()
    if on in (rank, None):
        change(state)
    try:
        wrapped.load_sync_state_dict(state)
    except (ValueError, RankMismatchError) as error:
        text = f"{error} {error.__cause__ or ''}"
        train(wrapped, optimizer, range(2, 4), rank)  # goes on as before
        return text
    return ""


def nothing(state):
    pass


def rename(state):
    state["residuals"]["conv.weight"] = state["residuals"].pop("0.weight")


def drop(state):
    del state["residuals"]["0.weight"]


def reshape(state):
    state["residuals"]["0.weight"] = torch.zeros(2, 3)


MISFITS = {
    "unknown": ("int4", rename, ("'conv.weight'", "no such parameter")),
    "missing": ("int4", drop, ("no residual of '0.weight'",)),
    "of another shape": ("int4", reshape, ("'0.weight' has shape (2, 3)", "(200, 300)")),
    "of a wire with feedback": ("int8", nothing, ("wire='int8' has no error feedback",)),
}


@pytest.mark.slow(but=("of a wire with feedback",))
@pytest.mark.parametrize("label", MISFITS)
def test_a_state_that_does_not_fit_the_model_is_refused_on_every_rank(label):
    wire, change, parts = MISFITS[label]
    for text in run_ranks(load_misfit, 2, wire, change, None):
        for part in parts:
            assert part in text


def test_a_misfit_on_one_rank_is_refused_on_every_rank():
    for text in run_ranks(load_misfit, 2, "int4", reshape, 1):
        assert "rank 1: " in text
        assert "'0.weight' has shape" in text


def steps_apart(state):
    state["steps"] += 1


def test_states_of_different_steps_on_different_ranks():
    for text in run_ranks(load_misfit, 2, "int4", steps_apart, 1):
        assert "the number of steps in the state is 3 there but 2 on rank 0" in text


def of_a_wire_without(rank, world):
    plain, _ = wrap("int8")
    wrapped, _ = wrap("int4")
    with pytest.raises(ValueError, match="without error feedback"):
        wrapped.load_sync_state_dict(plain.sync_state_dict())


def test_a_state_of_a_wire_without_feedback():
    run_ranks(of_a_wire_without, 2)
