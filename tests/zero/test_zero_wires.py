"""zero=1 and 2 where gradients travel in a wire format: each rank gets what it owns alone."""

import math
import os
import random
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from fastsync import FastDDP, Wire
from fastsync.config.arguments import grouped
from fastsync.reducer.bucket_layout import (
    FlatLayout,
    outline_regions,
    region_layout,
    region_payload,
)
from fastsync.wire.formats import FORMATS
from fastsync.zero.gradient_proxies import ShardedGradient
from fastsync.zero.partition import cut_by_elements
from tests.fuzz.random_cases.wires import BOUNDS
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import Halves
from tests.zero.zero_loops import STEPS, batch, net, train

LR = 0.1


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("numels", [[0], [5, 0, 16], [17, 300, 1, 64], [1000, 3, 3], [5, 999]])
@pytest.mark.parametrize("block", [16, 64, 256])
def test_every_element_travels_once_to_its_owner(world, numels, block):
    units = cut_by_elements(numels, world)
    region = units.region
    slots = FlatLayout(units.offsets, tuple(numels), -1, region * world)
    found = region_layout(slots, world, block)
    places, elements = set(), set()
    for part in found.parts:
        run = range(part.begin, part.begin + part.numel)
        owners = {(slots.offsets[part.slot] + element) // region for element in run}
        assert owners == {part.rank} and part.place % block == 0
        elements.update((part.slot, element) for element in run)
        chunk = range(part.place, part.place + part.numel)
        assert chunk.stop <= found.numel and not places & {(part.rank, i) for i in chunk}
        places.update((part.rank, i) for i in chunk)
    assert elements == {(slot, i) for slot, numel in enumerate(numels) for i in range(numel)}
    payload = region_payload(found, FORMATS["int8"].coded_bytes)
    assert payload.flags_per_chunk >= 2 * len(numels) + 1 and found.chunks == world


def test_outlines_are_layouts_without_their_parts():
    draw = random.Random(random.SystemRandom().randrange(2**32))
    for _ in range(500):
        numels = [draw.choice((0, 1, 16, 17, 500, 5000)) for _ in range(draw.randint(1, 6))]
        world, block = draw.choice((1, 2, 3, 8, 61)), draw.choice((16, 64, 256))
        units = cut_by_elements(numels, world)
        slots = FlatLayout(units.offsets, tuple(numels), -1, units.region * world)
        whole = region_layout(slots, world, block)
        assert outline_regions(slots, world, block) == replace(whole, parts=()), (numels, world)


def weights_and_shares(rank, world, wire, zero, local):
    """After plain SGD steps; the elements of gradients here, and how many are spread."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    module = net()
    model = FastDDP(module, zero=zero, wire=wire, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), LR)
    train(model, optimizer, rank, range(STEPS))
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    spread = sum(isinstance(grad, ShardedGradient) for grad in grads)
    largest = max(g.norm(math.inf).item() for g in grads if g.numel())
    return [p.detach().clone() for p in module.parameters()], spread / len(grads), largest


def loss_of(name):
    """Return the loss of one code, as a share of the largest number in its block."""
    return sum(BOUNDS[name])


def compare(name, world, wire, local=1):
    """Weights with and without zero: each step's gradients are rounded once, or twice."""
    ranks = run_ranks(weights_and_shares, world, wire, 0, local)
    for zero in (1, 2):
        found = run_ranks(weights_and_shares, world, wire, zero, local)
        assert all(share == 1 for _, share, _ in found), "some gradients stay whole"
        for (wanted, _, largest), (weights, _, _) in zip(ranks, found, strict=True):
            bound = 4 * STEPS * LR * loss_of(name) * max(1.0, 4 * largest) + 1e-5
            pairs = list(zip(weights, wanted, strict=True))
            assert all(torch.allclose(a, b, rtol=0, atol=bound) for a, b in pairs)
        for weights, _, _ in found[1:]:
            pairs = zip(weights, found[0][0], strict=True)
            assert all(map(torch.equal, *zip(*pairs, strict=True))), "ranks differ"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "int8", "int4"])
def test_weights_are_those_of_the_whole_gradients(name, world):
    compare(name, world, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_weights_of_two_nodes(name):
    compare(name, 4, Wire(name, form="hierarchical"), local=2)


class Mixed(nn.Module):
    """fp64, which no wire codes, and what is too small for codes, beside what travels in them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.coded = nn.Linear(40, 33)
        self.small = nn.Parameter(torch.randn(21))
        self.wide = nn.Parameter(torch.randn(5, 17, dtype=torch.float64))

    def forward(self, x):
        rest = x.mean() * (self.small.square().sum() + self.wide.pow(3).sum())
        return self.coded(x).square().mean() + rest


def beside_codes(rank, world, wire, zero):
    """Weights of what is not coded, after steps; whether buckets are coded."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    module = Mixed()
    model = FastDDP(module, zero=zero, wire=wire, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), LR)
    for step in range(3):
        generator = torch.Generator().manual_seed(9 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 40, generator=generator)).backward()
        optimizer.step()
    coded = {bucket.coded is not None for bucket in model._engine.plan.buckets}
    return [module.small.detach().clone(), module.wide.detach().clone()], coded


