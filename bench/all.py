"""All benchmarks, one after the other, into bench/results; then the documents are renewed.

    python -m bench.all                      # a good half hour on two cores
    python -m bench.all --only links,overlap
    python -m bench.all --list

Leave the machine alone meanwhile. What needs shaped links is left out, and said to be, where they
cannot be made. Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import netns
from bench.choice import choose
from bench.errors import UsageError
from bench.launch import INTERRUPTED
from bench.report import RESULTS, ROOT

USAGE = 2


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: of the result.
        module: of `bench`, where it is not of that name.
        arguments: its settings.
        seconds: about what it takes on two idle cores.
        on_links: it needs shaped links.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    on_links: bool = False
    module: str = ""

    def command(self, folder: Path) -> list[str]:
        """What a user would type."""
        result = ("--json", str(folder / f"{self.name}.json"))
        return [sys.executable, "-m", f"bench.{self.module or self.name}", *self.arguments, *result]


REAL_MODELS = "resnet50,gpt2,vit,lstm,dlrm"
CLASSIC_MODELS = "small,transformer,wide,conv"

PARTS = (
    Part("ops", (), 15),
    Part("memory", ("--models", "transformer,wide"), 40),
    Part("parity", ("--steps", "50", "--models", CLASSIC_MODELS), 150),
    Part("accuracy", (), 20),
    Part("curves", (), 260),
    Part("unused", (), 110),
    Part("timeline", (), 140),
    Part("kernels", (), 240),
    Part("scale", (), 50),
    Part("collectives", (), 45),
    Part("step", ("--models", CLASSIC_MODELS, "--rounds", "9", "--seconds", "45"), 240),
    # Batches this small make ResNet-50's normalisation amplify any rounding from step to step.
    Part(
        "step-real",
        ("--models", REAL_MODELS, "--seconds", "10", "--check-steps", "1"),
        140,
        module="step",
    ),
    Part("buckets", ("--seconds", "30"), 90),
    Part("links", ("--seconds", "30"), 210, True),
    Part("links-slow", ("--links", "100mbit", "--seconds", "60"), 90, True, "links"),
    Part("links-four", ("--links", "1gbit", "--ranks", "4", "--seconds", "60"), 170, True, "links"),
    Part("overlap", ("--links", "1gbit,10gbit,loopback", "--seconds", "16"), 540, True),
)


def chosen(only: str, skip: str) -> list[Part]:
    """The parts to run, in the order of PARTS.

    Raises:
        UsageError: a name is unknown, or nothing is left.
    """
    names = choose("part", [part.name for part in PARTS], only, skip)
    return [part for part in PARTS if part.name in names]


def run(parts: Sequence[Part], folder: Path) -> list[str]:
    """Runs the parts; returns the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    started = time.monotonic()
    for number, part in enumerate(parts):
        left = sum(p.seconds for p in parts[number:]) / 60
        spent = (time.monotonic() - started) / 60
        print(
            f"\n=== {part.name} ({number + 1} of {len(parts)}), about {part.seconds:.0f} s; "
            f"{spent:.0f} min spent, about {left:.0f} left ===",
            flush=True,
        )
        if subprocess.run(part.command(folder), cwd=ROOT, check=False).returncode:
            print(f"{part.name} failed", file=sys.stderr)
            failed.append(part.name)
    return failed


def _start(args: argparse.Namespace) -> int:
    parts = chosen(args.only, args.skip)
    if args.list:
        for part in parts:
            command = " ".join([f"bench.{part.module or part.name}", *part.arguments])
            print(f"{part.name:12} {part.seconds:5.0f} s  {command}")
        return 0
    reason = netns.missing_rights() if any(part.on_links for part in parts) else None
    if reason:
        left_out = [part.name for part in parts if part.on_links]
        print(f"left out: {', '.join(left_out)}, as no link can be shaped: {reason}")
        parts = [part for part in parts if not part.on_links]
    # Not straight into bench/results: a changed checkout would be part of every later result.
    folder = ROOT / "out" / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        failed = run(parts, folder)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        _keep(folder, args.results)
    if args.results == RESULTS:
        subprocess.run([sys.executable, "-m", "bench.report"], cwd=ROOT, check=True)
    return 1 if failed else 0


def _keep(folder: Path, results: Path) -> None:
    results.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        shutil.copy(path, results / path.name)
        print(f"wrote {path.name}")


def main() -> int:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="all", help=f"of {names} (default: all)")
    add("--skip", default="", help="leave these out")
    add("--list", action="store_true", help="only say what would run")
    add("--results", type=Path, default=RESULTS, help="folder (default: bench/results)")
    args = parser.parse_args()
    try:
        return _start(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    raise SystemExit(main())
