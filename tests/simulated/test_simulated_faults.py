"""Ranks that die, raise and sleep while a device waits for them, and the others' reports.

The host of the other rank does not wait: csrc/fault/device_monitor.h watches beside it.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults.fault_endings import UNITS, WARNED
from tests.faults.fault_script import FAULTY, WIDTH, Net, wrap
from tests.faults.fault_script import WRAPPERS as OPTIONS
from tests.helpers.scripts import finish, start
from tests.simulated import build
from tests.simulated.ranks import run_simulated

DEVICE = "sim"
LIMIT = 200  # seconds, for all jobs of a test
WRAPPERS = ("fp32", "zero1", "zero2", "zero3", "fsdp")
FAULTS = ("kill", "raise", "sleep")
PLACES = ("forward", "backward", "between")
ALL = [
    *((fault, place, "") for fault in FAULTS for place in PLACES),
    *((fault, "backward", "reads") for fault in FAULTS),
    *((fault, "backward", "rests") for fault in ("kill", "raise")),
]
# Each fault, place and way to go on once.
FEW = [
    ("kill", "forward", ""),
    ("raise", "between", ""),
    ("sleep", "backward", "reads"),
    ("kill", "backward", "rests"),
]


class Ending:
    """The observations and output of the rank without a fault, and the exit code of its process."""

    def __init__(self, folder, job, codes):
        first = Path(folder, f"{'-'.join(job)}-{1 - FAULTY}.json")
        self.seen = json.loads(first.read_text()) if first.exists() else None
        self.log = first.with_suffix(".log").read_text(errors="replace")
        self.code = codes["-".join(job)][1 - FAULTY]

    def __str__(self):
        return f"exit code {self.code}, {self.seen}\n{self.log}"


def endings(folder, jobs):
    """Return how each job has ended. All of them run at once: their ranks mostly wait."""
    for name in (build.DEVICE, build.ENGINE):
        build.library(name)
    process = start("tests.simulated.simulated_fault_script", folder, json.dumps(jobs))
    codes = json.loads(finish(process, timeout=LIMIT).splitlines()[-1])
    return {tuple(job): Ending(folder, job, codes) for job in jobs}


def check_report(job, ending):
    """The report names the rank, and is on stderr whatever becomes of the script."""
    fault, place, wrapper, _ = job
    report, *_ = (line for line in ending.log.splitlines() if line.startswith("fastsync: rank 1 "))
    says = {
        "kill": "was killed by SIGKILL",
        "raise": "raised BadBatch: bad batch (fault_script.py:",
        "sleep": "is late: it is ",
    }
    assert says[fault] in report, str(ending)
    assert " Rank 0 waited " in report, str(ending)
    where = "after step 3" if place == "between" else f"in the {place} of step 3"
    assert where in report.partition(" Rank 0 waited ")[0], str(ending)
    units = r"the (gather|reduction) of unit 'layers\."
    buckets = r"the (averages of step|gathering of parameters)|bucket "
    waits = units if wrapper in UNITS else buckets
    assert re.search(waits, report), str(ending)
    if fault == "sleep":
        assert float(WARNED.search(ending.log)[2]) >= 1, str(ending)
        assert "rank 1 is late: it is" in ending.log.partition(report)[0], str(ending)
        assert "in train" in ending.log.partition("Traceback")[0], "the sleeping rank's stack"


def check_end(job, ending):
    """The script's next call raised the error, and what it had waited for ends."""
    check_report(job, ending)
    seen = ending.seen
    if job[-1] == "rests":  # a script that does not come back is ended
        assert seen is None and ending.code == 1, str(ending)
        assert "fastsync: rank 0 ends: its script has not come back" in ending.log, str(ending)
        assert "in train" in ending.log, "where the script is"
        return
    assert seen and (seen["error"], seen["ranks"]) == ("SyncFault", [FAULTY]), str(ending)
    assert seen["text"] in ending.log.partition("Traceback")[0], str(ending)
    assert ending.code == 1, str(ending)


@pytest.mark.slow(but=("few-fp32",))
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("cases", [FEW, ALL], ids=["few", "all"])
def test_the_other_rank_names_the_one_with_the_fault(tmp_path, wrapper, cases):
    """Whether its script runs ahead of the device, waits for it on the host, or is elsewhere."""
    jobs = [(fault, place, wrapper, after) for fault, place, after in cases]
    for job, ending in endings(tmp_path, jobs).items():
        check_end(job, ending)


def steps(rank, world, wrapper, watch):
    """Return whether ranks watch each other, and the host's waits and the device's tasks in three
    steps."""
    from fastsync.reducer.monitor import watch_of
    from tests.simulated.device import low, placed

    os.environ["FASTSYNC_WATCH"] = watch
    # Votes on plans, which the host waits for where the device is late, are not for this test.
    options = {"find_unused_parameters": False, **(OPTIONS[wrapper] or {})}
    model = wrap(placed(Net(None, "")), wrapper, options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH, device=DEVICE)).backward()
        optimizer.step()

    for _ in range(4):
        step()
    low.synchronize()
    low.report(reset=True)
    for _ in range(3):
        step()
    report = low.report()
    found = list(report.waits), report.launches
    low.synchronize()
    return watch_of(dist.group.WORLD) is not None, *found


@pytest.mark.slow(but=("fsdp",))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_looking_out_costs_a_step_no_wait_and_no_collective(wrapper):
    watched = run_simulated(steps, 2, wrapper, "1")
    alone = run_simulated(steps, 2, wrapper, "0")
    assert [looks for looks, *_ in watched] == [True, True]
    assert [looks for looks, *_ in alone] == [False, False]
    assert [tasks for *_, tasks in watched] == [tasks for *_, tasks in alone]
    # How often the host waits depends on how far the device is, where it waits at all.
    for (_, ours, _), (_, theirs, _) in zip(watched, alone, strict=True):
        assert set(ours) <= set(theirs)
