"""Checks a cluster before it trains.

    python -m fastsync.doctor                                   # this process alone
    torchrun --nproc-per-node 8 -m fastsync.doctor              # the ranks that will train
    torchrun --nproc-per-node 8 -m fastsync.doctor --drill kill

Start it as the training will be started: with its launcher, its variables, on its machines. Rank 0
prints versions, addresses, the rate of an all-reduce and of pairs, and a verdict with one line per
finding: OK, WARN or FAIL. The exit status is 1 if anything failed.

A drill measures nothing. It trains a small model in processes of its own, one for each rank, of
which the last is killed, stopped, raises an exception, or calls os._exit(). The others pass if
their errors name it and say what became of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import torch

from fastsync._build.env import Env, has_rank
from fastsync._torch import HashStore
from fastsync.doctor.drill import FAULTS
from fastsync.doctor.examine import Team, examine
from fastsync.doctor.report import report_text

_FAILED, _INTERRUPTED = 1, 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=_positive, default=20.0, help="for measuring, about (default: 20)")
    add("--backend", choices=("nccl", "gloo"), help="default: nccl where torch finds a GPU")
    add("--drill", choices=tuple(FAULTS), default="", help="what becomes of the last rank")
    add("--timeout", type=_positive, default=60.0, help="seconds to wait for ranks (default: 60)")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _examine_ranks(team: Team, backend: str, seconds: float, drill: str) -> int:
    """Print rank 0's report; return the exit status, on every rank."""
    report, code = examine(team, backend, seconds, drill), 0
    if report is not None:
        print(report_text(report), flush=True)
        code = 0 if report.passed else _FAILED
        if code and team.world > 1:
            print(f"exit status {code}: the launcher will call that a failure of ranks", flush=True)
    code = int(team.tell("exit status", str(code)))
    team.part()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args, rank = _parser().parse_args(arguments), Env.read().rank
    logging.getLogger("fastsync").setLevel(logging.WARNING)
    try:
        on_gpu = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        backend = args.backend or ("nccl" if on_gpu else "gloo")
        alone = None if has_rank() else Team(HashStore(), 0, 1, args.timeout)
        team = alone or Team.meet(args.timeout)
        return _examine_ranks(team, backend, args.seconds, args.drill)
    except KeyboardInterrupt:
        if rank == 0:
            print("fastsync doctor: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:
        # What makes no sense does so on all ranks; what goes wrong looks different from each.
        if rank == 0 or not isinstance(error, ValueError):
            print(f"fastsync doctor: FAIL on rank {rank}: {error}", file=sys.stderr)
        return _FAILED
