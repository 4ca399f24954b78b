"""Costs of a variant besides time: memory of gradients and buckets, and dispatched operators.

[Note: Counting live bytes]
On a CPU, the C allocator itself is asked for the bytes in use (glibc's mallinfo2) after two
training steps, less the same before the model was wrapped. That includes the buffers of
every thread and holder. Pages that this rank made for memory that ranks share are added. The
profiler sees less: it misses memory that other threads release, and charged torch's fp16 hook with
3 times the gradients instead of 2. Python's garbage collector cannot see the buffers of a C++
reducer, and the resident set is coarser (pages, and what malloc keeps). On a GPU,
`torch.cuda.memory_allocated` answers the same question.

The figure is a ratio to the bytes of the gradients: 1 for a bare model, 2 for default DDP, whose
buckets are a second copy. Objects around the tensors are part of it (about 1.5 kB per parameter
under DDP), so models of many tiny tensors read a little higher.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from examples.common.ranks import Group
from examples.common.training import OPTIMIZERS, Lane, Workload, make_batches, make_lane
from examples.common.variants import Variant

STEPS, WARMUP_STEPS = 2, 3  # for live bytes; before operators are counted
PEAK_STEPS = 6  # until plan and optimizer are settled; as many are looked at
PROBE_BYTES = 32 * 2**20
SETTLE_TRIES, SETTLE_SECONDS = 50, 0.02
RELEASE_SECONDS = 2.0  # threads of DDP and NCCL let go of a model's last tensors later
# What the backends call their collectives in a profile, and what torch does.
BACKENDS = ("gloo:", "nccl:")
COLLECTIVES = ("c10d::allreduce_", "c10d::broadcast_", "c10d::allgather_")


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def live_bytes_reader(device: torch.device) -> Callable[[], int] | None:
    """Return a function that returns the bytes in use, or None where nothing here can tell."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _MallInfo

    def read() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd) + shared_bytes()

    def sees_probe() -> bool:
        before = settled(read)
        probe = torch.empty(PROBE_BYTES, dtype=torch.uint8)
        seen = settled(read) - before
        del probe
        return seen >= PROBE_BYTES

    # Another allocator may stand in for glibc's, whose answer would then mean nothing. A thread
    # that ends may give memory back meanwhile.
    return read if any(sees_probe() for _ in range(3)) else None


def shared_bytes() -> int:
    """Return the bytes of nameless files that this process made and holds, as by `memfd_create`."""
    files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(
        512 * os.stat(path).st_blocks
        for path in files
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:fastsync")
    )


def settled(read: Callable[[], int]) -> int:
    """Read when the count stands still: threads of the backend release buffers a little later."""
    gc.collect()
    last = read()
    for _ in range(SETTLE_TRIES):
        time.sleep(SETTLE_SECONDS)
        now, last = last, read()
        if now == last:
            break
    return last


def settle_gpu(device: torch.device) -> None:
    """Have cuBLAS take the memory that it keeps, and wait until earlier models have left theirs."""
    if device.type != "cuda":
        return
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(8, 64, device=device, requires_grad=True)).sum().backward()
    del layer
    least, since = torch.cuda.memory_allocated(device), time.monotonic()
    while time.monotonic() - since < RELEASE_SECONDS:
        time.sleep(SETTLE_SECONDS)
        gc.collect()
        if (now := torch.cuda.memory_allocated(device)) < least:
            least, since = now, time.monotonic()


def gradient_memory(workload: Workload, variant: Variant, group: Group) -> float | None:
    """Return the live bytes that two steps under `variant` add, over the bytes of the gradients.

    Measured after the second backward with `zero_grad(set_to_none=True)`; the largest of all ranks.
    None where it cannot be measured: it needs a GPU or glibc >= 2.33 as the allocator in use.
    """
    read = live_bytes_reader(group.device)
    if not group.all_agree(read is not None) or read is None:
        return None
    gradients, grown = 1, 0
    for _ in range(2):  # the first pays for what a process loads and caches once
        module = workload.build().to(group.device)
        batches = make_batches(workload, group, STEPS)
        optimizer = OPTIMIZERS["sgd"](module.parameters())
        dist.barrier()
        before = settled(read)
        model = variant.wrap(module, group.device)
        lane = Lane(workload, module, model, optimizer, batches, update=False)
        lane.steps(STEPS)
        group.synchronize()
        grown = settled(read) - before
        gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        del module, model, lane, optimizer
    return group.most(grown / gradients)


def peak_memory(make: Callable[[], Lane], group: Group) -> float | None:
    """Return the peak of bytes in a training step of a new lane, over the bytes of the parameters.

    The model, its gradients and the optimizer's states are part of it. A GPU's allocator knows its
    peak; on a CPU a thread looks every millisecond. The largest of all ranks, or None as above.
    """
    import torch._dynamo  # as the first optimizer would, whose step is not what this costs

    read = live_bytes_reader(group.device)
    if not group.all_agree(read is not None) or read is None:
        return None
    settle_gpu(group.device)
    before = settled(read)
    lane = make()
    lane.steps(PEAK_STEPS)
    if on_gpu := group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)
    with ThreadPoolExecutor(1) as looking:
        ended = Event()
        seen = looking.submit(lambda: max(iter(lambda: ended.wait(0.001) or read(), True)))
        for _ in range(PEAK_STEPS):
            lane.step()
            group.synchronize()
        ended.set()
    peak = torch.cuda.max_memory_allocated(group.device) if on_gpu else seen.result()
    return group.most((peak - before) / sum(p.nbytes for p in lane.module.parameters()))


def events_of(run: Callable[[], object]) -> list[str]:
    """Return the names of the CPU events that torch's profiler sees while `run` runs."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    return [event.name for event in profiler.events() or []]


def collectives(lane: Lane) -> int:
    """Return the number of collectives in a lane's next step on this rank."""
    names = events_of(lane.step)
    by_backend = sum(name.startswith(BACKENDS) for name in names)
    return by_backend or sum(name in COLLECTIVES for name in names)


def dispatched_ops(workload: Workload, variant: Variant, group: Group) -> int:
    """CPU events of a zero_grad, forward and backward, after warm-up; the largest of all ranks."""
    lane = make_lane(workload, variant, group, optimizer=None)
    lane.steps(WARMUP_STEPS)
    return int(group.most(len(events_of(lane.step))))
