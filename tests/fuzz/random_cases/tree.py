"""A bag of parameters of all kinds, which a forward uses in any selection and order."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

__all__ = ["KINDS", "REAL", "WIDTH", "Fault", "Output", "Raise", "Tree", "local", "loss_of"]

WIDTH = 5
REAL = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
REAL_KINDS = ("linear", "transposed", "expanded", "vector", "scalar", "empty", "conv")
KINDS = (*REAL_KINDS, "complex", "conj", "sparse")
CUT_KINDS = ("linear", "transposed", "expanded", "vector", "scalar", "empty")  # as DTensors
ROWS = 9


class Fault(Exception):
    """Error that a case raises inside a forward or a backward."""


class Raise(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Fault


class Output:
    """Something that no search for tensors looks into."""

    def __init__(self, loss):
        self.loss = loss


def loss_of(output):
    while not isinstance(output, torch.Tensor):
        output = output.loss if isinstance(output, Output) else output[0]
    return output


def local(tensor):
    """Return what this rank has of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_parameter(kind, dtype, rng):
    sizes = {
        "linear": (WIDTH, WIDTH),
        "transposed": (rng.choice((1, 3, 17)), WIDTH),
        "expanded": (rng.choice((1, 40, 300)),),
        "vector": (rng.choice((1, 2, 15, 16, 33)),),
        "scalar": (),
        "empty": rng.choice(((0,), (0, 3))),
        "conv": (2, 3, 3, 3),
        "complex": (rng.choice((1, 7)),),
        "conj": (rng.choice((1, 7)),),
        "sparse": (ROWS, 3),
    }[kind]
    value = torch.randn(sizes, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    value = value.to(dtype)
    if kind == "conv" and rng.random() < 0.5:
        value = value.to(memory_format=torch.channels_last)
    return nn.Parameter(value)


def use(kind, weight, x):
    """A number that depends on `weight` and `x`, by a path that gives an awkward gradient."""
    wide = x.to(weight.dtype)
    if isinstance(weight, DTensor):
        return use_parts(kind, weight, wide).full_tensor()
    if kind == "linear":
        return (wide @ weight).tanh().sum()
    if kind == "transposed":
        return (wide @ weight.t()).square().sum()
    if kind == "conv":
        image = wide.mean() * torch.ones(1, 3, 4, 4, dtype=weight.dtype)
        return nn.functional.conv2d(image, weight).square().sum()
    if kind == "complex":
        return (weight * wide.sum()).abs().sum()
    if kind == "conj":
        return (weight.conj() * wide.sum()).real.sum() + (weight.conj() * 2j).imag.sum()
    if kind == "expanded":
        return weight.sum() * wide.mean()
    if kind == "sparse":
        rows = (x.detach().abs() * 1000).long() % ROWS
        return nn.functional.embedding(rows, weight, sparse=True).sum() * wide.mean()
    return (weight * wide.mean()).sum()


def use_parts(kind, weight, wide):
    """The same of a DTensor. A whole one meets rows of each rank: its gradients are to be added."""
    mesh, whole = weight.device_mesh, weight.placements == (Replicate(),)
    mine = wide[None] * (1 + mesh.get_local_rank()) if whole else wide
    wide = DTensor.from_local(mine, mesh, [Shard(0) if whole else Replicate()])
    if kind == "linear":
        return (wide @ weight).tanh().sum()
    if kind == "transposed":
        return (wide @ weight.t()).square().sum()
    # By a product, since torch adds no gradient that all ranks have to one that they have parts of.
    return (weight * weight.detach()).sum() * wide.sum()


class Tree(nn.Module):
    """Parameters of all kinds, nested, some of them under several names.

    Attributes:
        kinds, weights: of what a forward may use, by position.
        low: the dtype that a copy of a model in mixed precision computes in; None: the stored one.
    """

    def __init__(self, rng, drawn):
        super().__init__()
        self.shape, self.zero = drawn.shape, drawn.zero
        self.low = None
        self.kinds = [rng.choice(drawn.kinds) for _ in range(rng.randint(1, 14))]
        self.branches = nn.ModuleList(nn.Module() for _ in range(3))
        self.weights = []
        for index, kind in enumerate(self.kinds):
            self.weights.append(self._add(rng, index, kind, drawn.reals))

    def _add(self, rng, index, kind, reals):
        dtype = rng.choice(COMPLEX if kind in ("complex", "conj") else reals)
        if kind == "sparse":
            dtype = torch.float32
        weight = make_parameter(kind, dtype, rng)
        alike = [w for k, w in zip(self.kinds, self.weights, strict=False) if k == kind]
        if alike and rng.random() < 0.2:
            weight = rng.choice(alike)
        branch = self.branches[rng.randrange(3)]
        if kind == "sparse":
            table = nn.Embedding(*weight.shape, sparse=True)
            table.weight = weight
            branch.add_module(f"w{index}", table)
        else:
            branch.register_parameter(f"w{index}", weight)
        return weight

    def cut(self, mesh, rng):
        """Make DTensors of some weights, of which the ranks of a mesh have parts."""
        kinds = {id(weight): kind for kind, weight in zip(self.kinds, self.weights, strict=True)}
        for old in list(self.parameters()):
            if kinds[id(old)] not in CUT_KINDS or rng.random() < 0.3:
                continue
            sizes = enumerate(old.shape if old.numel() else ())
            places = [Replicate(), *(Shard(dim) for dim, size in sizes if size >= mesh.size())]
            cut = distribute_tensor(old.detach(), mesh, [rng.choice(places)], src_data_rank=None)
            self.replace(old, nn.Parameter(cut))

    def grow(self):
        """Register one more parameter, and return it."""
        self.kinds.append("vector")
        self.weights.append(nn.Parameter(torch.ones(3)))
        self.branches[0].register_parameter(f"w{len(self.kinds)}", self.weights[-1])
        return self.weights[-1]

    def replace(self, old, new=None):
        """Register another parameter, of the same values, in each place of `old`; return it."""
        new = nn.Parameter(old.detach().clone()) if new is None else new
        self.weights = [new if weight is old else weight for weight in self.weights]
        for module in self.modules():
            for name, param in list(module.named_parameters("", False, remove_duplicate=False)):
                if param is old:
                    setattr(module, name, new)
        return new

    def __deepcopy__(self, memo):
        twin = copy.copy(self)
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)  # parameters and list share one memo
        return twin

    def forward(self, x, used, fault=None, view=False):
        """The loss.

        Args:
            used: positions of the weights, in the order of their use.
            fault: where to raise: in the "forward", or in the backward, "early", before any
                gradient, or "late", when all gradients have come.
            view: return a view of something larger.
        """
        if fault == "late":
            x = Raise.apply(x)
        x = x if self.low is None else x.to(self.low)
        weights = self._in_compute_dtype(used)
        loss = x.sum()
        for index in used:
            loss = loss + use(self.kinds[index], weights[id(self.weights[index])], x).double()
        if fault == "forward":
            raise Fault
        if fault == "early":
            loss = Raise.apply(loss)
        loss = torch.stack((loss.detach(), loss))[-1] if view else loss
        return {"tensor": loss, "nested": ([loss],), "opaque": Output(loss)}[self.shape]

    def _in_compute_dtype(self, used):
        weights = {id(self.weights[index]): self.weights[index] for index in used}
        if self.low is None:
            return weights
        return {k: w.to(self.low) if w.is_floating_point() else w for k, w in weights.items()}
