"""The command: `python -m tests.conformance.fsdp_suite UPSTREAM`.

Which tests have to pass is read from baseline.json; `--measure-baseline` runs torch's own
fully_shard first, instead.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path

import torch._dynamo  # noqa: F401  # by the first optimizer; once here instead of in each rank

from fastsync._build import extension
from tests.conformance.fsdp_suite.load import load_tests
from tests.conformance.fsdp_suite.rank import run_rank
from tests.conformance.fsdp_suite.wrappers import WRAPPERS, Suite
from tests.conformance.torch_suite.record import Lists
from tests.conformance.torch_suite.report import follow, summarise, write_json
from tests.conformance.torch_suite.runner import Job, TestResult, run_tests

_LISTS = Lists(Path(__file__).parent)
_BACKEND = "gloo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return the exit status: 0 where all that had to pass has passed."""
    options = _parse(arguments)
    try:
        jobs = _jobs(options)
    except FileNotFoundError as error:
        print(f"error: {error}; see python -m tests.conformance.fsdp_suite --help", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    if not jobs:
        print("no test matches", file=sys.stderr)
        return 2
    start = time.monotonic()
    results = _run(jobs, options)
    if options.json:
        write_json(options.json, results)
    return _judge(results, options, time.monotonic() - start)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.fsdp_suite", description=__doc__
    )
    add = parser.add_argument
    add("upstream", type=Path, help="a folder with torch's test_fully_shard_*.py")
    add("--wrapper", choices=WRAPPERS, default="fastsync", help="what is under test")
    add("--only", metavar="REGEX", help="run the tests whose name it finds")
    add("--all", action="store_true", help="also tests that torch's own fully_shard does not pass")
    add("--list", action="store_true", help="print the tests and stop")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds for one test")
    add("--quiet", action="store_true", help="no tracebacks")
    add(
        "--measure-baseline", action="store_true", help="run torch's own first, to know what to run"
    )
    add("--write-baseline", action="store_true", help="record what passes (with --wrapper torch)")
    options = parser.parse_args(arguments)
    if options.write_baseline and (options.wrapper != "torch" or options.only):
        parser.error("a baseline is made from all tests with --wrapper torch")
    return options


def _jobs(options: argparse.Namespace) -> list[Job]:
    if options.all or options.wrapper == "torch":
        return _made(options, options.wrapper, None)
    if options.measure_baseline:
        print("what torch's own fully_shard passes:", flush=True)
        results = _run(_made(options, "torch", None), options)
        print(f"\nwhat {options.wrapper} passes of these:", flush=True)
        return _made(options, options.wrapper, {r.name for r in results if r.status == "passed"})
    return _made(options, options.wrapper, set(_LISTS.baseline(_BACKEND)))


def _made(options: argparse.Namespace, wrapper: str, known: Set[str] | None) -> list[Job]:
    """The tests of the folder that are known, or all."""
    suite = Suite(WRAPPERS[wrapper])
    cases = load_tests(suite, options.upstream)
    lacking = set() if known is None else set(known) - set(cases)
    if lacking:
        print(f"{options.upstream} lacks {len(lacking)} of the baseline's {len(known or ())} tests")
    return [
        Job(name, case.ranks, partial(run_rank, suite, case))
        for name, case in cases.items()
        if known is None or name in known
        if not options.only or re.search(options.only, name)
    ]


def _run(jobs: Sequence[Job], options: argparse.Namespace) -> list[TestResult]:
    extension.load()  # built before the ranks fork
    return follow(run_tests(jobs, options.jobs, options.timeout), len(jobs), options.quiet)


def _judge(results: Sequence[TestResult], options: argparse.Namespace, seconds: float) -> int:
    is_baseline = options.wrapper == "torch" or options.all
    excepted = {} if is_baseline else _LISTS.exceptions()
    missed = summarise(f"{options.wrapper} on {_BACKEND}", results, excepted, seconds)
    if options.write_baseline:
        _LISTS.write_baseline(_BACKEND, [r.name for r in results if r.status == "passed"])
    return 1 if missed and not is_baseline else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # run_tests has ended its ranks
