"""Memory budget of units: it is kept to, and bits stay the same."""

import os

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fastsync import FastDDP, Zero, fully_shard
from fastsync._torch import local_of
from fastsync.faults.consensus import RankMismatchError
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import (
    OPTIMIZERS,
    Block,
    apply,
    loss_of,
    mesh_of,
    net,
    train,
    words,
)
from tests.helpers.teams import run_ranks

VARIABLE = "FASTSYNC_UNIT_MEMORY_MB"
BF16 = MixedPrecisionPolicy(torch.bfloat16)


def set_mark(nbytes):
    os.environ.pop(VARIABLE, None)
    if nbytes is not None:
        os.environ[VARIABLE] = repr(nbytes / 2**20)


def made(how, world):
    if how == "zero=3":
        return FastDDP(net(4, 128), zero=Zero(3, units=[Block]))
    options = {"mesh": mesh_of(world, 2)} if how == "replicas" else {}
    if how == "lower":
        options["mp_policy"] = BF16
    model = apply(fully_shard, net(4, 128), **options)
    return model


def run(how, rank, world, mark, memory=False):
    """Weights and norms, the most that the pool held, and the units."""
    set_mark(mark)
    os.environ["FASTSYNC_SHM"] = str(int(memory))
    model = made(how, world)
    trained = train(model, rank, OPTIMIZERS["adamw"](model.parameters()), steps=3)
    context = state_of(model.module if how == "zero=3" else model).context
    return trained, max(links.core.most_bytes() for links in context.all_links()), context.units()


def room_for(units, blocks):
    """Bytes for the root's unit, so many blocks and the gradients that travel."""
    root, *others = sorted(units, key=lambda unit: unit.bytes_to_gather())
    return sum(u.bytes_to_gather() for u in (root, *others[:blocks])) + max(
        unit.bytes_to_reduce() for unit in units
    )


def marked(rank, world, how):
    """Return what the pool held without a mark, and each mark with what it held below that."""
    wanted, most, units = run(how, rank, world, None)
    held = []
    for blocks in (1, 2):
        mark = room_for(units, blocks)
        found, below, _ = run(how, rank, world, mark)
        assert all(map(torch.equal, found[0], wanted[0])) and found[1] == wanted[1]
        held.append((mark, below))
    two = sum(sorted(m.unsharded.numel() * m.unsharded.itemsize for m in units[-1].params)) * 2
    return most, two, held


HOW = {"plain": 2, "three": 3, "replicas": 4, "lower": 3, "zero=3": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_the_mark_is_kept_and_bits_stay(how):
    for most, two, ((one_mark, one), (two_mark, both)) in run_ranks(marked, HOW[how], how):
        assert one <= one_mark < most, "one block at a time"
        assert two < both <= two_mark, "the next one while a block computes"
        assert one < both <= most


def in_memory(rank, world, how):
    trained, most, units = run(how, rank, world, None, memory=True)
    wanted, more, _ = run(how, rank, world, None)
    assert all(map(torch.equal, trained[0], wanted[0])) and trained[1] == wanted[1]
    largest = max(sum(m.unsharded.nbytes for m in unit.params) for unit in units)
    return largest, most, more, room_for(units, 1)


@pytest.mark.slow(but=("plain",))
@pytest.mark.parametrize("how", HOW)
def test_what_is_gathered_ahead_in_shared_memory_takes_no_other(how):
    for largest, most, more, one in run_ranks(in_memory, HOW[how], how):
        assert largest < most <= one < more


CODED = {"wire": "int8", "parameter_wire": "int8"}
ALONE = {"plain": {}, "lower": {"mp_policy": BF16}, "coded": CODED, "fp8": {"wire": "fp8_e4m3"}}


def one_unit(rank, world, options):
    """Return what the pool held after forward and after backward, and what
    either was said to take.
    """
    set_mark(None)
    os.environ["FASTSYNC_SHM"] = "0"
    model = fully_shard(net(2, 128), **options)
    model.set_reshard_after_backward(False)
    loss = loss_of(model, words(rank, 0))
    context = state_of(model).context
    (links,), (unit,) = context.all_links(), context.units()
    gathered = links.core.most_bytes()
    loss.backward()
    whole = sum(m.unsharded.numel() * m.unsharded.itemsize for m in unit.params)
    return gathered, links.core.most_bytes(), whole, unit.bytes_to_gather(), unit.bytes_to_reduce()


@pytest.mark.slow(but=("plain-2", "coded-3"))
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ALONE)
def test_what_a_unit_takes_is_known_before(how, world):
    """Messages of a backward may lie where those of the gather did; some that are not coded are
    received where the sums will be.
    """
    for gathered, after, whole, to_gather, to_reduce in run_ranks(one_unit, world, ALONE[how]):
        assert gathered == to_gather
        assert after <= to_gather + to_reduce
        assert "wire" not in ALONE[how] or after >= whole + to_reduce


