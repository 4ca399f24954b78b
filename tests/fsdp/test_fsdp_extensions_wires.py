"""Members with extensions beside coded wires: what of them travels as a code, and what does not."""

import pytest
import torch
from torch import nn

from fastsync import fully_shard
from tests.fsdp.fsdp_models import farthest, mesh_of, whole
from tests.fsdp.test_fsdp_extensions import Coded, Short, install, wrapped
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import by_shares


class Pair(nn.Module):
    """A matrix with an extension beside one without; remembers the weights it computes with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(17, 52, bias=False), nn.Linear(52, 18, bias=False)

    def forward(self, x):
        self.seen = [w.detach().clone() for w in (self.up.weight, self.down.weight)]
        return self.down(self.up(x).relu()).square().sum()


def beside_wires(rank, world, options, kind=Coded):
    """Whole weights that were computed with, gradients, and the exact ones before the step.

    Args:
        kind: of the first one; None: it gets an extension after fully_shard(), as fp16.
    """
    model = Pair() if kind is None else wrapped(Pair(), kind)
    exact = whole(Pair().parameters())
    fully_shard(model, mesh=mesh_of(world), **options)
    if kind is None:
        install(model)
    model(torch.ones(2, 17) * (rank + 1)).backward()
    kept = whole(p.data for p in model.parameters())
    return model.seen, whole(p.grad for p in model.parameters()), farthest(kept, exact)


@pytest.mark.parametrize("kind", [Coded, None])
def test_an_extension_says_what_travels_whatever_the_wires(kind):
    exact = whole(Pair().parameters())
    plain = run_ranks(beside_wires, 2, {}, kind)
    coded = run_ranks(beside_wires, 2, {"parameter_wire": "int8"}, kind)
    for (seen, _, _), (ours, _, kept) in zip(plain, coded, strict=True):
        assert torch.equal(ours[0], seen[0]), "as the extension says"
        assert not torch.equal(ours[0], exact[0])
        assert torch.equal(seen[1], exact[1])
        assert torch.equal(ours[1], by_shares(exact[1], "int8", 2))
        assert kept == 0


@pytest.mark.parametrize(("kind", "world"), [(Coded, 2), (Short, 3), (None, 2)])
def test_gradients_of_extended_members_travel_as_codes(kind, world):
    found = {}
    for wire in ("fp32", "int8"):
        found[wire] = run_ranks(beside_wires, world, {"wire": wire}, kind)
    for (_, exact, _), (_, coded, _) in zip(found["fp32"], found["int8"], strict=True):
        for ours, wanted in zip(coded, exact, strict=True):
            apart = (ours - wanted).abs().max() / wanted.abs().max()
            assert 0 < apart < 0.02


class Column(nn.Module):
    """One matrix whose gradient is this rank's input: what is sent is known."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 6, bias=False)

    def forward(self, x):
        return self.layer(x).sum()


def known_gradients(rank, world):
    model = wrapped(Column(), Short)
    fully_shard(model, mesh=mesh_of(world), wire="int8")
    model(row(rank)).backward()
    return whole(p.grad for p in model.parameters())[0]


def row(rank):
    return torch.randn(1, 40, generator=torch.Generator().manual_seed(rank))


def test_each_rank_codes_its_own_gradient_for_each_share():
    """Scaled first, then rounded block by block, and added up in the order of the ranks."""
    sent = [by_shares(row(rank).repeat(6, 1) / 2, "int8", 2) for rank in range(2)]
    for found in run_ranks(known_gradients, 2):
        assert torch.equal(found, sent[0] + sent[1])
