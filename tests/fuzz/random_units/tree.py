"""Nested modules with parameters of all sizes, of which each forward runs and uses some."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.random_cases.tree import WIDTH, Fault, Raise

__all__ = ["Leaf", "Node", "Uses", "build", "modules_of"]

SIZES = ((1,), (2,), (7,), (64,), (1, 3), (5, 2), (3, 4, 2), (9, 1), (0, 3), (40, 30))


class Uses:
    """Choices of one forward: which modules run, and which weights each leaf uses.

    Args:
        common: random numbers that all ranks share: units run everywhere or nowhere.
        mine: this rank's own.
        views: whether each module returns a view that is changed in place.
        fault: where to raise: "forward", "backward" or None; in the module of number `at`.
    """

    def __init__(self, common, mine, numbers, fault=None):
        self.runs = {n: common.random() < 0.85 or fault is not None for n in numbers}
        self.seed = mine.randrange(1 << 30)
        self.fault, self.at = fault, common.choice(numbers)
        often = common.choice((0.0, 0.0, 0.3))
        self.views = {n: common.random() < often for n in numbers}

    def weights(self, number, count):
        """Positions, in the order of use; the same when checkpointing runs the module again."""
        generator = torch.Generator().manual_seed(self.seed + number)
        order = torch.randperm(count, generator=generator).tolist()
        return [i for i in order if float(torch.rand((), generator=generator)) < 0.7]


class _Part(nn.Module):
    """Common base of leaves and nodes.

    Attributes:
        number: position among all modules of a tree.
        low: the dtype that a copy's inputs take where ours is a unit of mixed precision.
    """

    number = 0
    low = None

    def begin(self, x, uses):
        if uses.at == self.number and uses.fault == "forward":
            raise Fault
        x = x if self.low is None else x.to(self.low)
        return Raise.apply(x) if uses.at == self.number and uses.fault == "backward" else x

    def end(self, x, uses):
        """Return a view of something that was made here, which the caller changes in place."""
        return (x * 1.0)[...] if uses.views[self.number] else x


class Leaf(_Part):
    """Weights, each of which changes what passes through."""

    def __init__(self, weights):
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"w{index}", weight)
        self.count = len(weights)
        self.weights_low = None  # of a copy: what its unit computes in

    def forward(self, x, uses):
        x = self.begin(x, uses)
        for index in uses.weights(self.number, self.count):
            weight = getattr(self, f"w{index}")
            if self.weights_low is not None:
                weight = weight.to(self.weights_low)
            flat = weight.flatten().double()
            waves = torch.arange(1.0, 1.0 + flat.numel(), dtype=torch.float64)
            spread = (waves[:, None] * torch.arange(1.0, WIDTH + 1)).cos() / (1 + flat.numel())
            x = x.double() + torch.tanh(flat @ spread) * x.double().mean()
        return self.end(x, uses)


class Node(_Part):
    """Runs its children one after the other, some of them checkpointed."""

    def __init__(self, children, ways):
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.ways = ways

    def forward(self, x, uses):
        x = self.begin(x, uses)
        for part, way in zip(self.parts, self.ways, strict=True):
            if not uses.runs[part.number]:
                continue
            if way is None or not torch.is_grad_enabled():
                out = part(x, uses)
                if uses.views[part.number]:
                    out.mul_(0.5)
                x = x + out
            else:
                x = x + checkpoint(part, x, uses, use_reentrant=way == "reentrant")
        return self.end(x, uses)

    def all_ways(self):
        """Return the ways of this node and those below."""
        below = [part for part in modules_of(self) if isinstance(part, Node)]
        return [way for part in below for way in part.ways]


def build(rng, note, dtypes):
    """A tree with weights of these dtypes, some tied, some frozen."""
    made = []

    def leaf():
        weights = []
        for _ in range(rng.randint(1, 4)):
            if made and rng.random() < 0.1:
                note("tied")
                weights.append(rng.choice(made))
                continue
            dtype = rng.choice(dtypes)
            value = torch.randn(rng.choice(SIZES), dtype=torch.float64).to(dtype)
            made.append(nn.Parameter(value, requires_grad=rng.random() < 0.85))
            weights.append(made[-1])
        return Leaf(weights)

    def node(depth):
        children = [
            node(depth + 1) if depth < 2 and rng.random() < 0.3 else leaf()
            for _ in range(rng.randint(1, 4))
        ]
        ways = [rng.choice((None, None, None, "reentrant", "other")) for _ in children]
        for way in filter(None, ways):
            note(f"checkpoint: {way}")
        return Node(children, ways)

    root = node(0)
    for number, part in enumerate(modules_of(root)):
        part.number = number
    return root


def modules_of(root):
    """Nodes and leaves; a module comes before those below."""
    return [part for part in root.modules() if isinstance(part, _Part)]
