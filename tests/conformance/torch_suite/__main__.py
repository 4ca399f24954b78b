"""The command: `python -m tests.conformance.torch_suite --wrapper fastddp`.

It runs on NCCL where there is a GPU for each rank, else on Gloo. Which tests have to pass is read
from baseline.json; where that has no list for the backend, torch's own class is run first.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# Asks the driver without starting CUDA in this process, whose forks use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch._dynamo  # imported by the first optimizer; once here instead of in each rank

from fastsync._build import extension
from tests.conformance.torch_suite.load import Tests, load_tests
from tests.conformance.torch_suite.rank import run_rank
from tests.conformance.torch_suite.record import LISTS
from tests.conformance.torch_suite.report import follow, summarise, write_json
from tests.conformance.torch_suite.runner import Job, TestResult, run_tests
from tests.conformance.torch_suite.wrappers import WRAPPERS, Suite

_WORLD_SIZE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return the exit status: 0 where all that had to pass has passed."""
    options = _parse(arguments)
    known = _known(options)
    tests = load_tests(Suite(WRAPPERS[options.wrapper]), options.backend, _WORLD_SIZE)
    names = [name for name in _matching(tests.names, options) if known is None or name in known]
    if options.list:
        print("\n".join(names))
        return 0
    if not names:
        print("no test matches", file=sys.stderr)
        return 2
    extension.load()  # built before the ranks fork
    start = time.monotonic()
    results = _run(tests, names, options)
    if options.json:
        write_json(options.json, results)
    if options.write_baseline:
        LISTS.write_baseline(options.backend, [r.name for r in results if r.status == "passed"])
    return _judge(results, options, time.monotonic() - start)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.torch_suite", description=__doc__
    )
    add = parser.add_argument
    add("--wrapper", choices=WRAPPERS, default="fastddp", help="the class under test")
    add("--only", metavar="REGEX", help="run the tests whose name it finds")
    add("--all", action="store_true", help="also tests that torch's own class does not pass")
    add("--list", action="store_true", help="print the tests and stop")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // _WORLD_SIZE), metavar="N")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds for one test")
    add("--backend", choices=("gloo", "nccl"), default=_default_backend())
    add("--quiet", action="store_true", help="no tracebacks")
    add(
        "--must-fail",
        type=float,
        metavar="SHARE",
        help="for broken wrappers: succeed only where more than this share of the tests fails",
    )
    add(
        "--measure-baseline",
        action="store_true",
        help="ask torch's own class which tests to run, also where a list of them is at hand",
    )
    add("--write-baseline", action="store_true", help="record what passes (with --wrapper ddp)")
    options = parser.parse_args(arguments)
    if options.write_baseline and (options.wrapper != "ddp" or options.only):
        parser.error("a baseline is made from all tests with --wrapper ddp")
    return options


def _default_backend() -> str:
    return "nccl" if torch.cuda.device_count() >= _WORLD_SIZE else "gloo"


def _known(options: argparse.Namespace) -> list[str] | None:
    """The tests that torch's own class passes; None where that is not asked for."""
    if options.wrapper == "ddp" or options.all:
        return None
    listed = [] if options.measure_baseline else LISTS.baseline(options.backend)
    if listed:
        return listed
    print(f"what torch's own class passes on {options.backend}:", flush=True)
    tests = load_tests(Suite(WRAPPERS["ddp"]), options.backend, _WORLD_SIZE)
    results = _run(tests, _matching(tests.names, options), options)
    print(f"\nwhat {options.wrapper} passes of these:", flush=True)
    return [result.name for result in results if result.status == "passed"]


def _matching(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    return [name for name in names if not options.only or re.search(options.only, name)]


def _run(tests: Tests, names: Sequence[str], options: argparse.Namespace) -> list[TestResult]:
    jobs = [Job(name, _WORLD_SIZE, partial(run_rank, tests, name)) for name in names]
    return follow(run_tests(jobs, options.jobs, options.timeout), len(jobs), options.quiet)


def _judge(results: Sequence[TestResult], options: argparse.Namespace, seconds: float) -> int:
    is_baseline = options.wrapper == "ddp" and not options.only
    excepted = {} if is_baseline else LISTS.exceptions()
    missed = summarise(f"{options.wrapper} on {options.backend}", results, excepted, seconds)
    if is_baseline:
        return 0
    if options.must_fail is None:
        return 1 if missed else 0
    share = len(missed) / len(results)
    print(f"{share:.0%} failed; more than {options.must_fail:.0%} must")
    return 0 if share > options.must_fail else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # run_tests has ended its ranks
