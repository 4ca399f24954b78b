"""Report that a suite's command prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.conformance.torch_suite.runner import TestResult

__all__ = ["follow", "summarise", "write_json"]

_TEXT_SHOWN = 3000


def follow(results: Iterable[TestResult], total: int, quiet: bool) -> list[TestResult]:
    """Print each result as it comes; return all."""
    done = []
    for result in results:
        done.append(result)
        _show(result, len(done), total, quiet)
    return done


def _show(result: TestResult, done: int, total: int, quiet: bool) -> None:
    print(f"{done:3}/{total} {result.status:9} {result.seconds:5.1f} s  {result.name}", flush=True)
    if result.status in ("passed", "not run"):
        return
    if quiet:
        print(f"      rank {result.rank}: {result.last_line[:300]}", flush=True)
    else:
        text = result.text[-_TEXT_SHOWN:].rstrip().replace("\n", "\n    ")
        print(f"    rank {result.rank}:\n    {text}", flush=True)


def summarise(
    what: str, results: Sequence[TestResult], excepted: Mapping[str, str], seconds: float
) -> list[TestResult]:
    """Print counts and what is missed; return the latter: not passed, and no exception."""
    counts = Counter(result.status for result in results)
    text = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    print(f"\n{what}: {text}; {seconds:.0f} s")
    missed = [r for r in results if r.status != "passed" and r.name not in excepted]
    for result in results:
        if result.name in excepted:
            print(f"  excepted, {result.status}: {result.name} ({excepted[result.name]})")
    for result in missed:
        print(f"  {result.status}: {result.name}")
    return missed


def write_json(path: Path, results: Sequence[TestResult]) -> None:
    """A list of objects with the fields of `TestResult`."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
