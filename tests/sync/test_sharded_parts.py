"""Parts of ranks, within which `zero` spreads the optimizer's state: as without it, bit for bit."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from fastsync import Delayed, DiLoCo, FastDDP, LocalSGD, SyncFault, testing
from fastsync.zero.delivery import Delivery
from fastsync.zero.optimizer_state import held_state
from tests.helpers.teams import run_ranks
from tests.sync.test_modes import batch, net
from tests.sync.test_rounds import values

VICTIM = 3
WITHIN = {
    "local": LocalSGD(3, within=2, optimizer_state=True),
    "streaming": DiLoCo(4, fragments=2, overlap=1, wire="int4", within=2),
    "delayed": Delayed(2, within=2),
}


def flat(states):
    """All values by element of a state by parameter, in order."""
    found = [v for state in states for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    return torch.cat([value.flatten().float() for value in found])


def made(optimizer, params):
    """An optimizer of two parameter groups, the last of which is smaller than a shard."""
    *others, last = params
    settings = {"lr": 0.01} | ({"momentum": 0.9} if optimizer == "SGD" else {})
    return getattr(torch.optim, optimizer)([{"params": others}, {"params": [last]}], **settings)


def as_a_script(rank, mode, zero, optimizer, accumulates=False):
    """Train with clipping, a scaler and layers that thaw; end a round; save."""
    model = FastDDP(net(), sync=mode, zero=zero)
    for p in model.module[2].parameters():
        p.requires_grad_(False)
    inner = made(optimizer, model.parameters())
    scaler, rows = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for step in range(9):
        if step == 5:
            for p in model.module[2].parameters():
                p.requires_grad_(True)
        inner.zero_grad()
        if accumulates:
            with model.no_sync():
                scaler.scale(model(batch(rank, 100 + step)).square().mean()).backward()
        loss = model(batch(rank, step)).square().mean()
        # A step that is left out in one part, also the first one and the last of a round.
        overflows = (rank, step) in {(0, 0), (3, 2), (1, 6)}
        scaler.scale(loss * (float("inf") if overflows else 1)).backward()
        scaler.unscale_(inner)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(inner)
        scaler.update(4.0)
        if step == 6:
            model.end_round()
        rows.append(values(model))
    state = inner.state_dict()["state"] if rank in (0, 3) else None  # alone in its part
    dist.barrier()
    return rows, None if state is None else flat(state[i] for i in sorted(state))


def scripts(rank, world, mode, zero, optimizer, through):
    os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[through]
    # Stage 2 averages each micro-batch, which rounds otherwise.
    wanted, state = as_a_script(rank, mode, 0, optimizer, zero == 1)
    found, its = as_a_script(rank, mode, zero, optimizer, zero == 1)
    same = [torch.equal(*both) for both in zip(found, wanted, strict=True)]
    return same, state is None or torch.equal(its, state)


CASES = [
    ("local", 2, "NAdam", "memory"),
    ("streaming", 1, "AdamW", "group"),
    *(("streaming", 2, "Adafactor", "memory"), ("delayed", 2, "AdamW", "group")),
    *(("local", 1, "Adafactor", "group"), ("delayed", 1, "SGD", "memory")),
]


@pytest.mark.slow(but=("local-2-NAdam-memory",))
@pytest.mark.parametrize(("mode", "zero", "optimizer", "through"), CASES)
def test_a_script_trains_and_saves_as_without_zero(mode, zero, optimizer, through):
    for found in run_ranks(scripts, 4, WITHIN[mode], zero, optimizer, through):
        assert found == ([True] * 9, True)


def held(rank, world, zero):
    """Return the bytes of the optimizer's state on this rank, and norms of the gradient."""
    model = FastDDP(torch.nn.Linear(64, 256, bias=False), sync=LocalSGD(2, within=2), zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(4 * step + rank))
        with model.no_sync():
            model(x[0]).square().mean().backward()
        model(x[1]).square().mean().backward()
        norms.append(model.clip_grad_norm_(1e-3).item())
        optimizer.step()
    state = held_state(optimizer).values()
    nbytes = sum(v.nbytes for each in state for v in each.values() if v.dim())
    return nbytes, norms


