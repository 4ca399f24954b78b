"""Two nodes of two ranks: summed as they are inside a node, coded between nodes."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, RankMismatchError, Wire
from fastsync.config.arguments import grouped
from fastsync.wire.formats import FORMATS
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import Halves
from tests.wire.test_error_feedback import restart_changes_no_bit, run
from tests.wire.test_wire import (
    TOLERANCE,
    errors_of_steps,
    flat_grads,
    inputs,
    model,
    poisoned,
    residual_mass,
    true_average,
)

LOCAL = 2


def on_nodes(rank, world, fn, *args):
    """Call fn as torchrun would on machines of two ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL)
    return fn(rank, world, *args)


def hierarchical(format, **options):
    return Wire(format, form="hierarchical", **options)


@pytest.mark.slow(but=("fp32",))
@pytest.mark.parametrize("wire", FORMATS)
def test_averages_arrive_alike_and_about_right(wire):
    policy = hierarchical(wire, error_feedback=False)
    for errors, buckets in run_ranks(on_nodes, 4, errors_of_steps, policy):
        assert buckets > 1
        assert max(errors) < TOLERANCE[wire]
        assert wire == "fp32" or min(errors) > TOLERANCE[wire] / 100  # it did travel coded


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [600, 3000])
def test_in_pieces(piece_bytes):
    policy = hierarchical("bf16", piece_bytes=piece_bytes)
    for errors, _ in run_ranks(on_nodes, 4, errors_of_steps, policy, 5):
        assert max(errors) < TOLERANCE["bf16"]


@pytest.mark.slow
def test_three_nodes_take_the_two_shot_form():
    for errors, _ in run_ranks(on_nodes, 6, errors_of_steps, hierarchical("int8"), 3, timeout=120):
        assert TOLERANCE["int8"] / 100 < max(errors) < TOLERANCE["int8"]


def test_a_codec_of_the_user_s():
    for errors, _ in run_ranks(on_nodes, 4, errors_of_steps, hierarchical(Halves())):
        assert 1e-5 < max(errors) < 2e-3


def bytes_of_steps(rank, world, wire, steps, shared_memory):
    wrapped = FastDDP(
        model(),
        find_unused_parameters=False,
        **grouped({"wire": wire, "shared_memory": shared_memory}),
    )
    for step in range(steps):
        wrapped(inputs(step, rank)).square().mean().backward()
    coded = [bucket.coded.layout for bucket in wrapped._engine.plan.buckets]
    numel = sum(layout.chunks * layout.chunk_numel for layout in coded)
    return wrapped.sync_stats(), numel, sum(layout.chunks for layout in coded)


@pytest.mark.slow(
    but=(
        "bf16-4-True",
        "bf16-4-False",
    )
)
@pytest.mark.parametrize("world, in_memory", [(4, True), (4, False), (6, False)])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_bytes_between_nodes(name, world, in_memory):
    """2 (n-1)/n of the coded bucket over the ranks of a node, whatever the form between nodes."""
    nodes, fmt = world // LOCAL, FORMATS[name]
    wire = hierarchical(name)
    results = run_ranks(on_nodes, world, bytes_of_steps, wire, 2, in_memory, timeout=120)
    for stats, numel, chunks in results:
        gathered = nodes == 2  # each chunk is then a whole shard
        padding = 16 * chunks
        coded = fmt.coded_bytes(numel)
        formula = 2 * (nodes - 1) / nodes * coded / LOCAL
        if gathered:
            assert formula == (nodes - 1) * coded / LOCAL
        sent = stats["between_nodes_bytes"] / 2
        assert formula <= sent <= formula + 2 * padding
        in_node = 0 if in_memory else 2 * (LOCAL - 1) / LOCAL * 4 * numel
        assert stats["sent_bytes"] / 2 == sent + in_node


@pytest.mark.slow("6")
@pytest.mark.parametrize("world", [4, 6])
def test_the_residuals_are_what_the_averages_lack(world):
    """Another plan moves shards between ranks."""
    wire = hierarchical("int4")
    for off, share in run_ranks(on_nodes, world, residual_mass, wire, True, timeout=120):
        assert off < 1e-4
        assert share < 0.6  # of its shard alone


@pytest.mark.slow
def test_a_restart_changes_no_bit():
    wire = hierarchical("int4", stochastic=True)
    restart_changes_no_bit(4, lambda *args: run_ranks(on_nodes, 4, run, wire, *args))


def test_poison_is_gone_in_the_next_step():
    for result in run_ranks(on_nodes, 4, poisoned, hierarchical("int4"), math.nan):
        assert result == [(False, False), (True, True), (True, True), (True, True)]


def averages_of(rank, world, wire):
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=0.1)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(inputs(step, rank)).square().mean().backward()
    return flat_grads(wrapped), wrapped.sync_stats()


