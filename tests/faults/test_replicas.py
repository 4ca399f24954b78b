"""replicas: a bit that differs between ranks is found, named, and repaired or an error."""

import logging
import os
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel.distributed import _MixedPrecision

from fastsync import FastDDP, Faults, RankMismatchError, ReplicaError, ReplicaPolicy
from fastsync.config.arguments import grouped
from fastsync.reducer import core
from fastsync.testing import RankError
from fastsync.zero.gradient_proxies import ShardedGradient
from tests.helpers.teams import run_ranks

EVERY = 3
WAYS = {
    "plain": {},
    "copied": {"gradient_as_bucket_view": False},
    "over the network": {"shared_memory": False},
    "static": {"static_graph": True},
    "no flags": {"find_unused_parameters": False},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "top-k": {"wire": "topk"},
    "mixed": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 2, int8": {"zero": 2, "wire": "int8", "parameter_wire": "int8"},
}


def net():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 2)
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator)


def drawn(count=1):
    """Seeds of this run's cases."""
    seeds = [time.time_ns() + i for i in range(count)]
    print(f"seeds {seeds}")
    return seeds


class Fault:
    """One bit of one parameter, or of one average, of one rank; the same draw on every rank."""

    def __init__(self, seed, world, module):
        rng = random.Random(seed)
        self.rank = rng.randrange(world)
        self.name, self.param = rng.choice(list(module.named_parameters()))
        self.byte = rng.randrange(self.param.numel() * self.param.element_size())
        self.bit = rng.randrange(8)

    def flip(self, tensor):
        tensor.detach().view(-1).view(torch.uint8)[self.byte] ^= 1 << self.bit


def loop(model, rank, steps, before_step=lambda step: None, make=optim.SGD):
    """Call `before_step` with the number of each step, from 1, before its forward."""
    optimizer = make(model.parameters(), lr=0.05)
    for step in range(1, steps + 1):
        before_step(step)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        model.clip_grad_norm_(0.05)  # by squares that were summed up before a repair
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def agree(results):
    return all(all(map(torch.equal, mine, results[0])) for mine in results)


def weights_flipped(rank, world, seed, options):
    """A bit of a weight flips before the second step; the ranks compare after the third.

    With zero each step sends the owner's parameters to all: there it flips before the third.
    """
    at = EVERY if "zero" in options else 2
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=EVERY)), **grouped(options))
    fault = Fault(seed, world, model.module)

    def before_step(step):
        if step == at and rank == fault.rank:
            fault.flip(fault.param)

    with pytest.raises(ReplicaError) as caught:
        loop(model, rank, 2 * EVERY, before_step)
    error = caught.value
    return (fault.name, fault.rank), (error.parameters, error.ranks, error.step), str(error)


@pytest.mark.slow(but=("plain-4",))
@pytest.mark.parametrize(
    "way, world",
    [("plain", 4), ("int8", 3), ("mixed", 3), ("zero 1", 3), ("zero 2", 4)],
)
def test_a_flipped_bit_of_a_weight_is_found_at_the_next_comparison(way, world):
    (seed,) = drawn()
    for (name, rank), (parameters, ranks, step), text in run_ranks(
        weights_flipped, world, seed, WAYS[way]
    ):
        assert (parameters, ranks, step) == ([name], [[rank]], EVERY)
        assert f"after step {EVERY}, rank {rank} differs" in text and repr(name) in text
        assert "ReplicaPolicy(repair=True)" in text


def two_ranks(rank, world, seed, repair):
    policy = ReplicaPolicy(every=1, repair=repair)
    model = FastDDP(net(), faults=Faults(replicas=policy))
    fault = Fault(seed, world, model.module)
    if rank == fault.rank:
        fault.flip(fault.param)
    with pytest.raises(ReplicaError) as caught:
        loop(model, rank, 1)
    return fault.name, caught.value.parameters, caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("repair", [False, True])
def test_two_ranks_have_no_majority(repair):
    (seed,) = drawn()
    for name, parameters, ranks, text in run_ranks(two_ranks, 2, seed, repair):
        assert (parameters, ranks) == ([name], [[0, 1]])
        assert "ranks 0, 1 differ from each other" in text and "No value has a majority" in text