@pytest.mark.slow("1")
@pytest.mark.parametrize("zero", [1, 2])
def test_each_rank_of_a_part_holds_half_the_state(zero):
    whole, shares = run_ranks(held, 4, 0), run_ranks(held, 4, zero)
    for (nbytes, norms), (share, its) in zip(whole, shares, strict=True):
        assert nbytes == 2 * 4 * 64 * 256 and 2 * share == nbytes
        assert its == pytest.approx(norms)


def in_given_groups(rank, world, zero):
    groups = [dist.new_group(ranks) for ranks in ([3, 0], [1, 2])]
    mode = DiLoCo(3, wire="int4", within=groups[rank in (1, 2)])
    return as_a_script(rank, mode, zero, "AdamW")[0][-1]


def test_a_part_is_a_group_that_is_given():
    wanted, found = run_ranks(in_given_groups, 4, 0), run_ranks(in_given_groups, 4, 2)
    assert all(map(torch.equal, wanted, found))
    assert torch.equal(found[0], found[3]) and not torch.equal(found[0], found[1])


def killed(rank, world, folder):
    """The victim dies when it is to send its part what it has updated."""
    model = FastDDP(net(), sync=LocalSGD(4, within=2), zero=1)
    optimizer, start = torch.optim.AdamW(model.parameters(), 0.01), Delivery.start

    def dying(*args):
        if rank == VICTIM and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(*args)

    Delivery.start = dying
    try:
        for step in range(8):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    except SyncFault as fault:
        (folder / str(rank)).write_text(str(list(fault.ranks)))
        raise


def test_a_rank_that_dies_in_its_part_is_named(tmp_path):
    with pytest.raises(testing.RankError, match=f"rank {VICTIM}"):
        testing.run_ranks(killed, 4, tmp_path)
    said = [(tmp_path / str(rank)).read_text() for rank in range(VICTIM)]
    assert said == [f"[{VICTIM}]"] * VICTIM


def a_part_is_ahead(rank, world):
    """The first part leaves out a step, and goes on, while the other one is in its step."""
    model = FastDDP(net(), sync=LocalSGD(9, within=2), zero=1)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.01), torch.amp.GradScaler("cpu")
    store = dist.distributed_c10d._get_default_store()

    def come_late(*_):
        if rank == VICTIM and step == 1:
            store.wait(["ahead"])
            time.sleep(0.5)  # for what the others tell of their collectives

    optimizer.register_step_pre_hook(come_late)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        overflows = rank < 2 and step == 1
        scaler.scale(loss * (float("inf") if overflows else 1)).backward()
        if rank < 2 and step == 2:
            store.set("ahead", "")
            store.wait(["made"])
        scaler.step(optimizer)
        scaler.update()
        if rank == VICTIM and step == 1:
            store.set("made", "")
    return values(model).isfinite().all().item()


def test_a_part_may_leave_out_a_step_while_another_makes_it():
    assert all(testing.run_ranks(a_part_is_ahead, 4))


def alone(rank, world, through):
    """One rank of the second part asks alone for what its part has."""
    os.environ |= {
        "FASTSYNC_SHM": {"memory": "1", "group": "0"}[through],
        "FASTSYNC_AGREE_TIMEOUT": "1",
    }
    model = FastDDP(net(), sync=LocalSGD(4, within=2), zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(2):
        model(batch(rank, step)).square().mean().backward()
        if step == 0:
            optimizer.step()
    text = ""
    if rank == VICTIM:
        try:
            model.module[0].weight.grad.sum()
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    return text


@pytest.mark.slow("memory")
@pytest.mark.parametrize("through", ["memory", "group"])
def test_errors_number_ranks_as_the_model_does(through):
    text = testing.run_ranks(alone, 4, through)[VICTIM]
    if through == "group":
        assert f"rank {VICTIM} waited 1 s" in text and "ranks [2] did not come" in text, text
    else:
        assert "ranks [2, 3]" in text, text
