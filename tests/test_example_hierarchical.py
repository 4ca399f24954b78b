"""examples/hierarchical.py: the same sum as a flat all-reduce, with fewer bytes between nodes."""

import pytest
import torch

from examples import hierarchical
from examples.common.ranks import Group
from examples.hierarchical import Cluster
from fastsync.testing import RankError, run_ranks
from tests.scripts import run_module

EPSILON = torch.finfo(torch.float32).eps
NUMEL = 12_000  # divides by every number of ranks below


def compared(rank, world, node_size):
    return hierarchical.compare(Group(rank, world, torch.device("cpu")), node_size, NUMEL)


@pytest.mark.parametrize("world, node_size", [(4, 2), (6, 2), (4, 1), (4, 4)])
def test_sum_and_bytes_between_nodes(world, node_size):
    nodes = world // node_size
    for found in run_ranks(compared, world, node_size):
        assert found.error <= (world - 1) * EPSILON
        assert found.hierarchical == found.hierarchical_formula
        assert found.flat == (found.flat_formula if nodes > 1 else 0)
        if 1 < nodes < world:
            assert found.hierarchical < found.flat


def trained(rank, world):
    group = Group(rank, world, torch.device("cpu"))
    return hierarchical.train(group, 2), hierarchical.train(group, None)


def test_as_a_hook_of_fastddp():
    results = run_ranks(trained, 4)
    for by_node, flat in results:
        assert torch.equal(by_node, results[0][0])
        assert torch.allclose(by_node, flat, rtol=1e-5, atol=1e-7)


def sums_inside_only(rank, world):
    hierarchical.ring_all_reduce = lambda tensor, ring: None
    group = Group(rank, world, torch.device("cpu"))
    by_node, flat = hierarchical.train(group, 2), hierarchical.train(group, None)
    return bool(torch.allclose(by_node, flat, rtol=1e-5, atol=1e-7))


def test_leaving_out_the_links_between_nodes_is_noticed():
    assert run_ranks(sums_inside_only, 4) == [False] * 4


def unequal_nodes(rank, world):
    Cluster.of(2)


def test_unequal_nodes_are_refused_on_every_rank():
    with pytest.raises(RankError) as raised:
        run_ranks(unequal_nodes, 3)
    assert str(raised.value).count("3 ranks do not make nodes of 2 ranks each") == 3


def test_the_command():
    output = run_module("examples.hierarchical", "--ranks", 4, "--nodes", 2, "--numel", 1000)
    rows = [line.split() for line in output.splitlines()]
    assert ["flat", "ring", "6,000", "6,000.0"] in rows
    assert ["by", "nodes", "4,000", "4,000.0"] in rows
    assert "equal up to the order of sums" in output


def test_the_command_names_what_does_not_fit():
    arguments = ("--ranks", 2, "--nodes", 3)
    output = run_module("examples.hierarchical", *arguments, code=2)
    assert output.strip() == "error: 2 ranks do not make 3 nodes of equal size"
