"""Runs schedules by number, until time is over or one fails.

One schedule again: python -m tests.fuzz.random_faults --case N
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # wrapping a module would import it in each rank

from docs.tables import write_table
from fastsync._build import extension
from tests.fuzz.random_faults.schedule import PLACES
from tests.fuzz.random_faults.team import Runner, Tally


def parser():
    made = argparse.ArgumentParser("tests.fuzz.random_faults", description=__doc__)
    made.add_argument("--case", type=int, help="run this one only")
    made.add_argument("--start", type=int, default=0, help="the first one")
    made.add_argument("--count", type=int, default=1 << 60, help="begin no more than so many")
    made.add_argument(
        "--tally", type=Path, help="leaves out what this file holds of earlier runs, and adds to it"
    )
    made.add_argument("--seconds", type=float, default=60, help="begin no more after this long")
    made.add_argument("--report", type=Path, help="write a table for python -m bench report")
    return made


def main():
    args = parser().parse_args()
    torch.set_num_threads(1)
    os.environ.update(FASTSYNC_STALL_WARN="1", FASTSYNC_AGREE_TIMEOUT="3")
    extension.load()
    first, count = (args.start, args.count) if args.case is None else (args.case, 1)
    deadline = time.monotonic() + args.seconds
    tally = Tally.read(args.tally) if args.tally else Tally()
    folder = tempfile.mkdtemp()  # not of a kind that a forked rank would remove at its end
    try:
        run(Runner(folder, tally), range(first, first + count), deadline)
    finally:
        shutil.rmtree(folder)
        if args.tally:
            tally.write(args.tally)
    if args.report:
        report(tally, args.report)


def run(runner, numbers, deadline):
    begun = runner.tally.count
    for number in numbers:
        if time.monotonic() > deadline:
            break
        if runner.tally.has(number):
            continue
        runner.check(number)
        if runner.tally.count % 50 == 0:
            print(f"all schedules up to {number} passed", flush=True)
    passed = runner.tally.count - begun
    print(f"{passed} schedules passed; with those of earlier runs {runner.tally}")


def report(tally, path):
    title = (
        f"{tally.count + len(tally.wrong)} trainings with a fault that is drawn: how many at which "
        "place, how often a rank hung, had other weights than without the fault, or ended in "
        "another way than it should; seconds from the fault to the errors of the other ranks"
    )
    places = (*PLACES[:-1], "optimizer's step", "after some time")
    wrong = ("hangs", "other weights", "other failures")
    seconds = ("median, s", "95 % within, s", "worst, s")
    headers = ("fault", "trainings", *places, *wrong, *seconds)
    write_table(path, title, headers, tally.rows(), ranks="2 to 4", threads_per_rank=1)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        raise SystemExit(str(error)) from None
