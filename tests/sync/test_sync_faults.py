"""A rank that dies or is late within a round is named, and no fragment is merged in part."""

import json
import os
import signal

import pytest
import torch

from fastsync import Delayed, DiLoCo, FastDDP, LocalSGD, SyncFault
from fastsync.testing import RankError, run_ranks
from tests.faults.test_collective_waits import SLEEPER, said, sleep
from tests.sync.test_modes import loop, net
from tests.sync.test_rounds import values

VICTIM = 2
MODES = {
    "local": LocalSGD(4),
    "streaming": DiLoCo(4, fragments=2),
    "overlapped": DiLoCo(4, fragments=2, overlap=1, wire="int8"),
    "delayed": Delayed(1),
}


def killed(rank, world, mode, steps, folder):
    """The victim dies before its step number `steps`; what the others have is written to files."""
    model = FastDDP(net(), sync=mode)
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    merged = []  # after each step that ended well
    try:
        for number in range(12):
            if rank == VICTIM and number == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            step()
            merged.append(values(model))
    except SyncFault as fault:
        state = model.sync_state_dict()["rounds"]["optimizers"][0]
        outer = [part.tolist() for part in state["kept"].get("outer", {}).values()]
        found = {"ranks": list(fault.ranks), "text": str(fault), "outer": outer}
        (folder / f"{rank}.json").write_text(json.dumps({**found, "steps": len(merged)}))
        raise


@pytest.mark.slow(but=("overlapped",))
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_dies_within_a_round_is_named(mode, tmp_path):
    with pytest.raises(RankError, match=f"rank {VICTIM}"):
        run_ranks(killed, 3, MODES[mode], 6, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for found in (first, second):
        assert found["ranks"] == [VICTIM] and "sync=" in found["text"]
    assert first["steps"] == second["steps"]  # both have merged the same fragments
    assert first["outer"] == second["outer"]


def late(rank, world):
    model = FastDDP(net(), sync=LocalSGD(2))
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    step()
    sleep(rank)
    step()


@pytest.mark.slow
def test_a_late_rank_is_named(tmp_path):
    text = run_ranks(said, 2, late, str(tmp_path / "said"))[0]
    assert "(sync=)" in text and f"rank {SLEEPER} is late" in text, text
