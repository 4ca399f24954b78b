"""Random modes, deaths and joins of ranks between averages, held against plain torch.

One case again: python -m tests.fuzz.test_random_membership --start N --count 1
"""

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

import pytest

from tests.sync.test_membership import outcomes_of

FIXED = 12
DRAWN = 1
AT_ONCE = 6
PLACES = ["forward", "compare", "sum", "sum 2", "vote", "merge"]


def drawn_mode(rng):
    every = rng.randint(1, 5)
    if rng.random() < 0.4:
        return ["LocalSGD", {"every": every, "warmup": rng.choice([0, 0, 2])}]
    arguments = {
        "every": every,
        "fragments": rng.randint(1, every),
        "outer_momentum": rng.choice([0.0, 0.9]),
        "wire": rng.choice(["fp32", "int8", "int4", "bf16"]),
    }
    return ["DiLoCo", arguments]


def drawn_late(rng, world, doomed, mode):
    """Return steps in which ranks are late, of which one that does not die is none."""
    others = rng.sample(sorted({*range(world)} - {*doomed}), world - len(doomed))[1:]
    begin = max(1, mode[1].get("warmup", 0)) + 1  # all wait for each other in the first step
    return {rank: [rng.randint(begin, 10)] for rank in others if rng.random() < 0.3}


def drawn(number):
    """Return the case of a number, as arguments of a job."""
    rng = random.Random(number)
    world = rng.randint(2, 4)
    doomed = rng.sample(range(world), rng.randint(0, min(2, world - 1)))
    deaths = []
    for rank in doomed:
        place = rng.choice(PLACES) if rng.random() < 0.7 else round(rng.uniform(0, 15), 1)
        deaths.append([rank, rng.randint(1, 12), place])
    joins, end = rng.choice([0, 0, 1, 2]), rng.choice([0, 0, rng.randint(1, 13)])
    # A step may end with two averages, and members tell of no death between these.
    if any(step == end or not isinstance(place, str) for _, step, place in deaths):
        end = 0
    mode = drawn_mode(rng)
    if mode[0] == "DiLoCo" and random.Random(f"warmup {number}").random() < 0.2:
        mode[1]["warmup"] = 2
    late = drawn_late(random.Random(f"late {number}"), world, doomed, mode)
    return {
        "late": late,
        "patience": 5 if late else None,
        "asks": number % 2 == 0,
        "world": world,
        "mode": mode,
        "deaths": deaths,
        "joins": joins,
        "joins_after": [round(rng.uniform(0, 1), 2) for _ in range(joins)],
        "returns": int(len(deaths) == 1 and not joins and deaths[0][2] == "forward"),
        "end_at": 0 if late else end,  # which would wait for those that are late
        "make": rng.choice(["sgd", "adamw"]),
    }


def check(numbers, folder):
    """Run the cases beside each other."""
    for name, outcome in outcomes_of(folder, {f"case{n}": drawn(n) for n in numbers}).items():
        try:
            outcome.check()
        except AssertionError as error:
            raise AssertionError(f"{name}: {outcome.job}\n{outcome.said}") from error


def test_cases_of_this_run(tmp_path):
    """Other ones each time; a failure says how to repeat it."""
    start = int.from_bytes(os.urandom(4), "big")
    check(range(start, start + DRAWN), tmp_path)


@pytest.mark.slow
def test_fixed_cases(tmp_path):
    for first in range(0, FIXED, AT_ONCE):
        folder = tmp_path / str(first)
        folder.mkdir()
        check(range(first, min(FIXED, first + AT_ONCE)), folder)


def main():
    parser = argparse.ArgumentParser(description="runs random cases")
    parser.add_argument("--start", type=int, default=FIXED, help="the first one")
    parser.add_argument("--count", type=int, default=6, help="how many")
    args = parser.parse_args()
    began = time.monotonic()
    for first in range(args.start, args.start + args.count, AT_ONCE):
        numbers = range(first, min(args.start + args.count, first + AT_ONCE))
        with tempfile.TemporaryDirectory() as folder:
            check(numbers, Path(folder))
        print(f"{numbers[-1] + 1 - args.start} cases, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
