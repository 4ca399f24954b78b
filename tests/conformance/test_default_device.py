"""Scripts that set a default device. What is made on it by mistake holds no numbers here: meta."""

import pytest
import torch
import torch.distributed as dist

import fastsync
from tests.conformance.stages import STAGES, batch, check, full, loss_of, net
from tests.helpers.teams import run_ranks


def trains(wrap, rank):
    plain = net()
    with torch.device("meta"):
        model = wrap(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        x = batch(rank, step)
        with torch.device("meta"):
            loss_of(model(x)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    if rank == 0:
        with torch.device("meta"):
            state = optimizer.state_dict()["state"]
        assert all(s["momentum_buffer"].device.type == "cpu" for s in state.values())
    dist.barrier()
    return full(model)


@pytest.mark.slow(but=("zero2",))
@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_ddps(stage):
    check(trains, stage)


def weighs_and_saves(rank, world, device):
    """Return checkpoints of the synchronisation: the first one, and after steps with weights."""
    plain = net()
    with torch.device(device):
        model = fastsync.FastDDP(plain, wire="int8")
        first = model.sync_state_dict()
    for step in range(3):
        x = batch(rank, step)
        with torch.device(device):
            model.add_weight(1.0 + rank)
            (loss_of(model(x)) * (1.0 + rank)).backward()
    with torch.device(device):
        states = [None] * world
        dist.all_gather_object(states, model.sync_state_dict())
        model.load_sync_state_dict(states)
        return first["residuals"], model.sync_state_dict()["residuals"]


def test_checkpoints_are_those_without_a_default_device():
    on_meta, on_cpu = (run_ranks(weighs_and_saves, 2, device)[0] for device in ("meta", "cpu"))
    for found, wanted in zip(on_meta, on_cpu, strict=True):
        assert found.keys() == wanted.keys()
        for name, residual in found.items():
            assert torch.equal(residual, wanted[name]), name
