"""Random models, options and training loops against a rule that fits in one line.

After a synchronised backward, every gradient is the sum over ranks of (what this rank had + what it
computed) / world size, and stays untouched where no rank used the parameter. Each rank trains an
unwrapped copy beside the wrapped model; the copies' gradients, exchanged as Python objects, follow
the rule.

One case again: python -m tests.test_random --case N
"""

import argparse
import copy
import random
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, Wire
from fastsync.testing import RankError, run_ranks

CASES = 240
CASES_PER_RUN = 30
WIDTH = 5
REAL = (torch.float32, torch.float64, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
# Coded, but without loss: the rule holds bit for bit.
EXACT_WIRES = (
    Wire("fp32", form="two_shot"),
    Wire("fp32", form="two_shot", piece_bytes=100),
    Wire("fp32", form="gather", piece_bytes=400),
)
KINDS = ("linear", "transposed", "expanded", "vector", "scalar", "empty", "conv", "complex", "conj")


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
    }[kind]
    value = torch.randn(sizes, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    value = value.to(dtype)
    if kind == "conv" and rng.random() < 0.5:
        value = value.to(memory_format=torch.channels_last)
    return nn.Parameter(value)


def use(kind, weight, x):
    """A number that depends on `weight` and `x`, by a path that gives an awkward gradient."""
    wide = x.to(weight.dtype)
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
    return (weight * wide.mean()).sum()


class Output:
    """Something that no search for tensors looks into."""

    def __init__(self, loss):
        self.loss = loss


class Tree(nn.Module):
    """A bag of parameters of all kinds, nested, some of them under several names."""

    def __init__(self, rng, shape):
        super().__init__()
        self.shape = shape
        self.kinds = [rng.choice(KINDS) for _ in range(rng.randint(1, 14))]
        self.branches = nn.ModuleList(nn.Module() for _ in range(3))
        self.weights = []
        for index, kind in enumerate(self.kinds):
            dtype = rng.choice(COMPLEX if kind in ("complex", "conj") else REAL)
            weight = make_parameter(kind, dtype, rng)
            shared = [w for k, w in zip(self.kinds, self.weights, strict=False) if k == kind]
            if shared and rng.random() < 0.2:
                weight = rng.choice(shared)
            self.weights.append(weight)
            self.branches[rng.randrange(3)].register_parameter(f"w{index}", weight)

    def __deepcopy__(self, memo):
        twin = copy.copy(self)
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)  # parameters and list share one memo
        return twin

    def forward(self, x, used):
        loss = x.sum()
        for index in used:
            loss = loss + use(self.kinds[index], self.weights[index], x).double()
        return {"tensor": loss, "nested": ([loss],), "opaque": Output(loss)}[self.shape]


def loss_of(output):
    while not isinstance(output, torch.Tensor):
        output = output.loss if isinstance(output, Output) else output[0]
    return output


