"""Training scripts beyond the plain step, against torch's DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)

from fastsync import FastDDP
from tests.helpers.models import batch, build, differences, grads, loss_of, state, wrap
from tests.helpers.teams import run_ranks

SMALL = {"bucket_cap_mb": 0.002}


def scaled(kind, rank):
    """Loss scaling and autocast; one rank's infinity must make both skip the step."""
    model = wrap(kind, build("wide"), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        data = batch("wide", 10 * step + rank)
        if step == 3 and rank == 1:
            data[0, 0] = float("inf")
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(data))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return {**state(model), "scale": torch.tensor(scaler.get_scale())}


class Penalty(nn.Module):
    """Its loss holds a gradient, so its backward differentiates twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x.requires_grad_()
        y = self.body(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()


def graph_kept(kind, rank):
    """Gradients are averaged under `create_graph` too, where DDP raises an error."""
    model = wrap(kind, Penalty(), **SMALL)
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, 6)).backward(create_graph=kind == "fast")
    return grads(model)


SCRIPTS = [scaled, graph_kept]


def compare(rank, world):
    return {s.__name__: differences(s("fast", rank), s("torch", rank)) for s in SCRIPTS}


@pytest.mark.slow
def test_scripts_end_with_the_bits_of_ddp():
    assert run_ranks(compare, 2) == [{s.__name__: [] for s in SCRIPTS}] * 2


def early_end(kind, rank):
    model = wrap(kind, build("many"), **SMALL)
    with pytest.raises(RuntimeError) as caught, model.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            loss_of(model(batch("many", step))).backward()
    return str(caught.value)


def compare_early_end(rank, world):
    return early_end("fast", rank), early_end("torch", rank)


def test_join_that_throws_when_one_rank_is_out_of_inputs():
    for ours, theirs in run_ranks(compare_early_end, 2):
        assert ours == theirs
        assert "exhausted" in ours


def converted(rank, world):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build("conv"))
    texts = []
    for kind in ("fast", "torch"):
        with pytest.raises(ValueError) as caught:
            wrap(kind, model)
        texts.append(str(caught.value))
    return texts


def test_synchronised_batch_norm_on_the_cpu_is_refused_as_by_ddp():
    for ours, theirs in run_ranks(converted, 2):
        assert ours == theirs == "SyncBatchNorm layers only work with GPU modules"


def trained(kind, rank, steps=2):
    model = wrap(kind, build("many"), **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(batch("many", 10 * step + rank))).backward()
        optimizer.step()
    return model, optimizer


def into_a_plain_model(rank, world, folder):
    fast, _ = trained("fast", rank)
    dcp.save(get_model_state_dict(fast), checkpoint_id=folder)
    dist.barrier()
    plain = build("many", seed=1)
    loaded = plain.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    plain.load_state_dict(loaded)
    return differences(state(plain), state(fast.module)), isinstance(fast, FastDDP)


def test_a_checkpoint_fits_the_bare_model(tmp_path):
    assert run_ranks(into_a_plain_model, 2, str(tmp_path / "saved")) == [([], True)] * 2
