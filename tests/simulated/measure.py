"""Cost of each stage on the simulated device: memory, host waits and launches of a step.

`python -m tests.simulated.measure [--ranks 2] [--blocks 12] [--width 256] [--only zero=2]` prints a
table. Memory is the allocator's peak in steps 3 to 8, in units of the parameters' bytes; nothing
here says anything about time. `--live` lists what was allocated at the peak instead, by the lines
that asked for it. `--device cuda` measures the same on a GPU, which ranks may share.
"""

import argparse
import collections
import contextlib
import gc
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

import fastsync
from bench.measure.gpu import device_work, launches
from examples.common.costs import settle_gpu
from examples.common.machine import command_line, environment, write_json
from examples.common.ranks import Group
from fastsync import FastDDP, Zero
from fastsync.config.arguments import grouped
from tests.fsdp.fsdp_models import Block, loss_of, net, words
from tests.helpers.devices import run_cuda_ranks
from tests.simulated.ranks import run_simulated

DEVICE, CUDA = "sim", "cuda"
FIRST, LAST = 3, 8
CUDA_TIMEOUT, SIMULATED_TIMEOUT = 150.0, 600.0  # seconds, of all cases; of one
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


@dataclass(frozen=True)
class Report:
    """What a GPU was asked for, in the words of the simulated device.

    Attributes:
        peak: bytes that its allocator had given at most.
        waits: those that torch knows of; see `torch.cuda.set_sync_debug_mode`.
        launches: kernels; copies and fills by the driver are left out.
        kernels: those of fastsync.
    """

    peak: int
    waits: list[str]
    launches: int
    kernels: int


def on_simulated(step, steps):
    """Make steps FIRST to LAST; return the device's report, and its numbers per step."""
    from tests.simulated.device import low

    low.synchronize()
    low.report(reset=True)
    for number in steps:
        step(number)
    return low.report()


@contextlib.contextmanager
def waits_counted():
    """Yield a list that holds a line for each wait of the host, on any thread, at the end."""
    found, own = [], os.dup(2)
    with tempfile.TemporaryFile() as log, warnings.catch_warnings():
        # Python shows a warning of one place once; those of other threads are C++'s.
        warnings.simplefilter("always")
        os.dup2(log.fileno(), 2)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            log.seek(0)
            text = log.read().decode(errors="replace")
            found += ["synchronising call"] * text.count("called a synchronizing CUDA operation")


def on_cuda(step, steps):
    """As `on_simulated`; one more step is profiled afterwards, for its launches."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with waits_counted() as waits:
        for number in steps:
            step(number)
    peak = torch.cuda.max_memory_allocated()
    kernels, _ = device_work(lambda: step(steps[-1] + 1), torch.device(CUDA))
    own = sum("fastsync" in kernel.name for kernel in kernels)
    return Report(peak, waits, len(steps) * launches(kernels), len(steps) * own)


def measure(rank, world, case, blocks, width, device=DEVICE):
    """Return peak memory, and waits (by kind), launches and own kernels of a step."""
    if device == DEVICE:
        from tests.simulated.device import placed

    before = 0
    if device == CUDA:
        settle_gpu(torch.device(device))
        before = torch.cuda.memory_allocated()
    model = net(blocks, width)
    size = sum(p.numel() for p in model.parameters())
    model = placed(model) if device == DEVICE else model.to(device)
    model = CASES[case](model, size * 4 / BUCKETS / 2**20)
    opt = optim.AdamW(model.parameters(), 1e-3, foreach=False)

    def step(number):
        batch = words(rank, number).pin_memory().to(device, non_blocking=True)
        loss_of(model, batch).backward()
        if case == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    for number in range(1, FIRST):
        step(number)
    steps = range(FIRST, LAST + 1)
    report = (on_simulated if device == DEVICE else on_cuda)(step, steps)
    kinds = collections.Counter(re.split(" at | \\(", wait)[0] for wait in report.waits)
    waits = {kind: count / len(steps) for kind, count in kinds.items()}
    launched = (count / len(steps) for count in (report.launches, report.kernels))
    return (report.peak - before) / (4 * size), waits, *launched


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


def measure_on_gpu(rank, world, cases, blocks, width):
    """Return what `measure` finds of each case on a GPU, all in the same processes."""
    found = []
    for case in cases:
        found.append(measure(rank, world, case, blocks, width, CUDA))
        gc.collect()
        torch.cuda.empty_cache()
    return found


def results(cases, asked):
    """Yield the cells of each case."""
    size = asked.blocks, asked.width
    if asked.device == CUDA:
        found = iter(
            run_cuda_ranks(measure_on_gpu, asked.ranks, cases, *size, timeout=CUDA_TIMEOUT)[0]
        )
    else:
        simulated = partial(run_simulated, measure, asked.ranks, timeout=SIMULATED_TIMEOUT)
        found = (simulated(case, *size)[0] for case in cases)
    for case, (memory, waits, launched, kernels) in zip(cases, found, strict=True):
        kinds = ", ".join(f"{count:g} {kind}" for kind, count in waits.items())
        total = f"{sum(waits.values()):g}" + (f" ({kinds})" if kinds else "")
        yield case, f"{memory:.3f}", total, f"{launched:.0f}", f"{kernels:.0f}"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--live", action="store_true", help="what is allocated at the peak instead")
    parser.add_argument("--device", choices=(DEVICE, CUDA), default=DEVICE)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    asked = parser.parse_args()
    cases = [asked.only] if asked.only else list(CASES)
    if asked.live:
        for case in cases:
            found = run_simulated(live, asked.ranks, case, asked.blocks, asked.width, timeout=600.0)
            print(case, *(f"{share:.3f} {where}" for share, where in found[0]), sep="\n")
        return
    headers, rows = ("case", "peak memory", "host waits", "launches", "of these own kernels"), []
    print(f"| {' | '.join(headers)} |\n|{'---|' * len(headers)}")
    for row in results(cases, asked):
        rows.append(row)
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    if asked.json:
        title = f"{asked.blocks} blocks of width {asked.width} with AdamW, by parameters' bytes"
        place = torch.device(CUDA if asked.device == CUDA else "cpu")
        facts = environment(Group(0, asked.ranks, place))
        table = {"title": title, "headers": headers, "rows": rows, "environment": facts}
        write_json({"kind": "table", "command": command_line(), **table}, asked.json)


if __name__ == "__main__":
    main()
