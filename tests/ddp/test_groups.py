"""Parameters that are averaged over groups of their own: results are those of one process."""

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, Faults, Group, NonFiniteGradientError, Wire
from fastsync.testing import ranks
from tests.helpers.parallel_models import (
    ContextParallel,
    Experts,
    TensorParallel,
    groups_of,
    samples,
)
from tests.helpers.teams import run_ranks

STEPS = 20
STAGES = (0, 1, 2)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


# --- oracles: what a rank is given of a batch, and how its groups are chosen


def own_samples(step, rank):
    return samples(step, rank)


def replica_samples(step, rank):
    """Ranks of a replica have the same samples."""
    return samples(step, rank // 2)


def sequence(step, rank):
    """Ranks of a replica have one sequence, of which each takes its part."""
    return samples(step, rank // 2, ContextParallel.LENGTH)


def target_of(model, y):
    return y[getattr(model, "mine", slice(None))]


CASES = {
    "experts": (Experts, own_samples, lambda part: {"experts.*": Group(part, 4)}, (0, 1, 2, 3)),
    "tensors": (TensorParallel, replica_samples, lambda part: {"up": part, "down": part}, (0, 2)),
    "context": (ContextParallel, sequence, lambda part: {"positions": Group(part, 4)}, (0, 2)),
}


def train(rank, world, kind, options):
    model_class, data, groups, _ = CASES[kind]
    replica, part = groups_of(rank)
    net = model_class(replica, rank % 2)
    model = FastDDP(net, groups=groups(part), bucket_cap_mb=0.0002, **options)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = data(step, rank)
        optimizer.zero_grad()
        loss = (model(x, step, rank) - target_of(net, y)).square().mean()
        loss.backward()
        if "clip" in kind:
            model.clip_grad_norm_(0.1)
        optimizer.step()
    return state(net)


def expected(kind):
    """Return the weights of one process that has all parts and all samples."""
    model_class, data, _, ranks = CASES[kind]
    net = model_class()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = data(step, rank)
            loss = (net(x, step, rank) - y).square().mean()
            (loss / len(ranks)).backward()
        optimizer.step()
    return state(net)


def part_of(kind, name, whole, rank):
    """Return what a rank should have of the weights of one process."""
    place = rank % 2
    if kind == "experts" and name.startswith("experts"):
        return whole[name.replace("all", str(place))]
    if kind == "tensors" and name in ("up", "down"):
        return whole[name][4 * place : 4 * place + 4]
    if kind == "context" and name == "positions":
        return whole[name][3 * place : 3 * place + 3]
    return whole[name]


OPTIONS = {
    "memory": {},
    "gloo": {"wire": Wire(shared_memory=False)},
    "zero=1": {"zero": 1},
}


@pytest.mark.slow(turns="options")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", CASES)
def test_weights_are_those_of_one_process(kind, options):
    whole = expected(kind)
    for rank, weights in enumerate(run_ranks(train, 4, kind, OPTIONS[options])):
        for name, weight in weights.items():
            part = part_of(kind, name, whole, rank)
            torch.testing.assert_close(weight, part, rtol=1e-9, atol=1e-9, msg=name)


class Two(nn.Module):
    """A layer for all ranks and one for a group; whole numbers, which sums keep exactly."""

    def __init__(self, rank=0, buffers=False):
        super().__init__()
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4)
        if buffers:
            self.shared.register_buffer("seen", torch.zeros(1))
            self.own.register_buffer("seen", torch.zeros(1))
        for number, param in enumerate(self.parameters()):
            param.data.fill_(10 * rank + number)

    def forward(self, factors, swapped=False):
        """Sum each layer's parameters times its factor; a layer without a factor is not used."""
        parts = [(self.shared, factors[0]), (self.own, factors[1])]
        totals = [
            factor * sum(param.sum() for param in layer.parameters())
            for layer, factor in (reversed(parts) if swapped else parts)
            if factor is not None
        ]
        return sum(totals)


def grads_of(net):
    grads = [layer.weight.grad for layer in (net.shared, net.own)]
    return [None if grad is None else grad.flatten()[0].item() for grad in grads]


def one_step(rank, world, factors, divisor):
    part = groups_of(rank)[1]
    model = FastDDP(Two(), groups={"own.*": part if divisor is None else Group(part, divisor)})
    model((rank + 1.0, factors[rank])).backward()
    counts = model._engine.core.used_counts()
    return grads_of(model.module), counts[-1]


@pytest.mark.parametrize(
    ("factors", "divisor", "own", "counts"),
    [
        ((1.0, 2.0, 4.0, 8.0), None, [2.5, 5.0], [2, 2]),
        ((1.0, 2.0, 4.0, 8.0), 4, [1.25, 2.5], [2, 2]),
        ((1.0, 2.0, None, 8.0), None, [0.5, 5.0], [1, 2]),
        ((None, 2.0, None, 8.0), None, [None, 5.0], [0, 2]),
    ],
    ids=["mean", "divisor", "one-rank", "no-rank"],
)
def test_means_and_used_flags_are_those_of_the_group(factors, divisor, own, counts):
    for rank, (grads, count) in enumerate(run_ranks(one_step, 4, factors, divisor)):
        assert grads == [2.5, own[rank % 2]]
        assert count == counts[rank % 2]


def alone(rank, world, options):
    made = [dist.new_group([r]) for r in range(world)]
    model = FastDDP(Two(), groups={"own.*": Group(made[rank], world)}, **options)
    model((1.0, 8.0 * (rank + 1))).backward()
    return grads_of(model.module)


def of_two_sizes(rank, world):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    model = FastDDP(Two(), groups={"own.*": groups[rank % 2]})
    model((1.0, (rank + 1.0) ** 2)).backward()
    return grads_of(model.module)


def test_groups_of_different_sizes_have_means_of_their_own():
    assert run_ranks(of_two_sizes, 3) == [[1.0, own] for own in (5.0, 4.0, 5.0)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_group_of_one_rank_divides_too(world, wire):
    for rank, grads in enumerate(run_ranks(alone, world, {"wire": wire})):
        assert grads == pytest.approx([1.0, 8.0 * (rank + 1) / world], rel=0.01)


def uneven(rank, world):
    """Rank r accumulates over r + 1 micro-batches."""
    model = FastDDP(Two(), groups={"own.*": groups_of(rank)[1]})
    found = []
    for _ in range(4):
        model.zero_grad()
        with model.no_sync():
            for _ in range(rank):
                model((1.0, 2.0)).backward()
        model((1.0, 2.0)).backward()
        found.append(grads_of(model.module))
    return found


def test_ranks_differ_in_their_micro_batches():
    for rank, found in enumerate(run_ranks(uneven, 4)):
        assert found == [[10 / 4, 2 * (4, 6)[rank % 2] / 2]] * 4


def swapped(rank, world):
    """Ranks reach the layers in opposite orders, each bucket being one parameter's.

    A group's bucket is the last one, and the ranks that vote are those of one group.
    """
    model = FastDDP(Two(), groups={"own.*": groups_of(rank)[1]}, bucket_cap_mb=1e-6)
    plans = []
    for step in range(30):
        model.zero_grad()
        turned = (rank + (step > 5)) % 2 == 0
        model((1.0, 2.0), turned).backward()
        plans.append([bucket.params for bucket in model._engine.plan.buckets])
    return plans, grads_of(model.module), model.sync_stats()["plans"]


def test_all_ranks_have_one_plan_whatever_their_orders():
    first, *others = run_ranks(swapped, 4)
    assert all(other == first for other in others)
    plans, grads, count = first
    assert grads == [1.0, 2.0]
    assert count > 2, "votes led to new plans"
    assert len({str(plan) for plan in plans}) > 1


def replicate(rank, world, init_sync):
    net = Two(rank, buffers=True)
    net.shared.seen.fill_(rank)
    net.own.seen.fill_(rank)
    model = FastDDP(net, groups={net.own: groups_of(rank)[1]}, init_sync=init_sync)
    first = [net.shared.bias[0].item(), net.own.bias[0].item()]
    seen = [net.shared.seen.item(), net.own.seen.item()]
    net.shared.seen.fill_(rank + 10)
    net.own.seen.fill_(rank + 10)
    model((1.0, 1.0))
    return first, seen, [net.shared.seen.item(), net.own.seen.item()]


def test_a_group_replicates_from_its_first_rank():
    for rank, (first, seen, later) in enumerate(run_ranks(replicate, 4, True)):
        place = rank % 2
        assert first == [1.0, 10 * place + 3.0]
        assert seen == [0.0, place]
        assert later == [10.0, 10.0 + place]


def test_nothing_is_replicated_without_init_sync():
    for rank, (first, seen, _) in enumerate(run_ranks(replicate, 4, False)):
        assert first == [10 * rank + 1.0, 10 * rank + 3.0]
        assert seen == [rank, rank]


def only_groups(rank, world):
    """No parameter is averaged over all ranks, and one is frozen and unfrozen."""
    net = Two()
    model = FastDDP(net, groups={"*": groups_of(rank)[1]})
    found = []
    for step in range(24):
        net.shared.requires_grad_(step % 12 < 6)
        model.zero_grad()
        model((rank + 1.0, 2.0)).backward()
        found.append(grads_of(net))
    return found


def test_all_parameters_may_have_groups():
    for rank, found in enumerate(run_ranks(only_groups, 4)):
        mean = 2.0 + rank % 2
        assert found == ([[mean, 2.0]] * 6 + [[None, 2.0]] * 6) * 2


# --- stages 1 and 2: the ranks share what is averaged over all of them


def of_state(optimizer):
    """Return the elements of the moments that this rank has."""
    held = [value for state in optimizer.state.held.values() for value in state.values()]
    return sum(value.numel() for value in held if value.dim() > 0)


def shared_state(rank, world):
    """Train with a state that is whole at stage 0; save and load it on the way."""
    found = []
    for zero in STAGES:
        part = groups_of(rank)[1]
        net = Two(rank % 2)
        model = FastDDP(net, groups={"own.*": part}, zero=zero)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            model((rank + 1.0 + step, 2.0 * rank)).backward()
            optimizer.step()
            if step == 2:
                whole = copy.deepcopy(optimizer.state_dict())
            if step == 3:
                model.load_optimizer_state_dict(optimizer, model.optimizer_state_dict(optimizer))
        last = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(whole)
        model((1.0, 1.0)).backward()
        optimizer.step()
        held = of_state(optimizer) if zero else 0
        found.append((state(net), last["state"], held))
    return found


def test_other_ranks_share_no_state_of_a_group():
    held_by_all = [0] * len(STAGES)
    for found in run_ranks(shared_state, 4):
        for stage, (weights, last, held) in zip(STAGES, found, strict=True):
            torch.testing.assert_close(weights, found[0][0], rtol=0, atol=0)
            torch.testing.assert_close(last, found[0][1], rtol=0, atol=0)
            held_by_all[stage] += held
    # Two moments of 20 elements on each rank, and of 20 that are shared.
    assert held_by_all[1:] == [4 * 40 + 40] * 2


# --- wires, norms, and gradients that are not finite


def train_in(rank, world, wire):
    part = groups_of(rank)[1]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model = FastDDP(net, groups={"1.*": part}, wire=Wire(wire, min_bytes=0))
    found = []
    for step in range(3):
        model.zero_grad()
        draw = torch.Generator().manual_seed(10 * rank + step)
        model(torch.randn(4, 32, generator=draw)).square().mean().backward()
        found.append([param.grad.clone() for param in net.parameters()])
    formats = {bucket.group: bucket.format_name for bucket in model._engine.plan.buckets}
    return found, formats


@pytest.mark.slow("fp16-0.001")
@pytest.mark.parametrize(("wire", "bound"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)])
def test_wires_carry_groups(wire, bound):
    exact = run_ranks(train_in, 4, "fp32")
    coded = run_ranks(train_in, 4, wire)
    for rank, ((right, _), (found, formats)) in enumerate(zip(exact, coded, strict=True)):
        assert formats == {0: wire, 1: wire}
        twin = coded[(rank + 2) % 4][0]
        for ours, theirs, its in zip(right, found, twin, strict=True):
            for number, (grad, other, same) in enumerate(zip(ours, theirs, its, strict=True)):
                assert (grad - other).abs().max() <= bound * grad.abs().max(), number
                assert torch.equal(other, same)
    assert not torch.equal(coded[0][0][0][2], coded[1][0][0][2]), "other ranks, another mean"


def clip(rank, world, norm_type, dtype):
    found = []
    for zero in STAGES:
        net = Two().to(dtype)
        model = FastDDP(net, groups={"own.*": groups_of(rank)[1]}, zero=zero)
        optimizer_of(model).step()  # from then on the ranks share gradients
        for _ in range(2):
            model.zero_grad()
            model((1.0, 2.0 + rank % 2)).backward()
            norm = model.clip_grad_norm_(1.0, norm_type).item()
            found.append((norm, *grads_of(net)))
    return found


@pytest.mark.slow(but=("2.0-dtype0",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_a_norm_counts_each_parameter_once(norm_type, dtype):
    whole = torch.tensor([1.0] * 20 + [2.0] * 20 + [3.0] * 20)
    norm = torch.linalg.vector_norm(whole, norm_type).item()
    for rank, found in enumerate(run_ranks(clip, 4, norm_type, dtype)):
        right = norm, 1 / norm, (2 + rank % 2) / norm
        assert found == [pytest.approx(right, rel=1e-5)] * 2 * len(STAGES)


def step_on_nan(rank, world, policy):
    """Return what each stage makes of a NaN."""
    return [nan_at_stage(rank, policy, zero) for zero in STAGES]


def nan_at_stage(rank, policy, zero):
    model = FastDDP(
        Two(), groups={"own.*": groups_of(rank)[1]}, zero=zero, faults=Faults(nonfinite=policy)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = state(model)
    bad = float("nan") if rank == 3 else 1.0
    model((1.0, bad)).backward()
    try:
        optimizer.step()
    except NonFiniteGradientError as error:
        return error.parameters, error.ranks
    skipped = all(torch.equal(before[name], param) for name, param in state(model).items())
    optimizer.zero_grad()
    model((1.0, 1.0)).backward()
    optimizer.step()
    return skipped, all(not torch.equal(before[name], p) for name, p in state(model).items())


@pytest.mark.filterwarnings("ignore:the gradient of parameter")
def test_nan_in_a_group_skips_the_step_of_all_ranks():
    assert run_ranks(step_on_nan, 4, "skip") == [[(True, True)] * len(STAGES)] * 4


def test_nan_in_a_group_is_an_error_on_all_ranks():
    for found in run_ranks(step_on_nan, 4, "raise"):
        assert len(found) == len(STAGES)
        for parameters, guilty in found:
            assert sorted(parameters) == ["own.bias", "own.weight"]
            assert guilty == [[3], [3]]


def scaled(rank, world):
    """One rank's gradients overflow in its group."""
    return [scaled_at_stage(rank, zero) for zero in STAGES]


def scaled_at_stage(rank, zero):
    model = FastDDP(Two(), groups={"own.*": groups_of(rank)[1]}, zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, found = state(model), []
    for factor in (float("inf") if rank == 3 else 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(model((1.0, factor))).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = {n for n, p in state(model).items() if not torch.equal(p, before[n])}
        found.append((len(changed), scaler.get_scale()))
    return found


def test_an_overflow_in_a_group_leaves_out_the_step_of_all_ranks():
    assert run_ranks(scaled, 4) == [[[(0, 2.0), (4, 2.0)]] * len(STAGES)] * 4


def with_an_unused_layer(rank, world, zero):
    """Scale gradients of which some ranks' groups have fewer, by a scaler and by hand."""
    model = FastDDP(Two(), groups={"own.*": groups_of(rank)[1]}, zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model((1.0, 1.0 if rank % 2 == 0 else None))).backward()
        scaler.unscale_(optimizer)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        torch._foreach_mul_(grads, 0.5)
        scaler.step(optimizer)
        scaler.update()
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        torch._foreach_mul_(momenta, 2.0)
    return state(model.module)


@pytest.mark.parametrize("zero", STAGES)
def test_all_gradients_are_scaled_where_some_ranks_have_fewer(zero):
    plain = Two()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=1.0)
    found = run_ranks(with_an_unused_layer, 4, zero)
    for _ in range(3):
        optimizer.zero_grad()
        plain((1.0, 1.0)).backward()
        optimizer.step()
    expected, untouched = state(plain), state(Two())
    for rank, values in enumerate(found):
        for name, value in values.items():
            used = rank % 2 == 0 or name.startswith("shared")
            torch.testing.assert_close(value, (expected if used else untouched)[name])


SUMS = {  # how backwards go in a step, and by what each rank multiplies the output of its group
    "synchronised": [("all", (1, 2, 3, 4)), ("all", (5, 6, 7, 8)), ("all", (1, 1, 1, 1))],
    "accumulated": [("all", (1, 2, 3, 4)), ("alone", (5, 6, 7, 8)), ("all", (1, 1, 1, 1))],
    "by the module": [("all", (1, 2, 3, 4)), ("module", (5, None, 7, 8)), ("all", (1, 1, 1, 1))],
    "unused in part": [("all", (1, 2, 3, 4)), ("alone", (5, None, 7, 8)), ("all", (None, 6, 1, 1))],
    "unused": [("all", (1, 2, 3, 4)), ("all", (None,) * 4), ("all", (None,) * 4)],
}


def summed(rank, world, stages):
    """Sum up the gradients of a step; repeat that in a second one."""
    found = []
    for zero, (kind, backwards) in product(stages, SUMS.items()):
        model = FastDDP(Two(), groups={"own.*": Group(groups_of(rank)[1], 4)}, zero=zero)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            for how, factors in backwards:
                called = model.module if how == "module" else model
                with model.no_sync() if how == "alone" else nullcontext():
                    called((1.0, factors[rank])).backward()
            own = model.module.own.weight.grad.flatten()[0].item()
            optimizer.step()
        found.append((zero, kind, own))
    return found


def test_backwards_add_to_a_sum_with_a_divisor():
    for rank, found in enumerate(run_ranks(summed, 4, STAGES)):
        wanted = {
            kind: sum(f for _, by_rank in its for f in by_rank[rank % 2 :: 2] if f) / 4
            for kind, its in SUMS.items()
        }
        assert found == [(zero, kind, wanted[kind]) for zero, kind in product(STAGES, SUMS)]


def set_by_hand(rank, world):
    """A script sets a gradient that no backward computes, the same on every rank."""
    model = FastDDP(Two(), groups={"own.*": Group(groups_of(rank)[1], 4)}, static_graph=True)
    model.module.own.weight.grad = torch.ones(4, 4)
    for _ in range(4):
        model((1.0, None)).backward()
    return grads_of(model.module)[1]


def test_a_gradient_without_use_changes_no_static_graph():
    assert run_ranks(set_by_hand, 4) == [1.0] * 4


def weighed(rank, world):
    """Three micro-batches a step, of which all or only the last one synchronise."""
    found = []
    for zero, synchronises in product((0, 1), (True, False)):
        groups = {"own.*": Group(groups_of(rank)[1], world)}
        model = FastDDP(Two(), groups=groups, zero=zero)
        for _ in range(2):
            model.zero_grad()
            for micro in range(3):
                alone = micro < 2 and not synchronises
                with model.no_sync() if alone else nullcontext():
                    model.add_weight(rank + micro + 1)
                    model((rank + 1.0, 4.0 * micro)).backward()
        found.append(grads_of(model.module))
    return found


def test_weights_divide_sums_of_experts():
    """The sum of all weights is 42, of `shared` of all ranks 30, of `own` of a group 24."""
    assert run_ranks(weighed, 4) == [[pytest.approx([30 / 42, 24 / 42])] * 4] * 4


def ends_early(rank, world):
    model = FastDDP(Two(), groups={"own.*": groups_of(rank)[1]})
    for step in range(4):
        if step == 2 and rank == 3:
            raise ValueError("no more steps")
        model((1.0, 1.0)).backward()


def test_a_rank_that_ends_is_named_to_the_ranks_of_all_groups():
    with pytest.raises(ranks.RankError) as error:
        ranks.run_ranks(ends_early, 4)
    text = str(error.value)
    for rank in range(4):
        assert f"rank {rank} raised" in text
    assert text.count("fastsync: rank 3 ended its script after step 2") >= 3


# --- mistakes


def in_two_groups(net, rank, replica, part):
    return {"own.*": part, "*.bias": part}


def not_in_the_group(net, rank, replica, part):
    group = dist.new_group([0, 1])
    return {"own.*": group}


def partly_overlapping(net, rank, replica, part):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2, 3])]
    return {"own.*": groups[0 if rank == 0 else 1]}


def without_match(net, rank, replica, part):
    return {"owned.*": part}


def different_patterns(net, rank, replica, part):
    return {("own.*" if rank else "shared.*"): part}


def different_divisors(net, rank, replica, part):
    return {"own.*": Group(part, 1 + rank)}


def on_some_ranks(net, rank, replica, part):
    return {"own.*": part} if rank else None


def no_group(net, rank, replica, part):
    return {"own.*": [0, 2]}


def no_divisor(net, rank, replica, part):
    return {"own.*": Group(part, 0)}


def foreign_module(net, rank, replica, part):
    return {nn.Linear(4, 4): part}


def outside(net, rank, replica, part):
    return {"own.*": part}


def mistakes(rank, world):
    """Return the errors of this rank."""
    replica, part = groups_of(rank)
    said = []
    for make in MISTAKES:
        net = Two()
        groups = make(net, rank, replica, part)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            FastDDP(net, groups=groups, process_group=replica if make is outside else None)
        said.append(str(error.value))
    return said


MISTAKES = {
    in_two_groups: ["'own.bias'", "in two groups", "'own.*'", "'*.bias'", "narrower"],
    not_in_the_group: ["is not in the group of 'own.*'", "each rank passes"],
    partly_overlapping: ["'own.*'", "rank 0", "[0, 1]", "[1, 2, 3]"],
    without_match: ["'owned.*' matches no parameter", "named_parameters()"],
    different_patterns: ["groups is", "on rank 0"],
    different_divisors: ["groups is", "divided by 2 there", "divided by 1 on rank 0"],
    on_some_ranks: ["groups is", "on rank 0"],
    no_group: ["'own.*' must be a process group", "list"],
    no_divisor: ["divisor of 'own.*'", "positive"],
    foreign_module: ["the module 'Linear' matches no parameter"],
    outside: ["process_group of the model has"],
}


def test_mistakes_are_errors_on_every_rank():
    for said in run_ranks(mistakes, 4):
        for (make, texts), message in zip(MISTAKES.items(), said, strict=True):
            assert all(text in message for text in texts), (make.__name__, message)
