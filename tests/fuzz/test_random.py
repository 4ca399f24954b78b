"""Random models, options and training loops, held against a rule that fits in one line.

`tests/fuzz/random_cases/rule.py` says the rule.

One case again: python -m tests.fuzz.test_random --case N
"""

import argparse
import os
import time

import pytest

from tests.fuzz.random_cases.team import FAMILIES, Tally, check_cases

FIXED = 60
SLOW = 240
DRAWN = 3
SHARD = 60
BATCH = 192  # whose ranks start once for each size of team
UNITS = 2  # fixed cases that are drawn of units


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, FIXED, SHARD))
def test_fixed_cases(start):
    check_cases(range(start, start + SHARD))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FIXED, FIXED + SLOW, SHARD))
def test_more_fixed_cases(start):
    check_cases(range(start, start + SHARD))


def test_cases_of_this_run():
    """Other ones each time; a failure says how to repeat it."""
    start = int.from_bytes(os.urandom(4), "big")
    print(f"cases {start} to {start + DRAWN - 1}")
    check_cases(range(start, start + DRAWN))


def test_fixed_cases_of_units():
    check_cases(range(UNITS), family="units")


@pytest.mark.slow
def test_more_fixed_cases_of_units():
    check_cases(range(UNITS, UNITS + SHARD), family="units")


def main():
    parser = argparse.ArgumentParser(description="runs random cases, by number or until one fails")
    parser.add_argument("--of", choices=FAMILIES, default="models", help="what is drawn")
    parser.add_argument("--case", type=int, help="run this one only")
    parser.add_argument("--start", type=int, default=FIXED + SLOW, help="the first one")
    parser.add_argument("--seconds", type=float, default=60, help="begin no more after this long")
    parser.add_argument("--kinds", action="store_true", help="say how often each kind was drawn")
    args = parser.parse_args()
    tally = Tally()
    if args.case is not None:
        check_cases([args.case], tally, args.of)
        return print(f"case {args.case} passed: {', '.join(tally.kinds)}")
    seed, end = args.start, time.monotonic() + args.seconds
    while time.monotonic() < end:
        check_cases(range(seed, seed + BATCH), tally, args.of)
        seed += BATCH
        print(f"cases {args.start} to {seed - 1} passed: {tally}", flush=True)
    if args.kinds:
        print("\n".join(f"{count:7} {kind}" for kind, count in tally.kinds.most_common()))


if __name__ == "__main__":
    from tests.fuzz import test_random  # ranks cannot import what is called __main__

    try:
        test_random.main()
    except AssertionError as error:
        raise SystemExit(str(error)) from None
