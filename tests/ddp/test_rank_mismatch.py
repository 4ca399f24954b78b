"""Statements of ranks, and the difference that is named."""

import pytest
import torch
import torch.distributed as dist

from fastsync import RankMismatchError
from fastsync.faults.consensus import Statement, agree, find_difference
from tests.helpers.teams import run_ranks

WEIGHT = ("w", (2, 3), "torch.float32", True)
BIAS = ("b", (3,), "torch.float32", True)
BASE = Statement({"wire": "fp32"}, [WEIGHT, BIAS])

DIFFERENT = {
    "setting": (Statement({"wire": "bf16"}, BASE.params), "wire is bf16 there but fp32 on rank 0"),
    "setting missing": (Statement({}, BASE.params), "wire is None there but fp32"),
    "setting more": (Statement({"wire": "fp32", "x": "1"}, BASE.params), "x is 1 there but None"),
    "name": (Statement(BASE.settings, [("v", *WEIGHT[1:]), BIAS]), "parameter 0 ('w') has name"),
    "shape": (
        Statement(BASE.settings, [WEIGHT, ("b", (4,), *BIAS[2:])]),
        "parameter 1 ('b') has shape (4,) there but (3,) on rank 0",
    ),
    "frozen": (Statement(BASE.settings, [WEIGHT, (*BIAS[:3], False)]), "requires_grad False there"),
    "fewer": (Statement(BASE.settings, [WEIGHT]), "'b' exists only on rank 0"),
    "more": (Statement(BASE.settings, [WEIGHT, BIAS, ("c", *BIAS[1:])]), "'c' exists only there"),
}


@pytest.mark.parametrize("label", DIFFERENT)
def test_differences_are_named(label):
    other, text = DIFFERENT[label]
    assert text in find_difference(BASE, other)
    assert other.digest() != BASE.digest()


def test_equal_statements():
    same = Statement(dict(BASE.settings), list(BASE.params))
    assert find_difference(BASE, same) == ""
    assert BASE.digest() == same.digest()
    assert len(BASE.digest()) == 32
    assert Statement(BASE.settings, BASE.params, "no").digest() != BASE.digest()


def agree_on(rank, world, label):
    mine = BASE
    if rank == 1:
        mine = Statement(BASE.settings, [], "out of coffee") if label == "error" else BASE
        mine = DIFFERENT[label][0] if label in DIFFERENT else mine
    try:
        agree(mine, dist.group.WORLD, torch.device("cpu"))
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.slow(but=("more",))
@pytest.mark.parametrize("label", ["same", "shape", "more", "error"])
def test_all_ranks_hear_the_same(label):
    texts = run_ranks(agree_on, 3, label)
    assert texts == [texts[0]] * 3
    if label == "same":
        assert texts[0] == ""
    elif label == "error":
        assert "rank 1: out of coffee" in texts[0]
    else:
        assert texts[0].startswith("rank 1 differs from rank 0: ")
        assert DIFFERENT[label][1] in texts[0]
