"""Step time of every way to synchronise gradients, measured side by side.

    python -m bench.step --models small,wide --ranks 2 --rounds 15 --json out/step.json

Weights are checked against default DDP's before anything is timed. A step is zero_grad, forward
and backward; --optimizer adds an optimizer's step. Compare two results with bench.compare.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import cli
from bench.harness import Settings, Timing, measure
from bench.launch import Group, launch
from bench.machine import command_line, describe, environment
from bench.models import WORKLOADS, Workload
from bench.tables import timing_table
from bench.training import OPTIMIZERS
from bench.wrappers import BASELINE, FLOOR, VARIANTS, select

SCHEMA = 1


def document(group: Group, settings: Settings, skipped: dict[str, str]) -> dict[str, Any]:
    """A result without measurements yet, ready for JSON."""
    return {
        "schema": SCHEMA,
        "command": command_line(),
        "environment": environment(group),
        "settings": asdict(settings),
        "skipped": skipped,
        "models": {},
    }


def model_record(workload: Workload, timings: list[Timing]) -> dict[str, Any]:
    """One model's part of the result; times in seconds."""
    parameters = list(workload.build().parameters())
    return {
        "tensors": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "variants": {timing.variant: asdict(timing) for timing in timings},
    }


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(args: argparse.Namespace, group: Group) -> int:
    settings = Settings(
        args.rounds, args.steps, args.warmup, args.check_steps, args.baseline, args.optimizer
    )
    names = cli.models(args.models)
    selection = select(args.wrappers, required=(FLOOR, args.baseline))
    result = document(group, settings, selection.skipped)
    if group.is_main:
        print(describe(result["environment"]))
        for name, reason in selection.skipped.items():
            print(f"skipped {name}: {reason}")
    for name in names:
        workload = WORKLOADS[name]()
        timings = measure(workload, selection.variants, group, settings)
        record = result["models"][name] = model_record(workload, timings)
        if group.is_main:
            megabytes = record["gradient_bytes"] / 1e6
            print(f"\n{name}: {record['tensors']} tensors, {megabytes:.1f} MB of gradients")
            print(timing_table(timings, settings.baseline, args.markdown), flush=True)
            if args.json:
                write(result, args.json)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_arguments(parser, models="small,transformer,wide,conv")
    add = parser.add_argument
    defaults = Settings()
    add("--rounds", type=int, default=defaults.rounds, help="bursts of each variant")
    add("--steps", type=int, default=defaults.steps, help="timed steps in a burst")
    add("--warmup", type=int, default=defaults.warmup, help="steps before the first round")
    add("--check-steps", type=int, default=defaults.check_steps, help="0: no correctness check")
    add("--baseline", default=BASELINE, choices=tuple(VARIANTS), help="what ratios refer to")
    add("--optimizer", choices=tuple(OPTIMIZERS), help="time this optimizer's step as well")
    add("--json", type=Path, help="write the result to this file, after every model")
    args = parser.parse_args()
    return cli.guarded(lambda: launch(lambda group: run(args, group), args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