@dataclass
class Case:
    """One model, its wrapper, its copy, and what has been seen of them."""

    seed: int
    rank: int
    world: int
    rng: random.Random = field(init=False)  # the same on every rank
    mine: random.Random = field(init=False)  # this rank's own
    saved: list = field(default_factory=list)
    log: list = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.mine = random.Random(1000 * self.seed + self.rank + 1)
        torch.manual_seed(self.seed)
        tree = Tree(self.rng, self.rng.choice(("tensor", "tensor", "nested", "opaque")))
        self.options = {
            "bucket_cap_mb": self.rng.choice((1e-6, 1e-4, 1e-3, None)),
            "gradient_as_bucket_view": self.rng.random() < 0.7,
            "find_unused_parameters": self.rng.choice((None, True)),
            "wire": self.rng.choice((Wire(), Wire(), *EXACT_WIRES)),
        }
        self.zeroing = self.rng.choice(("none", "none", "zero", "nothing", "some"))
        self.twin = copy.deepcopy(tree)
        self.model = FastDDP(tree, **self.options)
        self.tree = tree
        self.used = set()

    def pairs(self):
        return list(zip(self.tree.parameters(), self.twin.parameters(), strict=True))

    def run(self):
        for step in range(self.rng.randint(2, 7)):
            self.freeze(step)
            self.zero()
            for _ in range(self.mine.choice((0, 0, 0, 1, 2))):
                with self.model.no_sync():
                    self.backward(self.forward())
            self.synchronise()
            self.keep()
        self.check_saved()
        self.check_plan()

    def freeze(self, step):
        """Half of the parameters on all ranks before the same forward, the others on one rank.

        What one rank has frozen alone stays in the plan, so that this rank may thaw it alone.
        """
        for index, (ours, theirs) in enumerate(self.pairs()):
            alone = index % 2 == 1
            if self.rng.random() > 0.1 or step == 0:
                continue
            if alone and (self.tree.shape == "opaque" or self.rank != self.seed % self.world):
                continue
            ours.requires_grad_(not ours.requires_grad)
            theirs.requires_grad_(ours.requires_grad)

    def zero(self):
        """In the way of this case; what the user saved must not notice."""
        for ours, theirs in self.pairs():
            way = self.zeroing
            if way == "some":
                way = self.mine.choice(("none", "zero", "nothing"))
            if way == "none":
                ours.grad = theirs.grad = None
            elif way == "zero" and ours.grad is not None:
                ours.grad.detach_().zero_()
                theirs.grad.zero_()
            if way != "none":  # autograd itself writes into the same memory
                self.saved = [entry for entry in self.saved if entry[0] is not ours]

    def forward(self):
        used = [i for i in range(len(self.tree.kinds)) if self.mine.random() < 0.6]
        trained = [i for i in used if self.tree.weights[i].requires_grad]
        x = torch.randn(WIDTH, dtype=torch.float64)
        needs = self.tree.shape != "opaque" or bool(trained)
        if not needs:  # nobody can see such a backward; use whatever can be trained
            everything = range(len(self.tree.kinds))
            used = trained = [i for i in everything if self.tree.weights[i].requires_grad]
        x.requires_grad_()
        output = self.model(x, used)
        twin_output = self.twin(x.detach().clone().requires_grad_(), used)
        return output, twin_output, [id(self.tree.weights[i]) for i in trained]

    def backward(self, forward, retain=False):
        output, twin_output, trained = forward
        loss_of(output).backward(retain_graph=retain)
        loss_of(twin_output).backward(retain_graph=retain)
        self.used.update(trained)

    def synchronise(self):
        trainable = any(p.requires_grad for p in self.tree.parameters())
        if self.tree.shape == "opaque" and not trainable:
            return
        way = self.rng.choice(("one", "one", "one", "two forwards", "one graph twice"))
        forwards = [self.forward() for _ in range(2 if way == "two forwards" else 1)]
        if way == "one graph twice":
            self.backward(forwards[0], retain=True)
            self.check()
        for forward in forwards:
            self.backward(forward)
            self.check()

    def check(self):
        """Compares with the rule, then continues from what the engine computed."""
        mine = [
            (id(ours) in self.used, _copy(ours.grad), _copy(theirs.grad))
            for ours, theirs in self.pairs()
        ]
        everyone = [None] * self.world
        dist.all_gather_object(everyone, mine)
        for index, (ours, theirs) in enumerate(self.pairs()):
            rows = [rows[index] for rows in everyone]
            where = f"parameter {index} ({ours.dtype}, {tuple(ours.shape)})"
            if not any(used for used, _, _ in rows):
                assert _same(ours.grad, theirs.grad), f"{where} was used by no rank, yet changed"
                continue
            assert all(_same(got, rows[0][1]) for _, got, _ in rows), f"{where}: ranks differ"
            check_average(ours.grad, [grad for _, _, grad in rows], where)
            assert ours.grad.shape == ours.shape
            assert not ours.grad.requires_grad
            theirs.grad = ours.grad.detach().clone()
        self.used.clear()

    def keep(self):
        """Saves gradients as users do, each with a copy of its values."""
        for ours, _ in self.pairs():
            if ours.grad is None or self.mine.random() < 0.5:
                continue
            way = self.mine.choice(("itself", "slice", "detached", "storage"))
            grad = ours.grad
            held = {"slice": grad[:1] if grad.dim() else grad, "detached": grad.detach()}.get(way)
            if way == "storage":
                held = torch.empty(0, dtype=grad.dtype).set_(
                    grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()
                )
            held = grad if held is None else held
            self.saved.append((ours, held, held.detach().clone(), way))

    def check_saved(self):
        for _, held, values, way in self.saved:
            assert _same(held, values), f"a saved gradient ({way}) was overwritten"

    def check_plan(self):
        plans = [None] * self.world
        dist.all_gather_object(plans, self.model._engine.plan)
        assert plans == [plans[0]] * self.world, "the ranks hold different plans"