class Said(logging.Handler):
    """Handler that keeps what fastsync has logged."""

    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("fastsync").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def repaired(rank, world, seed, what, options):
    """Just before a comparison, so that nothing has come of it; with what a sound run ends with."""
    sound = loop(FastDDP(net(), **grouped(options)), rank, 2 * EVERY)
    said = Said()
    policy = ReplicaPolicy(every=EVERY, repair=True)
    model = FastDDP(net(), faults=Faults(replicas=policy), **grouped(options))
    fault = Fault(seed, world, model.module)

    def corrupt():
        fault.flip(fault.param if what == "weight" else fault.param.grad)

    def before_step(step):
        if step == EVERY and rank == fault.rank:
            model._engine.core.at_end(corrupt)  # of this step's backward: averages are there

    found = loop(model, rank, 2 * EVERY, before_step)
    return found, sound, (fault.name, fault.rank), said.texts


@pytest.mark.slow(
    but=(
        "plain-weight",
        "zero 2, int8-weight",
        "over the network-average",
    )
)
@pytest.mark.parametrize(
    "way, what",
    [
        ("plain", "weight"),
        ("plain", "average"),
        ("over the network", "average"),
        ("copied", "average"),
        ("bf16", "average"),
        ("int8", "average"),
        ("zero 1", "weight"),
        ("zero 2, int8", "weight"),
    ],
)
def test_a_repair_leaves_no_trace(way, what):
    (seed,) = drawn()
    results = run_ranks(repaired, 3, seed, what, WAYS[way])
    named = "parameter" if what == "weight" else "the average gradient of parameter"
    for rank, (found, sound, (name, wrong), texts) in enumerate(results):
        assert all(map(torch.equal, found, sound))
        assert len(texts) == (rank in (0, wrong))
        for text in texts:
            assert f"after step {EVERY}, rank {wrong} differed" in text
            assert f"in {named} {name!r}" in text
    assert agree([found for found, *_ in results])


def led_astray(rank, world, seed, make):
    """One rank steps on an average that the others do not have, and compares one step later."""
    policy = ReplicaPolicy(every=2, repair=True)
    model = FastDDP(net(), faults=Faults(replicas=policy))
    optimizer = make(model.parameters(), lr=0.05)
    fault = Fault(seed, world, model.module)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        if step == 3 and rank == fault.rank:
            fault.param.grad.add_(1.0)
        optimizer.step()
        if step == 4:
            states = optimizer.state[fault.param]
    weights = [p.detach().clone() for p in model.parameters()]
    return weights + [v for v in states.values() if isinstance(v, torch.Tensor)]


def momentum(params, lr):
    return optim.SGD(params, lr, momentum=0.9)


@pytest.mark.parametrize("make", [momentum, optim.AdamW])
def test_the_optimizers_state_is_repaired_too(make):
    (seed,) = drawn()
    assert agree(run_ranks(led_astray, 3, seed, make))


def several(rank, world):
    """Two ranks of five differ in one parameter, another one in a second."""
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=1)))
    with torch.no_grad():
        if rank in (1, 4):
            model.module[0].bias[7] += rank
        if rank == 3:
            model.module[4].weight[0, 0] += 1
    with pytest.raises(ReplicaError) as caught:
        loop(model, rank, 1)
    return caught.value.parameters, caught.value.ranks, str(caught.value)


def test_everything_that_differs_is_named():
    for parameters, ranks, text in run_ranks(several, 5):
        assert (parameters, ranks) == (["0.bias", "4.weight"], [[1, 4], [3]])
        assert "ranks 1, 4 differ from the other ranks" in text
        assert "1 more tensors differ" in text


def sound(rank, world, way, every):
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every)), **grouped(WAYS[way]))
    return loop(model, rank, 5, make=optim.AdamW)


@pytest.mark.slow(
    but=(
        "plain",
        "static",
        "zero 2, int8",
    )
)
@pytest.mark.parametrize("way", WAYS)
def test_sound_ranks_are_left_alone(way):
    assert agree(run_ranks(sound, 3, way, 1))


