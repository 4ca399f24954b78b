"""Step time of every way to synchronise gradients, measured side by side.

    python -m bench.step --models small,gpt2 --ranks 2,4 --rounds 15 --json out/step.json

Weights are checked against default DDP's before anything is timed. A step is zero_grad, forward
and backward; --optimizer adds an optimizer's step. Compare two results with bench.compare.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import cli, jobs
from bench.harness import Settings, Timing, measure
from bench.launch import Group
from bench.machine import command_line, describe, environment
from bench.models import Workload
from bench.record import write_json
from bench.tables import timing_table
from bench.training import OPTIMIZERS
from bench.wrappers import BASELINE, FLOOR, VARIANTS, Variant, select

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


def merged(parts: list[jobs.Part]) -> dict[str, Any]:
    """One result of several; where there are some, a model's name carries the number of ranks."""
    if len(parts) == 1:
        return parts[0]
    ranks = [part["environment"]["ranks"] for part in parts]
    models = {
        f"{name}, {world} ranks": record
        for part, world in zip(parts, ranks, strict=True)
        for name, record in part["models"].items()
    }
    facts = parts[0]["environment"] | {"ranks": " and ".join(map(str, ranks))}
    return parts[0] | {"environment": facts, "models": models}


def model_record(workload: Workload, timings: list[Timing]) -> dict[str, Any]:
    """One model's part of the result; times in seconds."""
    parameters = list(workload.build().parameters())
    return {
        "tensors": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "variants": {timing.variant: asdict(timing) for timing in timings},
    }


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        rounds=args.rounds,
        steps=args.steps,
        warmup=args.warmup,
        check_steps=args.check_steps,
        baseline=args.baseline,
        optimizer=args.optimizer,
        seconds=args.seconds,
    )


def _fitting(variants: tuple[Variant, ...], workload: Workload) -> tuple[Variant, ...]:
    return tuple(v for v in variants if v.takes_sparse or not workload.sparse)


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does: all models, one after the other."""
    selection = select(args.wrappers, required=(FLOOR, args.baseline))
    result = document(group, _settings(args), selection.skipped)
    if group.is_main:
        print(describe(result["environment"]))
        for name, reason in selection.skipped.items():
            print(f"skipped {name}: {reason}")
    for name in cli.models(args.models):
        workload = cli.workload(name, args)
        variants = _fitting(selection.variants, workload)
        timings = measure(workload, variants, group, _settings(args))
        record = result["models"][name] = model_record(workload, timings)
        if group.is_main:
            megabytes = record["gradient_bytes"] / 1e6
            print(f"\n{name}: {record['tensors']} tensors, {megabytes:.1f} MB of gradients")
            print(timing_table(timings, args.baseline, args.markdown), flush=True)
            report(result)
    return 0


def _start(args: argparse.Namespace) -> int:
    def finish(parts: list[jobs.Part]) -> None:
        if args.json:
            write_json(merged(parts), args.json)

    worlds = jobs.worlds(args.ranks)
    todo = [jobs.Job(world, over_sockets=args.sockets) for world in worlds]
    return jobs.run_jobs(lambda *context: run(args, *context), todo, args.threads, finish)


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_arguments(parser, models="small,transformer,wide,conv", several_worlds=True)
    cli.add_sockets_argument(parser)
    add = parser.add_argument
    defaults = Settings()
    add("--rounds", type=int, default=defaults.rounds, help="bursts of each variant")
    add("--steps", type=int, default=defaults.steps, help="timed steps in a burst")
    add("--warmup", type=int, default=defaults.warmup, help="steps before the first round")
    add("--check-steps", type=int, default=defaults.check_steps, help="0: no correctness check")
    add("--baseline", default=BASELINE, choices=tuple(VARIANTS), help="what ratios refer to")
    add("--optimizer", choices=tuple(OPTIMIZERS), help="time this optimizer's step as well")
    add("--seconds", type=float, help="fewer rounds where a model would take longer than this")
    add("--json", type=Path, help="write the result to this file")
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: _start(args))


if __name__ == "__main__":
    raise SystemExit(main())
