"""Runs schedules by number, until time is over or one fails.

One schedule again: python -m tests.random_faults --case N
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # wrapping a module would import it in each rank

from fastsync.build import extension
from tests.random_faults.team import Runner, Tally


def main():
    parser = argparse.ArgumentParser("tests.random_faults", description=__doc__)
    parser.add_argument("--case", type=int, help="run this one only")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=1 << 60, help="begin no more than so many")
    parser.add_argument("--tally", type=Path, help="adds to what this file holds of earlier runs")
    parser.add_argument("--seconds", type=float, default=60, help="begin no more after this long")
    args = parser.parse_args()
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


def run(runner, numbers, deadline):
    last = None
    for number in numbers:
        if time.monotonic() > deadline:
            break
        runner.check(number)
        last = number
        if runner.tally.count % 50 == 0:
            print(f"schedules {numbers[0]} to {number} passed", flush=True)
    print(f"schedules {numbers[0]} to {last} passed; with those of earlier runs {runner.tally}")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        raise SystemExit(str(error)) from None
