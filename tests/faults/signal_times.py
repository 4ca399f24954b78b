"""How long ranks take to end after a signal: python -m tests.faults.signal_times

For Ctrl-C and SIGTERM to torchrun, and to `python -m fastsync.elastic`, with ranks in each place of
tests/faults/signal_script.py: seconds until the last rank has ended, and until the launcher has.
"""

import argparse
import itertools
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.launched import ELASTIC, TORCHRUN, launched

RANKS = 3
PLACES = ("forward", "backward", "vote", "meeting")


def measure(launcher, place, stage, number):
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("tests.faults.signal_script", place, stage)
        with launched(Path(folder), RANKS, *arguments, launcher=launcher) as job:
            job.wait_for_files(*(f"comes {rank}" for rank in job.ranks))
            time.sleep(1)  # so that the others wait for the one in that place
            start = time.monotonic()
            job.launcher.send_signal(number)
            job.wait_until(lambda: all(map(job.has_ended, job.ranks)) or job.over)
            ranks = time.monotonic() - start
            job.end()
            return ranks, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults.signal_times")
    parser.add_argument("--rounds", type=int, default=1, help="of each case (default: 1)")
    rounds = parser.parse_args().rounds
    numbers = (signal.SIGINT, signal.SIGTERM)
    cases = itertools.product((TORCHRUN, ELASTIC), PLACES, (0, 1), numbers)
    longest = 0.0
    for launcher, place, stage, number in cases:
        for _ in range(rounds):
            ranks, all_of_it = measure(launcher, place, stage, number)
            longest = max(longest, ranks)
            what = f"{launcher[0]:30} {place:9} zero={stage} {number.name:8}"
            print(f"{what} ranks {ranks:5.2f} s, launcher {all_of_it:5.2f} s", flush=True)
    print(f"the longest that ranks took: {longest:.2f} s")


if __name__ == "__main__":
    main()
