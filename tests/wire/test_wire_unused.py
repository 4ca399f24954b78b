"""Error feedback of parameters that are unused in some steps: a residual that no rank receives is
kept.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import Codec, FastDDP, TopK, Wire
from tests.helpers.teams import run_ranks

STEPS = 7


class Half(Codec):
    """Half of each element, in fp32: what is kept always has a code."""

    name = "half"

    def coded_bytes(self, numel):
        return 4 * numel

    def encode(self, values, wire):
        wire.view(torch.float32).copy_(values / 2)

    def decode(self, wire, values):
        values.copy_(wire.view(torch.float32))


WIRES = {
    "int4": Wire("int4", form="two_shot"),
    "int4, gathered": Wire("int4", form="gather"),
    "topk": Wire(TopK(0.6)),  # more than one layer
    "a codec": Wire(Half(), form="gather"),
}


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, use):
        return self.sometimes(self.always(x)) if use else self.always(x)


def own_gradients(module, x, use):
    """This rank's, without synchronisation, fp64; zeros where there is none."""
    plain = copy.deepcopy(module).double()
    plain.zero_grad()
    plain(x.double(), use).square().mean().backward()
    return flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in plain.parameters())


def flat(tensors):
    return torch.cat([t.double().flatten() for t in tensors])


def balance(rank, world, wire):
    """Gradients so far less averages so far, and the sum of residuals, after every step."""
    wrapped = FastDDP(Sometimes(), wire=wire, find_unused_parameters=True)
    params = list(wrapped.module.parameters())
    owed, found = 0, []
    for step in range(STEPS):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        use = step % 3 == 0 or (step % 3 == 1 and rank == 0)  # all, one, none
        wrapped.zero_grad()
        wrapped(x, use).square().mean().backward()
        average = own_gradients(wrapped.module, x, use) / world
        dist.all_reduce(average)
        arrived = flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in params)
        owed = owed + average - arrived
        mass = flat(wrapped.sync_state_dict()["residuals"].values())
        dist.all_reduce(mass)
        found.append((((mass - owed).norm() / owed.norm()).item(), owed.norm().item()))
    return found


@pytest.mark.slow(but=("int4, gathered",))
@pytest.mark.parametrize("name", WIRES)
def test_what_nobody_receives_is_kept(name):
    for steps in run_ranks(balance, 2, WIRES[name]):
        assert max(off for off, _ in steps) < 1e-4
        assert min(owed for _, owed in steps) > 0