@pytest.mark.slow
def test_what_is_not_coded_reaches_its_owner_from_other_nodes():
    wire = Wire("int8", form="hierarchical", min_bytes=512)
    wanted, _ = run_ranks(beside_codes, 4, wire, 0)[0]
    for zero in (1, 2):
        for found, coded in run_ranks(beside_codes, 4, wire, zero):
            assert coded == {True, False}
            pairs = zip(found, wanted, strict=True)
            assert all(torch.allclose(a, b, rtol=1e-5) for a, b in pairs)


@pytest.mark.slow
def test_weights_with_a_codec_of_the_user_s():
    compare("fp16", 3, Halves())
    compare("fp16", 4, Wire(Halves(), form="hierarchical"), local=2)


def kept_back(rank, world, wire, local):
    """By step: averages that arrived, what this rank had computed, and what it keeps back."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    module = nn.Linear(40, 13)
    model = FastDDP(module, zero=1, wire=wire, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), 0.0)
    steps = []
    for step in range(4):
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(7 * step + rank))
        mine = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        averages = [p.grad.clone() for p in module.parameters()]
        if step == 2:  # what is kept back survives a checkpoint
            model.load_sync_state_dict(model.sync_state_dict())
        residuals = model.sync_state_dict()["residuals"]
        steps.append((averages, mine, [r.float() for r in residuals.values()]))
        optimizer.step()
    return steps


@pytest.mark.slow("3-auto-1")
@pytest.mark.parametrize(("world", "form", "local"), [(3, "auto", 1), (4, "hierarchical", 2)])
def test_nothing_is_lost_with_error_feedback(world, form, local):
    wire = Wire("int4", form, error_feedback=True)
    ranks = run_ranks(kept_back, world, wire, local)
    before = 0.0
    for step in range(4):
        kept = [sum(r[step][2][i].double() for r in ranks) for i in range(2)]
        assert step == 0 or max(k.abs().max() for k in kept) > 0
        for i in range(2):
            average = ranks[0][step][0][i].double()
            computed = sum(r[step][1][i].double() for r in ranks) / world
            missing = average - computed + kept[i] - (before[i] if step else 0)
            # The first step made whole gradients, with the residual of the second rounding.
            assert missing.abs().max() < 1e-4 * (1 + computed.abs().max())
        before = kept


def bytes_of_a_step(rank, world, wire, local):
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    module = nn.Linear(256, 256, bias=False)
    model = FastDDP(
        module,
        zero=2,
        find_unused_parameters=False,
        **grouped({"wire": wire, "shared_memory": False}),
    )
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        before = model.sync_stats()
        model(torch.randn(2, 256)).sum().backward()
        between = model.sync_stats()
        optimizer.step()
    after = model.sync_stats()
    return [
        between.sent_bytes - before.sent_bytes,
        between.between_nodes_bytes - before.between_nodes_bytes,
        after.sent_bytes - between.sent_bytes,
    ]


@pytest.mark.slow(but=("fp32",))
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_half_of_the_bytes_of_whole_gradients_are_sent(name):
    numel = 256 * 256
    for gradients, _, weights in run_ranks(bytes_of_a_step, 4, name, 4):
        assert gradients == pytest.approx(3 * FORMATS[name].coded_bytes(numel // 4), rel=0.01)
        assert weights == 3 * numel
    wire = Wire(name, form="hierarchical")
    for gradients, between, _ in run_ranks(bytes_of_a_step, 4, wire, 2):
        assert between == pytest.approx(FORMATS[name].coded_bytes(numel // 4), rel=0.01)
        assert gradients - between == pytest.approx(4 * numel // 2, rel=0.01)


def accumulated(rank, world, wire, zero):
    """Several backwards for one step, gradients that stay, a frozen one, another wire."""
    module = net()
    model = FastDDP(module, zero=zero, wire=wire, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        if step % 3 != 1:
            optimizer.zero_grad()
        with model.no_sync():
            model(batch(rank, 50 + step)).mean().backward()
        module.scale.requires_grad_(step != 3)
        model(batch(rank, step)).mean().backward()
        optimizer.step()
        if step == 3:
            model.set_wire("fp16")
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_accumulate(zero):
    wire = Wire("fp16", warmup_steps=2)
    wanted = run_ranks(accumulated, 2, Wire(), 0)[0]
    for found in run_ranks(accumulated, 2, wire, zero):
        assert all(
            torch.allclose(a, b, rtol=0.01, atol=0.01) for a, b in zip(found, wanted, strict=True)
        )


def overridden(rank, world):
    """Formats that differ within what one bucket held, and one that cannot be shared."""
    module = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    wire = Wire("int8", overrides={"*bias": "fp32", "1.weight": "bf16"})
    model = FastDDP(module, zero=1, wire=Wire())
    optimizer = optim.SGD(model.parameters(), 0.0)
    kinds = []
    for chosen in (Wire(), wire, Wire("topk")):
        model.set_wire(chosen)
        for _ in range(2):
            optimizer.zero_grad()
            model(
                torch.randn(2, 30, generator=torch.Generator().manual_seed(rank))
            ).sum().backward()
            optimizer.step()
        kinds.append(sorted(type(p.grad).__name__ for p in module.parameters()))
    formats = sorted(b.format_name for plan in model._engine.plans for b in plan.buckets)
    return kinds, formats


def test_formats_may_differ_within_a_unit():
    for kinds, formats in run_ranks(overridden, 2):
        assert kinds == [["ShardedGradient"] * 4] * 2 + [["Tensor"] * 4]
        assert {"int8", "bf16", "float32", "topk"} <= set(formats)
