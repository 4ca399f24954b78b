"""Models of which ranks hold different parts: experts, tensor and context parallel layers.

Each has a twin of one process that holds all parts and sees all samples. In fp64, so that only
the order of sums differs.
"""

import torch
import torch.distributed as dist
from torch import nn

from examples.experts import Exchange

WIDTH = 6
# The ranks that hold different parts of one replica, and those that hold the same part.
REPLICAS = ((0, 1), (2, 3))
PARTS = ((0, 2), (1, 3))


def groups_of(rank):
    """Return the groups of a rank's replica and of its part. Collective of all ranks."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in (*REPLICAS, *PARTS)}
    return tuple(next(made[r] for r in kind if rank in r) for kind in (REPLICAS, PARTS))


def samples(step, rank, count=5):
    """Return a rank's inputs and targets in a step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    made = torch.randn(2, count, WIDTH, generator=draw, dtype=torch.float64)
    return made[0], made[1]


def expert(number):
    """Return expert `number`, with weights of its own."""
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def dense(seed):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).double()


def shares(step, count):
    """Return how many of a rank's samples go to expert 0; sometimes all or none of them do."""
    return (count, count, 2, 0, 0, 1, 3)[step % 7]


class Experts(nn.Module):
    """Layers around two experts. Each rank of a replica has one, and sends the other one's rows.

    Args:
        replica: the group of the two ranks; None: this process has both experts.
    """

    def __init__(self, replica=None, place=0):
        super().__init__()
        self.first, self.last = dense(1), dense(2)
        own = (0, 1) if replica is None else (place,)
        self.experts = nn.ModuleDict({"all" if replica else str(n): expert(n) for n in own})
        self.replica, self.place = replica, place

    def forward(self, x, step, rank=0):
        x = self.first(x).tanh()
        cut = shares(step + rank // 2, len(x))
        if self.replica is None:
            halves = [(x[:cut], self.experts["0"]), (x[cut:], self.experts["1"])]
            return self.last(
                torch.cat([part(rows) if len(rows) else rows for rows, part in halves])
            )
        sent = [cut, len(x) - cut]
        received = [sent[self.place]] * 2
        rows = Exchange.apply(x, received, sent, self.replica)
        if len(rows):
            rows = self.experts["all"](rows)
        return self.last(Exchange.apply(rows, sent, received, self.replica))


class _Copy(torch.autograd.Function):
    """Identity; backward sums over a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Sum over a group; backward is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TensorParallel(nn.Module):
    """Two layers of which each rank of a replica has half of the inner features."""

    def __init__(self, replica=None, place=0):
        super().__init__()
        self.first = dense(3)
        torch.manual_seed(4)
        up, down = torch.randn(2, 8, WIDTH, dtype=torch.float64)
        inner = slice(None) if replica is None else slice(4 * place, 4 * place + 4)
        self.up = nn.Parameter(up[inner].clone())
        self.down = nn.Parameter(down[inner].clone())
        self.replica = replica

    def forward(self, x, step, rank=0):
        x = self.first(x)
        if self.replica is None:
            return (x @ self.up.T).tanh() @ self.down
        inner = (_Copy.apply(x, self.replica) @ self.up.T).tanh()
        return _Sum.apply(inner @ self.down, self.replica)


class _Gather(torch.autograd.Function):
    """Rows of all ranks of a group; backward sums their gradients."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group, ctx.count = group, len(rows)
        every = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(every, rows.contiguous(), group=group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.count)[ctx.group.rank()], None


class ContextParallel(nn.Module):
    """Attention over a sequence of which each rank of a replica has half, with its positions."""

    LENGTH = 6

    def __init__(self, replica=None, place=0):
        super().__init__()
        torch.manual_seed(5)
        positions = torch.randn(self.LENGTH, WIDTH, dtype=torch.float64)
        half = self.LENGTH // 2
        self.mine = slice(None) if replica is None else slice(half * place, half * place + half)
        self.positions = nn.Parameter(positions[self.mine].clone())
        self.query, self.key, self.value = dense(6), dense(7), dense(8)
        self.replica = replica

    def forward(self, x, step, rank=0):
        x = x[self.mine] + self.positions
        every = x if self.replica is None else _Gather.apply(x, self.replica)
        weights = (self.query(x) @ self.key(every).T).softmax(dim=-1)
        return weights @ self.value(every)
