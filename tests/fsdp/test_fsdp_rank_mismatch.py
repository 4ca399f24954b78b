"""Ranks that call fully_shard() with different models or arguments: an error on each, named."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fastsync import RankMismatchError, fully_shard
from tests.fsdp.fsdp_models import mesh_of
from tests.helpers.teams import run_ranks

SIDE = 4


def layers(odd):
    """Layers of which the second is another one on a rank that is `odd`."""
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE, bias=odd != "one fewer"))


def with_another_size(odd):
    model = layers(odd)
    if odd == "size":
        model[1].weight = nn.Parameter(torch.ones(SIDE, SIDE + 1))
    if odd == "dtype":
        model[1].double()
    if odd == "frozen":
        model[1].weight.requires_grad_(False)
    return model


def shared(odd, mesh):
    model = with_another_size(odd)
    columns = lambda param: Shard(param.ndim - 1)  # noqa: E731
    options = {
        "dimension": {"shard_placement_fn": columns},
        "kept": {"reshard_after_forward": False},
    }
    for layer in model:
        fully_shard(layer, mesh=mesh, **options.get(odd, {}) if layer is model[1] else {})
    return fully_shard(model, mesh=mesh)


WHATS = {
    "one fewer": r"'(1\.)?bias' exists only",
    "size": r"'(1\.)?weight'\) has shape \(4, 5\) there but \(4, 4\)",
    "dtype": r"what travels of unit . \(\w+\) is torch.float64",
    "frozen": r"'(1\.)?weight'\) has requires_grad False there but True",
    "dimension": r"the cut of unit . \(\w+\) is '(1\.)?weight' along dimension 1 there but",
    "kept": r"reshard_after_forward of unit . \(\w+\) is False there but True",
}


def unlike(rank, world, odd, rows, how):
    model = shared(odd if rank == world - 1 else "", mesh_of(world, rows))
    with pytest.raises(RankMismatchError, match=WHATS[odd]):
        model(torch.ones(2, SIDE)) if how == "forward" else model[1].unshard()


@pytest.mark.slow(
    but=(
        "4-2-dtype-forward",
        "2-None-one fewer-forward",
        "2-None-kept-unshard",
        "2-None-frozen-unshard",
        "2-None-size-forward",
    )
)
@pytest.mark.parametrize("how", ["forward", "unshard"])
@pytest.mark.parametrize("odd", WHATS)
@pytest.mark.parametrize(("world", "rows"), [(2, None), (4, 2)])
def test_what_one_rank_has_otherwise_is_an_error_on_each(world, rows, odd, how):
    run_ranks(unlike, world, odd, rows, how)
