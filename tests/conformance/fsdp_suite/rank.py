"""One rank of one test: what runs in a forked process."""

from __future__ import annotations

import time
import unittest
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal import common_utils

from tests.conformance.fsdp_suite.load import Case
from tests.conformance.fsdp_suite.stand_ins import MOST_RANKS, RankTest, device_module, meet
from tests.conformance.fsdp_suite.wrappers import Suite
from tests.conformance.torch_suite.rank import RankResult, finish, outcome_of, prepare

__all__ = ["run_rank"]


def run_rank(suite: Suite, case: Case, rank: int, folder: Path) -> None:
    """Run a test as `rank`; the result goes to a file in `folder`."""
    prepare(rank, folder)
    device_module.count = case.ranks
    cls = type(case.cls.__name__, (case.cls,), {"world_size": case.ranks})
    test = cls(case.method)
    test.file_name = str(folder / "store")
    meet(test, rank, case.ranks)
    dist.barrier()
    outcome, text = outcome_of(lambda: _run(test, case))
    finish(RankResult(outcome, text, suite.built, time.time()), rank, folder)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _run(test: RankTest, case: Case) -> None:
    if case.asks > MOST_RANKS:
        raise unittest.SkipTest(f"asks for {case.asks} devices")
    common_utils.set_rng_seed()
    test.perThreadSetUp()
    test.setUp()
    getattr(test, case.method)()
    test.tearDown()
