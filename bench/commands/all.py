"""All benchmarks, one after the other, into bench/results; then the documents are renewed.

    python -m bench all                      # a good hour on two cores
    python -m bench all --only links,overlap
    python -m bench all --list

Leave the machine alone meanwhile. What needs shaped links is left out, and said to be, where they
cannot be made. Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measure import netns
from bench.measure.benchmark import choose
from bench.report import documents
from bench.report.documents import RESULTS, ROOT
from examples.common.machine import COMMIT_VARIABLE, commit
from examples.common.ranks import FAILED, INTERRUPTED, Parser, argument


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: of the result.
        seconds: about what it takes on two idle cores.
        typed: the command and its settings.
        on_links: it needs shaped links.
    """

    name: str
    seconds: float
    typed: str
    on_links: bool = False


MODELS = "--models small,transformer,wide,conv"
WAYS = "--wrappers ddp_view,ddp_batched,ddp_static_view,fastsync,fastsync_group,fastsync_int8"
SHARED = "--models gpt2,wide --check-steps 2"
NODES = f"{WAYS},fastsync_nodes,fastsync_nodes_group,fastsync_nodes_int8 --per-node 2"
ROUNDS = (
    "DiLoCo(30) calm,DiLoCo(64) calm,DiLoCo(32) calm int4,DiLoCo(32) calm int4 streamed,"
    "SparseLoCo(32)"
)

_EVERY = (
    Part("ops", 15, "ops"),
    Part("memory", 40, "memory --models transformer,wide"),
    Part("charged", 90, "charged"),
    Part("allreduce", 20, "allreduce"),
    Part("parity", 150, f"parity --steps 50 {MODELS}"),
    Part("accuracy", 20, "accuracy"),
    Part("curves", 260, "curves"),
    Part("modes", 600, "modes --tasks gpt --steps 512 --pretrain 1024"),
    Part("modes-gpt-1024", 800, f"modes --tasks gpt --steps 1024 --modes '{ROUNDS}'"),
    Part("modes-conv-1024", 1000, f"modes --tasks conv --steps 1024 --modes '{ROUNDS}'"),
    Part("kernels", 170, "kernels --rounds 7"),
    Part("scale", 50, "scale"),
    Part("step", 200, f"step {MODELS} --wrappers all,fastsync_group --rounds 9 --seconds 30"),
    # Batches this small make normalisation amplify any rounding from step to step.
    Part("step-four", 180, f"step --ranks 4 {MODELS} {WAYS} --seconds 20 --check-steps 1"),
    Part("step-real", 140, "step --models resnet50,gpt2 --seconds 10 --check-steps 1"),
    Part("buckets", 90, "buckets --seconds 30"),
    Part("zero", 150, f"zero {SHARED} --seconds 15"),
    Part("zero-1gbit", 170, f"zero {SHARED} --link 1gbit --steps 2 --seconds 20", True),
    Part("zero3", 70, "zero --stages 3 --models gpt2 --check-steps 2 --seconds 20"),
    Part("zero3-1gbit", 80, "zero --stages 3 --models gpt2 --link 1gbit --seconds 30", True),
    Part("shares", 170, "shares --models paced --scale 0.04 --steps 4 --warmup 9 --seconds 110"),
    Part("links", 170, "links --seconds 20", True),
    Part("links-slow", 90, "links --links 100mbit --seconds 60", True),
    Part("links-four", 170, "links --links 1gbit --ranks 4 --seconds 60", True),
    Part("links-nodes", 60, f"links --links 1gbit --ranks 4 {NODES} --seconds 30", True),
    Part("sync", 750, "sync --rounds 6", True),
    Part("overlap", 226, "overlap --links 1gbit,10gbit,loopback --seconds 10", True),
)
PARTS = {part.name: part for part in _EVERY}


def run(parts: Sequence[Part]) -> int:
    """Run the parts, then renew the documents; return an exit code."""
    # That of the start: the results themselves change the checkout.
    os.environ[COMMIT_VARIABLE] = commit() or ""
    failed = []
    for number, part in enumerate(parts):
        left = sum(p.seconds for p in parts[number:]) / 60
        place = f"{number + 1} of {len(parts)}; about {left:.0f} minutes left"
        print(f"\n=== {part.name} ({place}) ===", flush=True)
        command = [sys.executable, "-m", "bench", *shlex.split(part.typed)]
        result = ("--json", str(RESULTS / f"{part.name}.json"))
        if subprocess.run([*command, *result], cwd=ROOT, check=False).returncode:
            print(f"{part.name} failed", file=sys.stderr)
            failed.append(part.name)
    return documents.main([]) or (FAILED if failed else 0)


def possible(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts that this machine can run, and print those that it cannot."""
    reason = netns.missing_rights() if any(part.on_links for part in parts) else None
    if not reason:
        return parts
    left_out = ", ".join(part.name for part in parts if part.on_links)
    print(f"left out: {left_out}, as no link can be shaped: {reason}")
    return [part for part in parts if not part.on_links]


def _start(args: argparse.Namespace) -> int:
    parts = choose("part", PARTS, args.only, args.skip)
    if args.list:
        for part in parts:
            print(f"{part.name:12} {part.seconds:5.0f} s  bench {part.typed}")
        return 0
    try:
        return run(possible(parts))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "bench all",
        __doc__,
        argument("--only", f"of {', '.join(PARTS)}, in this order", "all"),
        argument("--skip", "leave these out", ""),
        argument("--list", "only say what would run", action="store_true"),
    )
    return parser.run(_start, argv)
