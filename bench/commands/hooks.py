"""What communication hooks cost: FastDDP's step over that of torch's DDP with the same hook.

    python -m bench hooks --rounds 60 --json out/hooks.json

The hooks are torch's own, the models stacks of small layers. Both wrappers first train the same
weights with every hook. A step is zero_grad, forward and backward. All gradients travel in one
bucket: with several, PowerSGD's hook issues collectives on the CPU in an order of chance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from bench.measure import benchmark as b
from bench.models.classic import small
from examples.common.check import judge, train
from examples.common.ranks import Group
from examples.common.rounds import over, time_lanes
from examples.common.text import Spread
from examples.common.training import make_lanes
from examples.common.variants import BASELINE, OURS, Variant, ddp, fast_ddp, hooked

MODELS = {"100 x Linear(32, 32)": (0.25, 32), "400 x Linear(64, 64)": (1.0, 64)}  # scale and width
WRAPPERS = {BASELINE: ddp(bucket_cap_mb=25), OURS: fast_ddp(bucket_cap_mb=25)}
# A hook, and what makes its state.
HOOKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "allreduce_hook": (default_hooks.allreduce_hook, lambda: None),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, lambda: None),
    "powerSGD_hook": (
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
    ),
}


def variant(wrapper: str, name: str) -> Variant:
    """torch's DDP or FastDDP with a hook; both must train the same bits with it."""
    return Variant(f"{wrapper}, {name}", hooked(WRAPPERS[wrapper], *HOOKS[name]))


@b.benchmark(b.SCALE, b.RANKS, b.rounds(60), b.steps(4), b.warmup(4), b.check_steps(6))
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    rows = [[f"`{name}`"] for name in HOOKS]
    for scale, width in MODELS.values():
        workload = small(scale * (args.scale or 1.0), width)
        pairs = [(variant(BASELINE, name), variant(OURS, name)) for name in HOOKS]
        for pair in pairs if args.check_steps else ():
            wanted, found = (train(workload, v, group, "sgd", args.check_steps) for v in pair)
            judge(pair[1], found, wanted, group)
        lanes = make_lanes(workload, [each for pair in pairs for each in pair], group)
        measured = time_lanes(lanes, group, b.settings_of(args))
        for row, pair in zip(rows, pairs, strict=True):
            theirs, ours = (measured[each.name].seconds for each in pair)
            row += [f"{1e3 * Spread.of(theirs).median:.2f} ms", b.with_margin(over(ours, theirs))]
    headers = ["hook", *(head for model in MODELS for head in (f"{model}: DDP", "FastDDP / DDP"))]
    title = f"step of DDP, and FastDDP's over it in the same round; {b.MARGIN}"
    yield b.table(title, headers, rows)
