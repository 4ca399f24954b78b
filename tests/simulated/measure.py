"""Cost of each stage on the simulated device: memory, host waits and launches of a step.

`python -m tests.simulated.measure [--ranks 2] [--blocks 12] [--width 256] [--only zero=2]` prints a
table. Memory is the allocator's peak in steps 3 to 8, in units of the parameters' bytes; nothing
here says anything about time. `--live` lists what was allocated at the peak instead, by the lines
that asked for it.
"""

import argparse
import collections
import re

from torch import nn, optim
from torch.distributed.fsdp import fully_shard as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

import fastsync
from fastsync import FastDDP, Zero
from fastsync.config.arguments import grouped
from tests.fsdp.fsdp_models import Block, loss_of, net, words
from tests.simulated.ranks import run_simulated

DEVICE = "sim"
FIRST, LAST = 3, 8
BUCKETS = 6  # of a model, as 25 MB are of one of 150 MB


def by_block(shard):
    def wrap(model, cap):
        for block in model.blocks:
            shard(block)
        return shard(model)

    return wrap


def fast(**options):
    return lambda model, cap: FastDDP(model, bucket_cap_mb=cap, **grouped(options))


def lower(model, cap):
    return FastDDP(model.bfloat16(), bucket_cap_mb=cap, zero=Zero(2, master_weights=True))


CASES = {
    "DDP, views": lambda model, cap: DDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=True),
    "zero=0": fast(),
    "zero=1": fast(zero=1),
    "zero=2": fast(zero=2),
    "zero=3": fast(zero=3, units=[Block]),
    "fully_shard": by_block(fastsync.fully_shard),
    "FSDP2": by_block(torchs),
    "int8": fast(wire="int8"),
    "zero=2, int8 both ways": fast(zero=2, wire="int8", parameter_wire="int8"),
    "masters, zero=2": lower,
    "nonfinite": fast(nonfinite="skip"),
    "clipping": fast(),
}


def measure(rank, world, case, blocks, width):
    """Return peak memory, and waits (by kind), launches and own kernels of a step."""
    from tests.simulated.device import low, placed

    model = net(blocks, width)
    size = sum(p.numel() for p in model.parameters())
    model = CASES[case](placed(model), size * 4 / BUCKETS / 2**20)
    opt = optim.AdamW(model.parameters(), 1e-3, foreach=False)
    for step in range(1, LAST + 1):
        if step == FIRST:
            low.synchronize()
            low.report(reset=True)
        batch = words(rank, step).pin_memory().to(DEVICE, non_blocking=True)
        loss_of(model, batch).backward()
        if case == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    report = low.report()
    steps = LAST + 1 - FIRST
    kinds = collections.Counter(re.split(" at | \\(", wait)[0] for wait in report.waits)
    waits = {kind: count / steps for kind, count in kinds.items()}
    return report.peak / (4 * size), waits, report.launches / steps, report.kernels / steps


def live(rank, world, case, blocks, width):
    """Return who holds how much at the peak, in units of the parameters' bytes, the most first."""
    from tests.simulated.device import detecting, low

    held = collections.Counter()
    with detecting([]):
        measure(rank, world, case, blocks, width)
        low.synchronize()
        for nbytes, where in low.report().live:
            held[where.strip()] += nbytes
    size = 4 * sum(p.numel() for p in net(blocks, width).parameters())
    return [(count / size, where) for where, count in held.most_common()]


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--live", action="store_true")
    asked = parser.parse_args()
    if asked.live:
        for case in [asked.only] if asked.only else CASES:
            found = run_simulated(live, asked.ranks, case, asked.blocks, asked.width, timeout=600.0)
            print(case, *(f"{share:.3f} {where}" for share, where in found[0]), sep="\n")
        return
    print("| case | peak memory | host waits | launches | of these own kernels |")
    print("|---|---|---|---|---|")
    for case in [asked.only] if asked.only else CASES:
        found = run_simulated(measure, asked.ranks, case, asked.blocks, asked.width, timeout=600.0)
        memory, waits, launches, kernels = found[0]
        kinds = ", ".join(f"{count:g} {kind}" for kind, count in waits.items())
        total = f"{sum(waits.values()):g}" + (f" ({kinds})" if kinds else "")
        print(f"| {case} | {memory:.3f} | {total} | {launches:.0f} | {kernels:.0f} |", flush=True)


if __name__ == "__main__":
    main()