def nodes_of_one(rank, world, name):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return averages_of(rank, world, hierarchical(name))


def lone_rows(rank, world, name):
    """A grid of one column, whose groups are given."""
    rows = [dist.new_group([r]) for r in range(world)]
    groups = {"node_group": rows[rank], "cross_group": dist.group.WORLD}
    return averages_of(rank, world, hierarchical(name, **groups))


@pytest.mark.slow(but=("nodes_of_one-2",))
@pytest.mark.parametrize("run, world", [(nodes_of_one, 2), (nodes_of_one, 3), (lone_rows, 3)])
def test_nodes_of_one_rank_have_the_bits_of_the_form_between_them(run, world):
    wanted = run_ranks(
        averages_of, world, Wire("int8", form="gather" if world == 2 else "two_shot")
    )
    for (found, stats), (same, its_stats) in zip(
        run_ranks(run, world, "int8"), wanted, strict=True
    ):
        assert torch.equal(found, same)
        assert stats["sent_bytes"] == stats["between_nodes_bytes"] == its_stats["sent_bytes"] > 0


def unused_somewhere(rank, world):
    wrapped = FastDDP(
        nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)]), wire=hierarchical("bf16")
    )
    wrapped.module.forward = lambda x: wrapped.module[0](x) if rank else wrapped.module[1](x)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 40)).sum().backward()
    counts = wrapped._engine.core.used_counts()
    return counts, [bool(p.grad.any()) for p in wrapped.module.parameters()]


def test_used_flags_are_exact():
    for counts, found in run_ranks(on_nodes, 4, unused_somewhere):
        assert counts == [3, 3, 1, 1]
        assert found == [True] * 4


def grid_of(rank, columns):
    """Process groups of a grid whose nodes are every other rank, unlike torchrun's."""
    nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    crosses = [dist.new_group(c) for c in columns]
    mine = next(c for c, group in zip(columns, crosses, strict=True) if rank in c)
    return nodes[rank % 2], crosses[columns.index(mine)]


def with_groups(rank, world, columns):
    node, cross = grid_of(rank, columns)
    policy = Wire("int8", form="hierarchical", node_group=node, cross_group=cross)
    return errors_of_steps(rank, world, policy)


def test_groups_that_are_given():
    for errors, _ in run_ranks(with_groups, 4, [[0, 1], [2, 3]]):
        assert TOLERANCE["int8"] / 100 < max(errors) < TOLERANCE["int8"]


def refused(rank, world, local, make):
    if local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local[rank] if isinstance(local, list) else local
    else:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    try:
        FastDDP(model(), wire=make(rank))
    except (ValueError, RankMismatchError) as error:
        return f"{error} {error.__cause__ or ''}"
    return ""


def found(rank):
    return hierarchical("int8")


def crossed(rank):
    node, cross = grid_of(rank, [[0, 3], [1, 2]])
    return Wire("int8", form="hierarchical", node_group=node, cross_group=cross)


def lone(rank):
    node, _ = grid_of(rank, [[0, 1], [2, 3]])
    return Wire("int8", form="hierarchical", node_group=node, cross_group=node)


def one_of_two(rank):
    return Wire("int8", form="hierarchical", node_group=dist.group.WORLD)


REFUSED = {
    "unequal nodes": (3, "2", found, "nodes of 2, 1; choose another number of ranks"),
    "no node known": (2, None, found, "LOCAL_WORLD_SIZE, or pass node_group and cross_group"),
    "nodes that differ": (4, ["2", "2", "4", "4"], found, "rank 2 differs from rank 0"),
    "rows and columns that do not cross": (4, "2", lone, "rows and columns of a grid"),
    "one group of two": (2, "2", one_of_two, "pass both"),
}


@pytest.mark.slow(but=("one group of two",))
@pytest.mark.parametrize("label", REFUSED)
def test_ranks_that_make_no_grid_are_refused_on_every_rank(label):
    world, local, make, text = REFUSED[label]
    for error in run_ranks(refused, world, local, make):
        assert text in error


def test_a_cross_group_of_other_places():
    """Ranks 0 and 3 meet: the first of one node and the second of another."""
    for error in run_ranks(refused, 4, "2", crossed):
        assert "same rank in their node_group" in error


def test_a_single_node_sends_nothing_coded():
    for stats, _, chunks in run_ranks(on_nodes, 2, one_node):
        assert stats["between_nodes_bytes"] == 0
        assert chunks == 0


def one_node(rank, world):
    wrapped = FastDDP(model(), wire=hierarchical("int8"))
    wrapped(inputs(0, rank)).square().mean().backward()
    wanted = true_average(0, world)
    assert torch.allclose(flat_grads(wrapped).double(), wanted, rtol=1e-4, atol=1e-7)
    coded = [bucket for bucket in wrapped._engine.plan.buckets if bucket.coded]
    return wrapped.sync_stats(), wanted.numel(), len(coded)
