"""The command: `python -m tests.torch_suite --wrapper fastddp`.

It runs on NCCL where there is a GPU for each rank, else on Gloo. Which tests have to pass is read
from baseline.json; where that has no list for the backend, torch's own class is run first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Asks the driver without starting CUDA in this process, whose forks use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch._dynamo  # imported by the first optimizer; once here instead of in each rank

from fastsync.build import extension
from tests.torch_suite.load import Tests, load_tests
from tests.torch_suite.record import read_baseline, read_exceptions, write_baseline
from tests.torch_suite.runner import TestResult, run_tests
from tests.torch_suite.wrappers import WRAPPERS, Suite

_WORLD_SIZE = 2
_TEXT_SHOWN = 3000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite; returns the exit status: 0 where all that had to pass has passed."""
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
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.write_baseline:
        write_baseline(options.backend, [r.name for r in results if r.status == "passed"])
    return _summarise(results, options, time.monotonic() - start)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
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
    listed = [] if options.measure_baseline else read_baseline(options.backend)
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
    results = []
    for result in run_tests(tests, names, _WORLD_SIZE, options.jobs, options.timeout):
        results.append(result)
        _show(result, len(results), len(names), options.quiet)
    return results


def _show(result: TestResult, done: int, total: int, quiet: bool) -> None:
    print(f"{done:3}/{total} {result.status:9} {result.seconds:5.1f} s  {result.name}", flush=True)
    if result.status in ("passed", "not run"):
        return
    if quiet:
        print(f"      rank {result.rank}: {result.last_line[:300]}", flush=True)
    else:
        text = result.text[-_TEXT_SHOWN:].rstrip().replace("\n", "\n    ")
        print(f"    rank {result.rank}:\n    {text}", flush=True)


def _summarise(results: Sequence[TestResult], options: argparse.Namespace, seconds: float) -> int:
    counts = Counter(result.status for result in results)
    text = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    print(f"\n{options.wrapper} on {options.backend}: {text}; {seconds:.0f} s")
    if options.wrapper == "ddp" and not options.only:
        return 0
    excepted = read_exceptions()
    missed = [r for r in results if r.status != "passed" and r.name not in excepted]
    for result in results:
        if result.name in excepted:
            print(f"  excepted, {result.status}: {result.name} ({excepted[result.name]})")
    for result in missed:
        print(f"  {result.status}: {result.name}")
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