def skipping(rank, world):
    """One rank leaves out an optimizer's step that the others make."""
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=EVERY)))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(ReplicaError) as caught:
        for step in range(1, EVERY + 1):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            if (rank, step) != (2, EVERY - 1):
                optimizer.step()
    names = [name for name, _ in model.module.named_parameters()]
    return caught.value.parameters == names, caught.value.ranks


def test_a_step_that_one_rank_left_out_is_found():
    for all_named, ranks in run_ranks(skipping, 4):
        assert all_named and ranks == [[2]] * 6


def digested(model):
    """Return what the reducer digests in one pass, by the definition: one
    tensor after the other.
    """
    params = [p for p in model.module.parameters()]
    counts = model._engine.core.used_counts()
    planned = set(model._engine.plan.params)

    def average(index, param):
        whole = param.grad is not None and not isinstance(param.grad, ShardedGradient)
        known = whole and param.grad.layout is torch.strided
        return param.grad if known and counts[index] and index in planned else None

    held = [*params, *(average(index, param) for index, param in enumerate(params))]
    return [0 if tensor is None else core.digests([tensor])[0] for tensor in held]


def digesting(rank, world, options):
    """The fast way and the slow one, after each step."""
    model = FastDDP(Branches(), find_unused_parameters=True, **grouped(options))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step), [rank, 2]).sum().backward()
        with torch.no_grad():  # another way to lie in memory
            model.module.parts[0].weight.data = model.module.parts[0].weight.t().contiguous().t()
        found.append((model._engine.core.replica_digests(), digested(model)))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}, {"wire": "bf16"}, {"zero": 2}]
)
def test_one_pass_digests_what_the_definition_says(options):
    results = run_ranks(digesting, 2, options)
    for found in results:
        for fast, slow in found:
            assert fast == slow and any(fast)
        assert found[0][0] != found[1][0], "they follow the weights"
    assert results[0] == results[1]


def called(rank, world):
    """How often Python is called, of six steps."""
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=1)))
    calls = []
    model._engine.core.compare_every(2, calls.append, [world], [0] * 6)

    def before_step(step):
        if (rank, step) == (1, 4):
            with torch.no_grad():
                model.module[0].bias[0] += 1

    loop(model, rank, 6, before_step)
    return calls


def test_python_is_called_where_ranks_differ_alone():
    first, second, third = run_ranks(called, 3)
    assert [len(calls) for calls in (first, second, third)] == [2, 2, 2], "after steps 4 and 6"
    assert first == third
    (mine, _), (theirs, _) = first, second
    assert [i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len(set(pair)) > 1] == [1]


GROUPED = "2.weight"  # the ranks 0, 1 and 2 have it alike, and rank 3 alone


