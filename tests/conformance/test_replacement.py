"""Stages that a script gets in place of DistributedDataParallel, by each of the ways to ask."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import integrations, replacing
from fastsync.testing import run_ranks
from tests.conformance.stages import full, net, train
from tests.helpers.scripts import ROOT, environment


def trained(make, rank):
    """Return weights after three steps, and the elements of the first weight that a rank holds."""
    model = make(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(3))
    weight = next(model.parameters())
    held = (weight.to_local() if hasattr(weight, "to_local") else weight).numel()
    return model, held


def in_place(stage, module):
    with integrations.in_place_of_ddp(zero=stage):
        return nn.parallel.DistributedDataParallel(module)


def in_place_of_an_argument(stage, module):
    with integrations.in_place_of_ddp(zero=stage, bucket_cap_mb=0.0001):
        return nn.parallel.DistributedDataParallel(module, zero=0)


def replaced(stage, module):
    replacing.replace_ddp(zero=stage)
    return DistributedDataParallel(module)  # by the name that was imported before


def by_a_class_of_the_script(stage, module):
    replacing.replace_ddp(zero=stage)

    class Mine(nn.parallel.DistributedDataParallel):
        pass

    return Mine(module)


def by_environment(stage, module):
    os.environ["FASTSYNC_REPLACE_DDP"] = f"zero={stage}"
    replacing.replace_where_asked()
    return DistributedDataParallel(module)


WAYS = [in_place, in_place_of_an_argument, replaced, by_a_class_of_the_script, by_environment]


def kind(rank, world, way, stage):
    with_ddp, _ = trained(DistributedDataParallel, rank)
    model, held = trained(partial(way, stage), rank)
    wanted, found = full(with_ddp), full(model)
    apart = [n for n in wanted if not torch.allclose(wanted[n], found[n], rtol=1e-5, atol=1e-6)]
    return apart, isinstance(model, fastsync.FastDDP), model._policy.zero.stage, held


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_script_gets_the_stage(way, stage):
    for rank, found in enumerate(run_ranks(kind, 2, way, stage)):
        elements = (20, 15)[rank] if stage == 3 else 35
        assert found == ([], True, stage, elements)


SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(6, 4))
model(torch.ones(1, 6)).sum().backward()
weight = next(model.parameters())
# In one piece, which what the other rank prints cannot cut.
print(f"holds {getattr(weight, '_local_tensor', weight).numel()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_command_gives_stage_3(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "fastsync.run", "--with", "zero=3", str(script)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("holds 12") == 2, done.stdout
    assert "uses FastDDP(zero=3)" in done.stdout


# --- optimizers that were made, or have stepped, before the model is wrapped
