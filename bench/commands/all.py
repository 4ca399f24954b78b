"""All benchmarks, one after the other, into bench/results; then the documents are renewed.

    python -m bench all                      # a good half hour on two cores
    python -m bench all --only links,overlap
    python -m bench all --list

Leave the machine alone meanwhile. What needs shaped links is left out, and said to be, where they
cannot be made. Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measure import netns
from bench.measure.benchmark import choose
from bench.report.documents import RESULTS, ROOT
from examples.common.machine import COMMIT_VARIABLE, commit
from examples.common.ranks import FAILED, INTERRUPTED, Parser, argument, guarded


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: of the result, and of the command where `arguments` do not begin with another.
        seconds: about what it takes on two idle cores.
        arguments: its settings, as typed.
        on_links: it needs shaped links.
    """

    name: str
    seconds: float
    arguments: str = ""
    on_links: bool = False

    @property
    def typed(self) -> list[str]:
        """The command and its settings."""
        settings = self.arguments.split()
        named = settings and not settings[0].startswith("--")
        return settings if named else [self.name, *settings]


REAL_MODELS = "resnet50,gpt2"
CLASSIC_MODELS = "small,transformer,wide,conv"

PARTS = (
    Part("ops", 15),
    Part("memory", 40, "--models transformer,wide"),
    Part("parity", 150, f"--steps 50 --models {CLASSIC_MODELS}"),
    Part("accuracy", 20),
    Part("curves", 260),
    Part("unused", 110),
    Part("hooks", 80),
    Part("freezing", 60),
    Part("timeline", 140),
    Part("kernels", 240),
    Part("scale", 50),
    Part("step", 240, f"--models {CLASSIC_MODELS} --rounds 9 --seconds 45"),
    # Batches this small make ResNet-50's normalisation amplify any rounding from step to step.
    Part("step-real", 140, f"step --models {REAL_MODELS} --seconds 10 --check-steps 1"),
    Part("buckets", 90, "--seconds 30"),
    Part("zero", 190, "--seconds 20"),
    Part("links", 210, "--seconds 30", True),
    Part("links-slow", 90, "links --links 100mbit --seconds 60", True),
    Part("links-four", 170, "links --links 1gbit --ranks 4 --seconds 60", True),
    Part("overlap", 280, "--links 1gbit,10gbit,loopback --seconds 16", True),
)


def run(parts: Sequence[Part]) -> int:
    """Runs the parts, then renews the documents; returns an exit code."""
    # That of the start: the results themselves change the checkout.
    os.environ[COMMIT_VARIABLE] = commit() or ""
    failed = []
    for number, part in enumerate(parts):
        left = sum(p.seconds for p in parts[number:]) / 60
        place = f"{number + 1} of {len(parts)}; about {left:.0f} minutes left"
        print(f"\n=== {part.name} ({place}) ===", flush=True)
        command = [sys.executable, "-m", "bench", *part.typed]
        result = ("--json", str(RESULTS / f"{part.name}.json"))
        if subprocess.run([*command, *result], cwd=ROOT, check=False).returncode:
            print(f"{part.name} failed", file=sys.stderr)
            failed.append(part.name)
    subprocess.run([sys.executable, "-m", "bench", "report"], cwd=ROOT, check=True)
    return FAILED if failed else 0


def _run_possible(parts: list[Part]) -> int:
    reason = netns.missing_rights() if any(part.on_links for part in parts) else None
    if reason:
        left_out = [part.name for part in parts if part.on_links]
        print(f"left out: {', '.join(left_out)}, as no link can be shaped: {reason}")
        parts = [part for part in parts if not part.on_links]
    try:
        return run(parts)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> Parser:
    """The command line."""
    return Parser(
        "bench all",
        __doc__,
        argument("--only", f"of {', '.join(part.name for part in PARTS)}", "all"),
        argument("--skip", "leave these out", ""),
        argument("--list", "only say what would run", action="store_true"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    def start() -> int:
        args = parser().parse_args(argv)
        wanted = choose("part", [part.name for part in PARTS], args.only, args.skip)
        parts = [part for part in PARTS if part.name in wanted]
        if not args.list:
            return _run_possible(parts)
        for part in parts:
            print(f"{part.name:12} {part.seconds:5.0f} s  bench {' '.join(part.typed)}")
        return 0

    return guarded(start)
