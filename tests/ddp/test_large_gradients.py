"""Large gradients, which are packed when they arrive instead of with their bucket."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastsync import FastDDP
from fastsync.config.arguments import grouped
from tests.helpers.teams import run_ranks

WIDTH = 512  # 1 MiB of gradient in each weight


def model(depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def inputs(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(2, WIDTH, generator=generator)


def train(wrapped, rank, set_to_none, micro_steps=1, steps=5):
    """Return the weights, and whether every gradient kept on the way kept its values."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    kept = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(micro_steps - 1):
            with wrapped.no_sync():
                wrapped(inputs(rank, 10 * step + micro)).square().mean().backward()
        wrapped(inputs(rank, step)).square().mean().backward()
        if set_to_none:
            kept += [(p.grad, p.grad.clone()) for p in wrapped.parameters()]
        optimizer.step()
    intact = all(torch.equal(grad, copy) for grad, copy in kept)
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()]), intact


def against_ddp(rank, world, options, set_to_none, micro_steps):
    ours, intact = train(FastDDP(model(), **grouped(options)), rank, set_to_none, micro_steps)
    theirs, _ = train(DistributedDataParallel(model()), rank, set_to_none, micro_steps)
    return torch.equal(ours, theirs), intact


@pytest.mark.slow(but=("1-False-views",))
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"]
)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_same_bits_as_ddp(options, set_to_none, micro_steps):
    found = run_ranks(against_ddp, 2, options, set_to_none, micro_steps)
    assert found == [(True, True)] * 2


def narrow(rank, world):
    """Gradients on a narrow wire, against their exact average."""
    wrapped = FastDDP(model(), wire="bf16")
    reference = model()
    for step in range(3):
        wrapped.zero_grad()
        wrapped(inputs(rank, step)).square().mean().backward()
    parts = []
    for other in range(world):
        reference.zero_grad()
        reference(inputs(other, 2)).square().mean().backward()
        parts.append([p.grad.double() for p in reference.parameters()])
    columns = [torch.stack(column) for column in zip(*parts, strict=True)]
    # Half a unit in the last of 8 bits for each rank's share, and for their sum.
    bounds = [2**-8 * 1.01 * (c.abs().mean(0) + c.mean(0).abs()) + 1e-12 for c in columns]
    return all(
        bool(((p.grad.double() - column.mean(0)).abs() <= bound).all())
        for p, column, bound in zip(wrapped.parameters(), columns, bounds, strict=True)
    )


def test_a_narrow_wire():
    assert all(run_ranks(narrow, 2))


class Twice(nn.Module):
    """One large layer that runs in two inner backwards of a step, in front of another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, inner=False):
        call = (lambda y: checkpoint(self.shared, y, use_reentrant=True)) if inner else self.shared
        return self.last(call(call(x)))


def repeated_from_the_start(rank, world):
    ours, theirs = FastDDP(Twice(), static_graph=True), Twice()
    for step in range(3):
        ours.zero_grad()
        ours(inputs(rank, step).requires_grad_(), inner=True).square().mean().backward()
    means = []
    for other in range(world):
        theirs.zero_grad()
        theirs(inputs(other, 2).requires_grad_()).square().mean().backward()
        means.append([p.grad.clone() / world for p in theirs.parameters()])
    expected = [sum(column) for column in zip(*means, strict=True)]
    return all(
        torch.allclose(p.grad, e, atol=1e-7)
        for p, e in zip(ours.parameters(), expected, strict=True)
    )


def test_a_gradient_that_arrives_twice_is_waited_for():
    assert all(run_ranks(repeated_from_the_start, 2))


def repeated_suddenly(rank, world):
    wrapped = FastDDP(Twice())
    for step in range(2):
        wrapped.zero_grad()
        wrapped(inputs(rank, step)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"ready only once: parameter 'shared\.(weight|bias)'"):
        wrapped(inputs(rank, 2).requires_grad_(), inner=True).square().mean().backward()


def test_a_gradient_that_suddenly_arrives_twice_is_an_error():
    run_ranks(repeated_suddenly, 2)
