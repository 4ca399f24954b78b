"""FastDDP against torch's DDP on two ranks: the same bits after ten steps, in every wire format.

    python .ci/smoke.py [--cuda-build] [--prebuilt]

Small enough to run under sanitizers and in every supported torch. Uses the installed fastsync where
there is one, else the checkout's. Exits with 1 where weights differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
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
from bench.launch import Group, launch
from fastsync import _ext

STEPS = 10
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        wire: a key of WIRES.
        ours: further arguments of FastDDP.
        theirs: further arguments of DDP.
        unused: some parameters take part on one rank only, others on none.
        micro: backwards per step; all but the last run under no_sync().
        set_to_none: the argument of zero_grad.
    """

    name: str
    wire: str = "fp32"
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    unused: bool = False
    micro: int = 1
    set_to_none: bool = True


def cases() -> Iterator[Case]:
    for wire in WIRES:
        for views in (True, False):
            options = {"gradient_as_bucket_view": views}
            yield Case(f"wire {wire}, views {'on' if views else 'off'}", wire, options)
    yield Case("small buckets", ours={"bucket_cap_mb": 0.005})
    yield Case("zero_grad(set_to_none=False)", set_to_none=False)
    yield Case("static_graph", ours={"static_graph": True})
    for views in (True, False):
        options = {"gradient_as_bucket_view": views, "find_unused_parameters": True}
        name = f"unused parameters, views {'on' if views else 'off'}"
        yield Case(name, ours=options, theirs={"find_unused_parameters": True}, unused=True)
    for wire in WIRES:
        yield Case(f"no_sync, wire {wire}", wire, micro=3)


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
    dtype = WIRES[case.wire]
    if dtype is not None:
        model.register_comm_hook(None, wire_hook(dtype))
    return model


def train(case: Case, ours: bool, group: Group) -> list[Tensor]:
    """Weights and the last gradients (zeros where there are none) after STEPS steps."""
    model = wrap(case, ours)
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
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return [t.detach().clone() for t in (*params, *grads)]


def check_extension(args: argparse.Namespace, group: Group) -> None:
    """Fails unless the extension is the one that was asked for."""
    extension = _ext.load()
    place = Path(str(extension.__file__)).parent
    prebuilt = place == Path(fastsync.__file__).parent
    if args.prebuilt and not prebuilt:
        raise SystemExit(f"expects the prebuilt extension, but {place} was loaded")
    if args.cuda_build and torch.version.cuda is None:
        raise SystemExit(f"expects a CUDA build of torch, but this is {torch.__version__}")
    if args.cuda_build and extension.with_cuda is not True:
        raise SystemExit("expects an extension with CUDA kernels, but this one has none")
    if group.is_main:
        print(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}), extension "
            f"{'prebuilt' if prebuilt else 'built on first import'}, "
            f"{'with' if extension.with_cuda else 'without'} CUDA kernels"
        )


def run(args: argparse.Namespace, group: Group) -> int:
    check_extension(args, group)
    failures = 0
    for case in cases():
        theirs, ours = train(case, False, group), train(case, True, group)
        same = all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
        same = group.all_agree(same and all(bool(t.isfinite().all()) for t in ours))
        failures += not same
        if group.is_main:
            print(f"  {'identical' if same else 'DIFFERENT'}  {case.name}", flush=True)
    if group.is_main:
        print(f"{failures} of the cases above differ from DDP after {STEPS} steps")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuda-build", action="store_true", help="expect CUDA, in torch and here")
    parser.add_argument("--prebuilt", action="store_true", help="expect the installed extension")
    args = parser.parse_args()
    return launch(lambda group: run(args, group), ranks=2)


if __name__ == "__main__":
    raise SystemExit(main())
