"""One rank of one test: what runs in a forked process."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

from tests.conformance.torch_suite.load import Tests

__all__ = ["RankResult", "finish", "outcome_of", "prepare", "run_rank"]

_DEFAULT_TIMEOUT = 60


@dataclass(frozen=True)
class RankResult:
    """How a test ended on one rank.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        text: the traceback, or why it was skipped.
        built: how often the class under test was built.
        when: time of the end, to tell which rank failed first.
    """

    outcome: str
    text: str
    built: int
    when: float


def run_rank(tests: Tests, name: str, rank: int, folder: Path) -> None:
    """Run test `name` as `rank`; the result goes to a file in `folder`.

    The folder belongs to this test alone; the ranks meet there.
    """
    prepare(rank, folder)
    case = tests.case(name)
    case.rank = rank
    case.file_name = str(folder / "store")
    dist.init_process_group(
        init_method=case.init_method,
        backend=os.environ["BACKEND"],
        world_size=int(case.world_size),
        rank=rank,
        timeout=timedelta(seconds=tests.timeouts.get(name, _DEFAULT_TIMEOUT)),
    )
    case._barrier()
    outcome, text = outcome_of(getattr(case, name))
    finish(RankResult(outcome, text, tests.suite.built, time.time()), rank, folder)
    case._barrier(timeout=30)
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare(rank: int, folder: Path) -> None:
    """Prepare a forked process before it is a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    _redirect(folder / f"output-{rank}")
    os.environ.update(TEMP_DIR=str(folder), MASTER_ADDR="127.0.0.1", RANK=str(rank))
    tempfile.tempdir = str(folder)  # some tests write files of fixed names
    torch.set_num_threads(1)


def finish(result: RankResult, rank: int, folder: Path) -> None:
    """Leave the result for the parent; end the process where the test failed."""
    (folder / f"result-{rank}").write_text(json.dumps(asdict(result)))
    if result.outcome == "failed":
        os._exit(1)  # the others may wait in a collective; they are ended


def _redirect(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)


def outcome_of(test: Callable[[], object]) -> tuple[str, str]:
    """Run `test`: "passed", "failed" or "skipped", and the traceback or the reason."""
    skips = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    common_utils.set_rng_seed()
    try:
        test()
    except unittest.SkipTest as reason:
        return "skipped", str(reason)
    except SystemExit as end:
        if isinstance(end.code, int) and end.code in skips:
            return "skipped", skips[end.code]
        return "failed", traceback.format_exc()
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""