def _copy(grad):
    return None if grad is None else grad.detach().clone()


def _same(one, other):
    return one is other if one is None or other is None else torch.equal(one, other)


def check_average(got, grads, where):
    """Exact for two ranks; the order of a longer sum is the backend's business."""
    assert got is not None, f"{where} has no gradient"
    parts = [torch.zeros_like(got) if grad is None else grad for grad in grads]
    real = got.dtype.to_real() if got.is_complex() else got.dtype
    scale = torch.tensor(1 / len(parts), dtype=torch.float32 if real != torch.float64 else real)
    scaled = [_times(part, scale) for part in parts]
    if len(parts) == 2:
        assert torch.equal(got, scaled[0] + scaled[1]), f"{where}: wrong average"
        return
    size = sum(part.abs() for part in scaled)
    error = (got - sum(scaled)).abs()
    assert bool((error <= 4 * torch.finfo(real).eps * size + 1e-37).all()), f"{where}: far off"


def _times(part, scale):
    """Arithmetic in fp32 for bf16, as in the kernels."""
    wide = part.to(torch.float32) if part.dtype is torch.bfloat16 else part
    return (wide * scale).to(part.dtype)


def world_of(seed):
    return 3 if seed % 4 == 3 else 2


def run_cases(rank, world, seeds, progress):
    """Runs cases one after the other and leaves the number of the current one in `progress`."""
    warnings.simplefilter("ignore")
    for seed in seeds:
        progress.write_text(str(seed)) if rank == 0 else None
        torch.manual_seed(seed)
        Case(seed, rank, world).run()


def check_cases(world, seeds):
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "case"
        try:
            run_ranks(run_cases, world, seeds, progress, timeout=60)
        except RankError as error:
            command = f"python -m tests.test_random --case {progress.read_text()}"
            raise AssertionError(f"again with: {command}\n{error}") from None


def batches():
    for world in (2, 3):
        seeds = [seed for seed in range(CASES) if world_of(seed) == world]
        for start in range(0, len(seeds), CASES_PER_RUN):
            yield world, seeds[start : start + CASES_PER_RUN]


@pytest.mark.parametrize(
    ("world", "seeds"),
    list(batches()),
    ids=lambda value: f"{value}" if isinstance(value, int) else "",
)
def test_random_cases(world, seeds):
    check_cases(world, seeds)


def main():
    parser = argparse.ArgumentParser(description="runs random cases, by number or until one fails")
    parser.add_argument("--case", type=int, help="run this one only")
    parser.add_argument("--start", type=int, default=CASES)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    if args.case is not None:
        check_cases(world_of(args.case), [args.case])
        return print(f"case {args.case} passed")
    seed, end = args.start, time.monotonic() + args.seconds
    while time.monotonic() < end:
        for world in (2, 3):
            seeds = [s for s in range(seed, seed + 40) if world_of(s) == world]
            check_cases(world, seeds)
        seed += 40
    print(f"cases {args.start} to {seed - 1} passed")


if __name__ == "__main__":
    from tests import test_random  # ranks cannot import what is called __main__

    try:
        test_random.main()
    except AssertionError as error:
        raise SystemExit(str(error)) from None
