"""Trains on forked ranks with simulated devices, of which one has a fault.

See test_simulated_faults.py.

A job is (fault, place, wrapper, after). Rank 1 has the fault in its third step. `after` is what a
rank does at the end of each step: "" (it runs ahead of its device), "reads" (it waits for the loss
on the host) or "rests" (it is busy elsewhere once the fault has happened). A rank writes its error
to `<folder>/<job>-<rank>.json`, what it prints to `.log`. The script prints the exit codes as JSON:
by job, those of its ranks; null: it had to be ended.
"""

import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.simulated.device import GROUP, LETS_LIVE, NAME, placed  # isort: skip  (before fastsync)

import torch
import torch._dynamo  # wrapping a module would import it
import torch.distributed as dist

from fastsync.reducer import core
from tests.faults.fault_script import AT, FAULTY, WIDTH, WRAPPERS, Net, facts_of, wrap

WORLD = 2
LIMIT = 100.0  # seconds for all jobs
STALLED = 6.0  # seconds: the group's timeout where a rank sleeps; else LIMIT
WARN_AFTER = "1"
PAUSE = 0.02  # seconds between steps: a host that nothing holds up would enqueue without end


def train(rank, fault, place, wrapper, after):
    """Train until an exception or the end of the process."""
    net = Net(fault if rank == FAULTY else None, place)
    model = wrap(placed(net), wrapper, dict(WRAPPERS[wrapper] or {}))
    net.shared = True  # hooks on parameters were lost on the way to the device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    while True:
        net.step += 1
        x = torch.randn(4, WIDTH).to(NAME)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        if net.due("between"):
            net.fail()
        optimizer.step()
        if after == "reads":
            loss.item()
        if after == "rests" and net.step == AT:
            time.sleep(LIMIT)
        time.sleep(PAUSE)


def run(folder, name, rank, job):
    """Run a rank of a job, in a forked process."""
    log = os.open(f"{folder}/{name}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["FAULT_NOTES"] = f"{folder}/{name}-{rank}.notes"
    dist.init_process_group(
        GROUP,
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=STALLED if job[0] == "sleep" else LIMIT),
        init_method=f"file://{folder}/{name}.store",
    )
    try:
        train(rank, *job)
    except BaseException as error:
        seen = facts_of(error)
        if rank != FAULTY:
            torch.ones(1, device=NAME).item()  # returns once the device is free again
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(seen))
        raise


def exit_code(pid):
    """Return the exit code of a child that has ended, and leave it for the other ranks to see."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def collect(children):
    """Return the exit codes; the rank with the fault is ended once the others are over."""
    codes, deadline = {}, time.monotonic() + LIMIT
    while len(codes) < len(children) and time.monotonic() < deadline:
        for (name, rank), pid in children.items():
            if (name, rank) in codes:
                continue
            code = exit_code(pid)
            if code is not None:
                codes[name, rank] = code
            elif rank == FAULTY and all((name, r) in codes for r in range(WORLD) if r != FAULTY):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def main():
    folder, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    # Its watchdog comes a moment after ours, which a busy machine may not leave time for.
    os.environ.update({"FASTSYNC_STALL_WARN": WARN_AFTER, LETS_LIVE: "0"})
    core.load()
    gc.freeze()  # what the ranks have in common is not worth the time of a search
    children = {}
    for job in jobs:
        name = "-".join(job)
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                run(folder, name, rank, job)
                return
            children[name, rank] = child
    codes = collect(children)
    names = ["-".join(job) for job in jobs]
    print(json.dumps({name: [codes.get((name, rank)) for rank in range(WORLD)] for name in names}))


if __name__ == "__main__":
    main()
