"""A rank that dies or is late within a round is named, and no fragment is merged in part."""

import json
import os
import signal

import pytest
import torch

from fastsync import Delayed, DiLoCo, FastDDP, LocalSGD, SyncFault
from fastsync.sync.exchange import Exchange
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


def sender_killed(rank, world, folder):
    """The victim dies when it is to give its part the second fragment."""
    model = FastDDP(net(), sync=DiLoCo(9, fragments=2, within=2))
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    step()
    before, spread, spreads = [p.detach().clone() for p in model.parameters()], Exchange.spread, []

    def dying(exchange, flat):
        spreads.append(flat)
        if rank == VICTIM and len(spreads) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return spread(exchange, flat)

    Exchange.spread = dying
    try:
        model.end_round()
    except SyncFault as fault:
        moved = [not torch.equal(*both) for both in zip(before, model.parameters(), strict=True)]
        found = {"ranks": list(fault.ranks), "text": str(fault), "moved": moved}
        (folder / f"{rank}.json").write_text(json.dumps(found))
        raise


def test_a_rank_whose_sender_dies_between_fragments_has_the_first_alone(tmp_path):
    with pytest.raises(RankError, match=f"rank {VICTIM}"):
        run_ranks(sender_killed, 4, tmp_path)
    found = json.loads((tmp_path / f"{VICTIM + 1}.json").read_text())
    assert found["ranks"] == [VICTIM] and "sync=" in found["text"]
    assert found["moved"] == [True] * 2 + [False] * 4


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
