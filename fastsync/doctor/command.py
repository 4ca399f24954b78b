"""Checks a cluster before it trains.

    python -m fastsync.doctor                                   # this process alone
    torchrun --nproc-per-node 8 -m fastsync.doctor              # the ranks that will train
    torchrun --nproc-per-node 8 -m fastsync.doctor --drill kill

Start it as the training will be started: with its launcher, its variables, on its machines. Rank 0
prints versions, addresses, all-reduce times, rates of pairs and computing speed, and a
verdict with one line per finding: OK, WARN or FAIL. The exit status is 1 if anything failed.

A drill measures nothing. It trains a small model in processes of its own, one for each rank (three
where there is no launcher), of which one is killed, stopped, raises an exception, or calls
os._exit(). The others pass if their errors name it and say what became of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastsync._build.env import Env, has_rank
from fastsync.doctor.drill import FAULTS
from fastsync.doctor.examine import Asked, Team, examine, examine_alone
from fastsync.doctor.report import Report, report_json, report_text

__all__ = ["main"]

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=_positive, default=20.0, help="for measuring, about (default: 20)")
    add("--backend", choices=("nccl", "gloo"), help="default: nccl where torch finds a GPU")
    add("--drill", choices=tuple(FAULTS), help="what becomes of a rank")
    add("--rank", type=int, help="of the drill's fault (default: the last)")
    add("--timeout", type=_positive, default=60.0, help="seconds to wait for ranks (default: 60)")
    add("--json", type=Path, metavar="FILE", help="everything, for programs; rank 0 writes it")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _asked(args: argparse.Namespace) -> Asked:
    on_gpu = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    backend = args.backend or ("nccl" if on_gpu else "gloo")
    return Asked(backend, args.seconds, args.timeout, args.drill or "", args.rank)


def _show(report: Report, path: Path | None) -> int:
    print(report_text(report), flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report_json(report), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}", flush=True)
    return 0 if report.passed else _FAILED


def _among_ranks(asked: Asked, path: Path | None) -> int:
    team = Team.meet(asked.timeout)
    report = examine(team, asked)
    code = 0 if report is None else _shown(report, path)
    code = int(team.tell("exit status", str(code)))
    team.part()
    return code


def _shown(report: Report, path: Path | None) -> int:
    """Show it; the other ranks wait for that, whatever goes wrong."""
    try:
        code = _show(report, path)
    except OSError as error:
        print(f"fastsync doctor: FAIL: {error}", file=sys.stderr)
        code = _FAILED
    if code:
        print(f"exit status {code}: the launcher will call that a failure of ranks", flush=True)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args, rank = _parser().parse_args(arguments), Env.read().rank
    logging.getLogger("fastsync").setLevel(logging.WARNING)
    try:
        asked = _asked(args)
        if has_rank():
            return _among_ranks(asked, args.json)
        return _show(examine_alone(asked), args.json)
    except KeyboardInterrupt:
        if rank == 0:
            print("fastsync doctor: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:
        # What makes no sense does so on all ranks; what goes wrong looks different from each.
        if rank == 0 or not isinstance(error, ValueError):
            print(f"fastsync doctor: FAIL on rank {rank}: {error}", file=sys.stderr)
        return _FAILED
