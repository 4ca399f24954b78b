"""FastDDP against torch's DDP on two ranks, ten steps: the same bits from wires that a backend can
sum, weights as close as its codes are fine from the others.

    python .ci/smoke.py [--cuda-build] [--prebuilt]

Small enough to run under sanitizers and in every supported torch. Uses the installed fastsync where
there is one, else the checkout's. Exits with 1 where weights differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))

import fastsync
from examples.common.ranks import Group, launch
from fastsync._build import extension

STEPS = 10
# Wires that a backend sums, with DDP's way to the same bits.
NATIVE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Coded wires, with how far from fp32's weights they may end, as a part of the way from the start.
CODED: dict[str | fastsync.TopK, float] = {
    "bf16": 0.005,
    "fp16": 0.001,
    "fp8_e4m3": 0.06,
    "fp8_e5m2": 0.15,
    "int8": 0.02,
    "int4": 0.05,
    fastsync.TopK(0.5): 0.05,
}


class Net(nn.Module):
    """Layers of odd sizes; `extra` takes part on one rank only, `never` on none."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((13, 37), (37, 64), (64, 5)))
        self.norm = nn.LayerNorm(37)
        self.extra = nn.Linear(13, 5) if unused else None
        self.never = nn.Linear(3, 3) if unused else None

    def forward(self, batch: Tensor, with_extra: bool) -> Tensor:
        hidden = torch.relu(self.norm(self.layers[0](batch)))
        output: Tensor = self.layers[2](torch.relu(self.layers[1](hidden)))
        return output + self.extra(batch) if self.extra is not None and with_extra else output


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: what it is about.
        wire: FastDDP's.
        twin: the dtype of DDP's communication hook, where it has one.
        within: how far apart weights may end, as a part of the way from the start; 0: the same
            bits.
        ours: further arguments of FastDDP.
        theirs: further arguments of DDP.
        unused: some parameters take part on one rank only, others on none.
        micro: backwards per step; all but the last run under no_sync().
        set_to_none: the argument of zero_grad.
    """

    name: str
    wire: fastsync.Wire = field(default_factory=fastsync.Wire)
    twin: torch.dtype | None = None
    within: float = 0.0
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    unused: bool = False
    micro: int = 1
    set_to_none: bool = True


def native_cases() -> Iterator[Case]:
    for name, twin in NATIVE.items():
        wire = fastsync.Wire(name, form="native")
        for views in (True, False):
            options = {"gradient_as_bucket_view": views}
            yield Case(f"{name}, views {'on' if views else 'off'}", wire, twin, ours=options)
        yield Case(f"{name}, no_sync", wire, twin, micro=3)


def coded_cases() -> Iterator[Case]:
    for codec, within in CODED.items():
        own_form = not isinstance(codec, str)
        for form in ("auto",) if own_form else ("two_shot", "gather"):
            wire = fastsync.Wire(codec, form=form, piece_bytes=4096)
            yield Case(wire.describe(), wire, within=within)
    yield Case("int8, no_sync", fastsync.Wire("int8"), within=CODED["int8"], micro=3)


def cases() -> Iterator[Case]:
    yield from native_cases()
    yield from coded_cases()
    yield Case("small buckets", ours={"bucket_cap_mb": 0.005})
    yield Case("zero_grad(set_to_none=False)", set_to_none=False)
    yield Case("static_graph", ours={"static_graph": True})
    for views in (True, False):
        options = {"gradient_as_bucket_view": views, "find_unused_parameters": True}
        name = f"unused parameters, views {'on' if views else 'off'}"
        yield Case(name, ours=options, theirs={"find_unused_parameters": True}, unused=True)


def wire_hook(dtype: torch.dtype) -> Callable[[Any, Any], Any]:
    """A DDP communication hook with FastDDP's rule: divide, round to `dtype`, sum."""

    def hook(state, bucket):  # DDP refuses annotations that are text
        gradients = bucket.buffer()
        flat = gradients.div(dist.get_world_size()).to(dtype)
        work = dist.all_reduce(flat, async_op=True)
        return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))

    return hook


def wrap(case: Case, ours: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    module = Net(case.unused)
    if ours:
        return fastsync.FastDDP(module, wire=case.wire, **case.ours)
    model = DistributedDataParallel(module, **case.theirs)
    if case.twin is not None:
        model.register_comm_hook(None, wire_hook(case.twin))
    return model


@dataclass(frozen=True)
class Run:
    """What ten steps made of the weights, [elements], and of the last gradients."""

    start: Tensor
    weights: Tensor
    gradients: Tensor


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def train(case: Case, ours: bool, group: Group) -> Run:
    model = wrap(case, ours)
    start = flat(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(1 + group.rank)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for part in range(case.micro):
            last = part == case.micro - 1
            with nullcontext() if last else model.no_sync():
                batch = torch.randn(7, 13, generator=data)
                model(batch, group.rank == step % 2).pow(2).mean().backward()
        optimizer.step()
    params = list(model.parameters())
    grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in params)
    return Run(start, flat(params), flat(grads))


def same_on_all_ranks(weights: Tensor) -> bool:
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    return all(torch.equal(weights, other) for other in others)


def judge(case: Case, group: Group) -> tuple[bool, str]:
    """Whether FastDDP did what `case` expects, and what it did."""
    theirs, ours = train(case, False, group), train(case, True, group)
    same = torch.equal(theirs.weights, ours.weights)
    same = same and torch.equal(theirs.gradients, ours.gradients)
    way = (theirs.weights - theirs.start).norm()
    distance = float((ours.weights - theirs.weights).norm() / way)
    good = same if case.within == 0 else distance <= case.within
    good = good and same_on_all_ranks(ours.weights) and bool(ours.gradients.isfinite().all())
    return group.all_agree(good), "identical" if same else f"off by {distance:.1e}"


def check_extension(args: argparse.Namespace, group: Group) -> None:
    """Fails unless the extension is the one that was asked for."""
    loaded = extension.load()
    place = Path(str(loaded.__file__)).parent
    prebuilt = place == Path(fastsync.__file__).parent
    if args.prebuilt and not prebuilt:
        raise SystemExit(f"expects the prebuilt extension, but {place} was loaded")
    if args.cuda_build and torch.version.cuda is None:
        raise SystemExit(f"expects a CUDA build of torch, but this is {torch.__version__}")
    if args.cuda_build and loaded.with_cuda is not True:
        raise SystemExit("expects an extension with CUDA kernels, but this one has none")
    if group.is_main:
        print(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}), extension "
            f"{'prebuilt' if prebuilt else 'built on first import'}, "
            f"{'with' if loaded.with_cuda else 'without'} CUDA kernels"
        )


def run(args: argparse.Namespace, group: Group) -> int:
    check_extension(args, group)
    failures = 0
    for case in cases():
        good, found = judge(case, group)
        failures += not good
        if group.is_main:
            print(f"  {'' if good else 'FAILED: '}{found}  {case.name}", flush=True)
    if group.is_main:
        print(f"{failures} of the cases above are not as they must be after {STEPS} steps")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuda-build", action="store_true", help="expect CUDA, in torch and here")
    parser.add_argument("--prebuilt", action="store_true", help="expect the installed extension")
    args = parser.parse_args()
    return launch(lambda group: run(args, group), ranks=2)


if __name__ == "__main__":
    raise SystemExit(main())