def evaluated(rank, world, options):
    """The most that a forward's units took, over the bytes of one that is whole."""
    set_mark(None)
    os.environ["FASTSYNC_SHM"] = "0"
    model = apply(fully_shard, net(4, 128), **options)
    for step in range(3):  # the first has no order to follow
        with torch.no_grad():
            loss_of(model, words(rank, step))
    context = state_of(model).context
    largest = max(sum(m.unsharded.nbytes for m in unit.params) for unit in context.units())
    return context.all_links()[0].core.most_bytes() / largest


def test_codes_that_are_under_way_take_no_other_memory():
    assert min(run_ranks(evaluated, 2, {})) > 2, "the next unit's, beside what computes"
    assert max(run_ranks(evaluated, 2, CODED)) < 2


def wide_mark(rank, world):
    return [run("plain", rank, world, mark)[1] for mark in (None, 2**40)]


@pytest.mark.slow
def test_a_mark_that_is_never_reached_changes_nothing():
    for without, below in run_ranks(wide_mark, 2):
        # Below a mark blocks are used again for what needs as many bytes, and for nothing else.
        assert 0.99 * without < below <= without


def least_mark(rank, world):
    """A mark that no unit fits in below."""
    (wanted, norms), _, units = run("plain", rank, world, None)
    (found, again), most, _ = run("plain", rank, world, 1)
    assert all(map(torch.equal, found, wanted)) and norms == again
    return most, room_for(units, 1)


@pytest.mark.slow
def test_what_a_module_needs_is_gathered_whatever_the_mark():
    for most, one in run_ranks(least_mark, 2):
        assert 1 < most <= one


def unlike(rank, world, marks):
    set_mark(marks[rank])
    try:
        loss_of(apply(fully_shard, net()), words(rank, 0))
    except RankMismatchError as error:
        return str(error)


@pytest.mark.slow("marks0")
@pytest.mark.parametrize("marks", [(None, None, 2**20), (2**19, 2**20, 2**20)])
def test_ranks_with_other_marks_are_refused_everywhere(marks):
    for text in run_ranks(unlike, 3, marks):
        assert VARIABLE in text
        for mark in marks:
            assert ("none" if mark is None else f"{mark} bytes") in text


# --- Memory of a rank between two steps: its share of parameters, gradients and optimizer states


WIDTH, LAYERS = 96, 4


def block():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(LAYERS)), nn.Linear(WIDTH, 8))


def by_units(**options):
    model = stack()
    for block in model[:-1]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


WAYS = {
    "fully_shard": by_units,
    "kept in forward": lambda: by_units(reshard_after_forward=False),
    "zero=3": lambda: FastDDP(stack(), zero=3),
}


def held_bytes(tensors):
    """Return the bytes of storages, each counted once."""
    local = [local_of(t) if isinstance(t, DTensor) else t for t in tensors]
    storages = [t.untyped_storage() for t in local]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def wholes(model):
    found = {state_of(module) for module in model.modules()} - {None}
    units = [state.unit for state in found if state.unit is not None]
    return [param.unsharded for unit in units for param in unit.params]


def at_rest(rank, world, way):
    """Over 16 bytes per parameter and rank; and the bytes and the number of whole parameters."""
    model = WAYS[way]()
    optimizer = optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    params = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = held_bytes([*params, *(p.grad for p in params), *states])
    numel = sum(p.numel() for p in stack().parameters())
    whole = wholes(model)
    return held / (16 * numel / world), held_bytes(whole), len(whole)


@pytest.mark.slow(but=("fully_shard-2", "zero=3-4"))
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_holds_16_bytes_per_parameter_and_rank(way, world):
    for ratio, whole, members in run_ranks(at_rest, world, way):
        assert 0.99 <= ratio <= 1.01
        assert (whole, members) == (0, 4 * LAYERS + 2)
