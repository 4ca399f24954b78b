"""Local SGD of other libraries, as the benchmark of sync modes has it beside ours.

Needs accelerate and torchft; what needs one is skipped where it is missing.
"""

import os
import sys
from contextlib import ExitStack

import pytest
import torch

from bench.measure.peers import peers
from bench.models.paced import paced
from examples.common.ranks import Group
from examples.common.training import make_lanes
from examples.common.variants import Variant, fast_ddp
from fastsync import DiLoCo, LocalSGD
from fastsync.testing import run_ranks

EVERY = 4
OURS = {"LocalSGD": LocalSGD(EVERY), "DiLoCo": DiLoCo(EVERY)}


def train_beside(rank, world, library, mode):
    """Return whether ranks have the same weights before and after two rounds, and how far those of
    a library are from ours."""
    os.environ.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    group = Group(rank, world, torch.device("cpu"))
    attach = peers(EVERY, 0, ", streamed")[0][f"{library}.{mode}({EVERY})"]
    wraps = {"theirs": lambda module, device: module, "ours": fast_ddp(sync=OURS[mode])}
    lanes = make_lanes(paced(0.001, 0.0), [Variant(*way) for way in wraps.items()], group, "sgd")
    with ExitStack() as opened:
        attach(lanes["theirs"], group, opened)
        start = lanes["theirs"].weights()
        for lane in lanes.values():
            lane.steps(2 * EVERY - 1)
        before = group.alike(lanes["theirs"].weights())
        for lane in lanes.values():
            lane.step()
        ours, theirs = lanes["ours"].weights(), lanes["theirs"].weights()
        after = group.alike(theirs)
    return before, after, float((ours - theirs).norm() / (ours - start).norm())


@pytest.mark.parametrize(
    "library, mode", [("accelerate", "LocalSGD"), ("torchft", "LocalSGD"), ("torchft", "DiLoCo")]
)
def test_another_library_averages_as_we_do(library, mode):
    pytest.importorskip(f"{library}.local_sgd")
    for before, after, distance in run_ranks(train_beside, 2, library, mode, timeout=300):
        assert not before and after and distance < 1e-4


def test_missing_libraries_are_named_in_a_line_each(monkeypatch):
    for name in ("accelerate", "torchft"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}.local_sgd", None)
    found, missing = peers(EVERY, 0, ", streamed")
    assert not found and len(missing) == 2
    for name, line in zip(("accelerate", "torchft"), missing, strict=True):
        assert line.startswith(f"left out {name}: ") and line.endswith(f"pip install {name}")
