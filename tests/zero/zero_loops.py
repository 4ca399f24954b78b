"""A model of every kind of parameter, and loops that any script might hold, for tests of `zero`."""

import torch
from torch import nn, optim

from fastsync import FastDDP

STEPS = 6


class Net(nn.Module):
    """Sizes that no number of ranks divides, a scalar, an empty one, channels-last, a tied one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.line = nn.Linear(20, 7)
        self.again = nn.Linear(20, 7, bias=False)
        self.again.weight = self.line.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.conv(x).flatten(1)
        return (self.line(x) + self.again(x.tanh())).square() * self.scale + self.empty.sum()


def net():
    torch.manual_seed(3)
    return Net()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 4, 4, generator=generator)


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "adamw plain": lambda p: optim.AdamW(p, 0.01, foreach=False),
    "adamw fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.05),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: optim.Adafactor([q for q in p if q.numel()], 0.01),
    "nadam": lambda p: optim.NAdam(p, 0.01),
    "rprop": lambda p: optim.Rprop(p, 0.01),
}


def trained(rank, zero, make, between=None, early=True):
    """Weights, and elements of state here; the optimizer is made before wrapping or after."""
    module = net()
    optimizer = OPTIMIZERS[make](module.parameters()) if early else None
    model = FastDDP(module, zero=zero, find_unused_parameters=True)
    optimizer = optimizer or OPTIMIZERS[make](model.parameters())
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(batch(rank, step)).mean().backward()
        if between is not None:
            between(model, optimizer)
        optimizer.step()
        schedule.step()
    own = sum(local(v) for s in optimizer.state.values() for v in s.values() if v.dim())
    return [p.detach().clone() for p in module.parameters()], own


def local(value):
    """Elements that this rank has of a value of a state."""
    return (value.to_local() if hasattr(value, "to_local") else value).numel()


def close(found, wanted):
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, wanted, strict=True)
    )


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).mean().backward()
        optimizer.step()
