"""Units that are gathered before they are wanted: one, and those that a script names."""

import os

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastsync import fully_shard
from fastsync.fsdp.param_group import Unit
from fastsync.testing import run_ranks
from tests.fsdp.fsdp_models import OPTIMIZERS, apply, loss_of, mesh_of, net, train, words

# --- any depth, the same bits


def made(how, world):
    options = {
        "replicas": {"mesh": mesh_of(world, 2) if how == "replicas" else None},
        "lower": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        "kept parts": {"reshard_after_forward": 2},
        "coded": {"wire": "int8", "parameter_wire": "int8"},
    }
    return apply(fully_shard, net(6, 40), **options.get(how, {}))


def at_depth(rank, world, how, depth):
    """Weights and norms; every block names as many that follow it, and that precede it."""
    model = made(how, world)
    blocks = list(model.blocks)
    for number, block in enumerate(blocks if depth > 1 else ()):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - depth) : number][::-1])
    return train(model, rank, OPTIMIZERS["adamw"](model.parameters()), steps=3)


def twins(rank, world, how, memory):
    os.environ["FASTSYNC_SHM"] = memory
    wanted, norms = at_depth(rank, world, how, 1)
    for depth in (2, 4, 99):
        found, again = at_depth(rank, world, how, depth)
        assert norms == again
        assert all(map(torch.equal, found, wanted))


HOW = {"plain": 2, "three": 3, "replicas": 4, "lower": 2, "kept parts": 4, "coded": 2}


@pytest.mark.slow(but=("plain-1",))
@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("how", HOW)
def test_any_depth_gives_the_same_bits(how, memory):
    run_ranks(twins, HOW[how], how, memory)


# --- after what a module waits for


def in_order(rank, world, memory):
    """Gathers of a step, as they begin (+) and end (-)."""
    os.environ["FASTSYNC_SHM"] = memory
    model = apply(fully_shard, net(3))
    begun, seen = set(), []
    start, finish = Unit.start_gather, Unit.finish_gather

    def starts(unit):
        if not unit.is_unsharded and id(unit) not in begun:
            begun.add(id(unit))
            seen.append(f"+{unit.name or 'root'}")
        start(unit)

    def finishes(unit):
        was_whole = unit.is_unsharded
        finish(unit)
        if not was_whole:
            begun.discard(id(unit))
            seen.append(f"-{unit.name or 'root'}")

    Unit.start_gather, Unit.finish_gather = starts, finishes
    for step in range(2):
        seen.clear()
        loss_of(model, words(rank, step)).backward()
    return " ".join(seen).replace("blocks.", "")


AT_ONCE = "+root +0 -root +1 -0 +2 -1 -2 +2 +1 -2 +0 -1 -0"
LATER = "+root -root +0 -0 +1 -1 +2 -2 +2 -2 +1 -1 +0 -0"


@pytest.mark.parametrize(("memory", "wanted"), [("0", AT_ONCE), ("1", LATER)])
def test_the_next_gather_travels_after_the_one_that_is_waited_for(memory, wanted):
    """In shared memory nothing travels, and each costs memory of its own."""
    assert run_ranks(in_order, 3, memory) == [wanted] * 3


# --- what a script names


def by_hand(rank, world):
    """Units that are gathered or being gathered when block 1 runs, before and after block 0 names
    the next three."""
    os.environ["FASTSYNC_SHM"] = "0"
    model = apply(fully_shard, net(5))
    blocks, begun, seen = list(model.blocks), [], []
    start = Unit.start_gather

    def noted(unit):
        if not unit.is_unsharded and unit.name not in begun:
            begun.append(unit.name)
        start(unit)

    Unit.start_gather = noted
    blocks[1].register_forward_pre_hook(lambda *_: seen.append(list(begun)), prepend=True)
    for named in ([], blocks[1:4]):
        blocks[0].set_modules_to_forward_prefetch(named)
        for step in range(2):
            begun.clear()
            with torch.no_grad():
                loss_of(model, words(rank, step))
    return seen[1], seen[3]


def test_one_is_gathered_ahead_and_what_a_script_names():
    for alone, named in run_ranks(by_hand, 2):
        assert {name for name in alone if "blocks" in name} == {"blocks.0", "blocks.1"}
        assert {name for name in named if "blocks" in name} == {f"blocks.{n}" for n in range(4)}
