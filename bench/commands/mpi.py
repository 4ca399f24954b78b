"""Step time over MPI, beside Gloo's in the same processes.

    mpirun -n 2 python -m bench mpi --json out/mpi.json

Without mpirun both are Gloo, which shows how far two equal variants are apart. `ddp` is torch's
over Gloo; `fastsync_group` sends gradients through the process group, the others of fastsync
average in memory that ranks share. A step is zero_grad, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch.distributed as dist

from bench.measure import benchmark as b
from examples.common.ranks import Group
from examples.common.rounds import measure, model_record, table
from examples.common.variants import BASELINE, FLOOR, VARIANTS, Variant, ddp, fast_ddp


def variants_over(gloo: dist.ProcessGroup) -> tuple[Variant, ...]:
    """Return variants over `gloo`, and variants over the default group."""
    options = {"gradient_as_bucket_view": True, "process_group": gloo}
    theirs = {"process_group": gloo}
    return (
        VARIANTS[FLOOR],
        Variant(BASELINE, ddp(**theirs)),
        Variant("ddp_view", ddp(**options)),
        Variant("ddp_mpi", ddp()),
        Variant("ddp_view_mpi", ddp(gradient_as_bucket_view=True)),
        Variant("fastsync", fast_ddp(**theirs)),
        Variant("fastsync_mpi", fast_ddp()),
        Variant("fastsync_group", fast_ddp(shared_memory=False, **theirs)),
        Variant("fastsync_group_mpi", fast_ddp(shared_memory=False)),
    )


@b.benchmark(
    b.models("small,transformer,wide,conv"),
    *(b.SCALE, b.ranks(least=2), b.rounds(9)),
    *(b.steps(3), b.warmup(2), b.check_steps(3), b.seconds()),
    kind="step",
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """All models."""
    variants = variants_over(dist.new_group(backend="gloo"))
    for name in args.models:
        model = b.workload(name, args)
        timings = measure(model, variants, group, b.settings_of(args))
        record = model_record(model, timings)
        yield b.Shown(
            f"{name} over {group.transport}\n{table(timings, {})}", {"models": {name: record}}
        )
