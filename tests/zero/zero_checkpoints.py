"""A model whose parameters end between ranks, and checkpoints of its optimizers."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim

from fastsync import FastDDP
from fastsync.config.arguments import grouped

STAGES = (0, 1, 2)
BATCH = 12  # on all ranks together


class Net(nn.Module):
    """Parameters that end between ranks: matrices, channels-last, 0-dimensional, frozen, tied."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.line = nn.Linear(24, 9)
        self.again = nn.Linear(24, 9, bias=False)
        self.again.weight = self.line.weight
        self.last = nn.Linear(9, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        x = self.conv(x).flatten(1)
        return self.last(self.line(x) + self.again(x.tanh())) * self.scale


def net():
    torch.manual_seed(3)
    return Net()


def matrices(params):
    return [p for p in params if p.dim() == 2]


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "adafactor": lambda p: optim.Adafactor(p, 0.01),
    "muon": lambda p: optim.Muon(matrices(p), 0.01),
}


def made(kind, stage, **options):
    """The model by itself and wrapped, and an optimizer with two groups where it can have them."""
    module = net()
    wrapped = (
        FastDDP(module, **grouped({"zero": stage, **options})) if stage is not None else module
    )
    params = list(module.parameters())
    if kind == "muon":
        return module, wrapped, OPTIMIZERS[kind](params)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    return module, wrapped, OPTIMIZERS[kind](groups)


def train(model, optimizer, steps, rank=0, world=1):
    """Steps on this rank's share of a batch that does not depend on the number of ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(BATCH, 3, 4, 4, generator=generator)[rank::world]
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def save(model, optimizer, path):
    dcp.save({"optimizer": model.optimizer_state_dict(optimizer)}, checkpoint_id=path)


def load(model, optimizer, path, planner=None):
    state = {"optimizer": model.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=path, planner=planner)
    model.load_optimizer_state_dict(optimizer, state["optimizer"])


def same(found, wanted):
    """Return whether two whole states hold the same settings and bits."""
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        assert found["state"][index].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(found["state"][index][name], value), (index, name)
    return True