def in_groups(rank, **options):
    """A model whose middle layer the ranks of a group have alike, and the others another one."""
    parts = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3])]
    module = net()
    with torch.no_grad():
        module[2].weight.mul_(1 + rank // 3)
    return FastDDP(module, groups={"2.*": parts[rank // 3]}, **options)


def flipped_in_groups(rank, world, name, wrong, zero):
    model = in_groups(rank, zero=zero, faults=Faults(replicas=ReplicaPolicy(every=EVERY)))

    def before_step(step):
        if (rank, step) == (wrong, EVERY):
            with torch.no_grad():
                model.module.get_parameter(name)[0] += 1

    with pytest.raises(ReplicaError) as caught:
        loop(model, rank, EVERY, before_step)
    return caught.value.parameters, caught.value.ranks, str(caught.value)


@pytest.mark.parametrize(
    "name, wrong, zero", [(GROUPED, 1, 0), (GROUPED, 0, 2), ("0.weight", 3, 0), ("0.weight", 3, 1)]
)
def test_parameters_of_a_group_are_compared_among_its_ranks(name, wrong, zero):
    for parameters, ranks, text in run_ranks(flipped_in_groups, 4, name, wrong, zero):
        assert (parameters, ranks) == ([name], [[wrong]])
        assert ("which ranks 0-2 should have alike" in text) == (name == GROUPED)


def repaired_in_groups(rank, world, zero, what):
    """Rank 1's is corrupted just before a comparison; with what a sound run ends with."""
    sound = loop(in_groups(rank, zero=zero), rank, 2 * EVERY, make=momentum)
    policy = Faults(replicas=ReplicaPolicy(every=EVERY, repair=True))
    model = in_groups(rank, zero=zero, faults=policy)
    param = model.module.get_parameter(GROUPED)

    def corrupt():
        (param if what == "weight" else param.grad).detach()[0] += 1
        for state in model_optimizers[0].state[param].values() if what == "weight" else ():
            state.zero_()

    model_optimizers = []

    def make(params, lr):
        model_optimizers.append(momentum(params, lr))
        return model_optimizers[0]

    def before_step(step):
        if (rank, step) == (1, EVERY):
            model._engine.core.at_end(corrupt)

    return loop(model, rank, 2 * EVERY, before_step, make=make), sound


@pytest.mark.parametrize("what", ["weight", "average"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_repair_in_a_group_leaves_no_trace(zero, what):
    results = run_ranks(repaired_in_groups, 4, zero, what)
    for found, sound in results:
        assert all(map(torch.equal, found, sound))
    (first, _), *_, (last, _) = results
    assert not torch.equal(first[2], last[2]), "the parts have others"


class Branches(nn.Module):
    """Branches of which ranks use different ones, and one that no rank uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList([nn.Linear(6, 2) for _ in range(4)])
        self.words = nn.Embedding(50, 6, sparse=True)

    def forward(self, x, used):
        x = x + self.words(torch.arange(4) + used[0])
        return sum(self.parts[i](x) for i in used)


def lopsided(rank, world):
    """Train with legitimate differences: gradients that are not averaged, sparse ones, other
    branches."""
    model = FastDDP(
        Branches(), faults=Faults(replicas=ReplicaPolicy(every=1)), find_unused_parameters=True
    )
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step), [rank, 2]).sum().backward()
        optimizer.step()
        with torch.no_grad():  # no backward reaches it, so it stays this rank's own
            model.module.parts[3].weight.grad = torch.full((2, 6), float(rank))
        model(batch(rank, step), [rank, 2]).sum().backward()
    return model.module.parts[3].weight.grad


def test_gradients_that_nobody_averages_are_not_compared():
    first, second = run_ranks(lopsided, 2)
    assert not torch.equal(first, second), "they do differ"


def dying(rank, world, options):
    """One rank ends where the others compare."""
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=EVERY)), **grouped(options))

    def before_step(step):
        if (rank, step) == (1, EVERY):
            model._engine.core.at_end(lambda: os._exit(3))  # all have their averages

    loop(model, rank, EVERY, before_step)


@pytest.mark.parametrize("way", ["plain", "over the network"])
def test_a_rank_that_ends_meanwhile_is_named(way):
    with pytest.raises(RankError) as caught:
        run_ranks(dying, 3, WAYS[way])
    text = str(caught.value)
    # Its parent may reap it before the others ask how it has ended.
    ended = r"rank 1 (exited with code 3|ended) without a word.*?\."
    for rank in (0, 2):
        assert re.search(rf"{ended} Rank {rank} waited .* the comparison", text), text


def counted_on(rank, world):
    """Steps that were made before a restart count."""
    said = Said()
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=4, repair=True)))
    loop(model, rank, 3)
    state = model.sync_state_dict()
    model = FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=4, repair=True)))
    model.load_sync_state_dict(state)
    if rank == 1:
        with torch.no_grad():
            model.module[0].bias[0] += 1
    loop(model, rank, 1)
    return said.texts


def test_steps_of_the_whole_training_count():
    texts = run_ranks(counted_on, 3)
    assert [len(said) for said in texts] == [1, 1, 0] and "after step 4" in texts[0][0]


def refusals(rank, world):
    with pytest.raises(RankMismatchError) as caught:
        FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=1 + rank)))
    return str(caught.value)


def test_what_cannot_be_compared_is_refused():
    for text in run_ranks(refusals, 2):
        assert "replicas is ReplicaPolicy(every=2" in text
    with pytest.raises(ValueError, match="at least 1"):
        ReplicaPolicy(every=0)
    with pytest.raises(TypeError, match="a number"):
        ReplicaPolicy(every=True)


def alone(rank, world):
    return len(loop(FastDDP(net(), faults=Faults(replicas=ReplicaPolicy(every=1))), rank, 2))


def test_one_rank_has_nobody_to_compare_with():
    assert run_ranks(alone, 1) == [6]
