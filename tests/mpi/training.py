"""Trainings over MPI, beside the same over Gloo in the same processes."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.config.arguments import grouped
from tests.mpi import random_collectives

STEPS, STAGES, WIRES = 3, (0, 1, 2, 3), ("fp32", "int8")
SIZES = (3, 200_000, 5, 70_000, 1) * 8
# Kept until the process ends: a callback of PowerSGD may hold the last reference on a thread of
# Gloo, which then would join itself and abort (torch 2.13).
_groups = []


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(13, 64),
        nn.ReLU(),
        nn.LayerNorm(64),
        nn.Linear(64, 33),
        nn.ReLU(),
        nn.Linear(33, 5),
    )


def train(model, rank, steps=STEPS, optimizer=None):
    """Weights, whole, after some steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        source = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(7, 13, generator=source)).pow(2).mean().backward()
        optimizer.step()
    return whole(model)


def whole(model):
    tensors = (p.detach() for p in model.parameters())
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.flatten() for t in full])


def bits(tensor):
    return tensor.view(torch.int32)


def gloo(ranks=None):
    _groups.append(dist.new_group(ranks, backend="gloo"))
    return _groups[-1]


def fast_ddp(rank, world, stages, wires, shared_memory):
    """Return the stages and wires of FastDDP that give other weights than over Gloo."""
    theirs, wrong = gloo(), []
    for stage in stages:
        for wire in wires:
            options = {"wire": wire, "zero": stage, "shared_memory": shared_memory}
            ours = train(fastsync.FastDDP(net(), **grouped(options)), rank)
            other = train(fastsync.FastDDP(net(), process_group=theirs, **grouped(options)), rank)
            if not torch.equal(bits(ours), bits(other)):
                wrong.append((stage, wire, float((ours - other).abs().max())))
    return wrong


def hierarchical(rank, world):
    """`fast_ddp` in the hierarchical form, of nodes of LOCAL_WORLD_SIZE ranks."""
    theirs, wrong = gloo(), []
    for wire in ("fp32", "int8"):
        form = fastsync.Wire(wire, form="hierarchical")
        ours = train(fastsync.FastDDP(net(), wire=form), rank)
        other = train(fastsync.FastDDP(net(), wire=form, process_group=theirs), rank)
        if not torch.equal(bits(ours), bits(other)):
            wrong.append(wire)
    return wrong, int(os.environ["LOCAL_WORLD_SIZE"])


def shards(rank, world):
    """fastsync's and torch's fully_shard over MPI, Gloo, and without sharding."""
    found = {}
    mesh = init_device_mesh("cpu", (world,))
    other = DeviceMesh.from_group(gloo(), "cpu")
    for name, shard in (("fastsync", fastsync.fully_shard), ("torch", fully_shard)):
        for where, on in (("mpi", mesh), ("gloo", other)):
            model = net()
            for layer in (model[0], model[3]):
                shard(layer, mesh=on)
            shard(model, mesh=on)
            found[f"{name} over {where}"] = train(model, rank)
    found["ddp"] = train(DistributedDataParallel(net()), rank)
    return found


def ddp(rank, world):
    """torch's DDP over MPI and over Gloo, with hooks, one of which waits in its callbacks.

    PowerSGD has one bucket: with several, its callbacks start collectives in an order of each
    rank's own, which hangs over Gloo.
    """
    found = {}
    for name, group in (("mpi", dist.group.WORLD), ("gloo", gloo())):

        def wrapped(group=group):
            return DistributedDataParallel(net(), process_group=group)

        found[f"plain over {name}"] = train(wrapped(), rank)
        hooked = wrapped()
        hooked.register_comm_hook(group, default_hooks.fp16_compress_hook)
        found[f"fp16 over {name}"] = train(hooked, rank)
        options = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5}
        state = powerSGD_hook.PowerSGDState(group, 2, **options)
        power = wrapped()
        power.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found[f"powerSGD over {name}"] = train(power, rank, steps=5)
    return found


def meshes(rank, world):
    """A mesh of two dimensions, whose groups are parts of the world."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for name in ("replicate", "shard"):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mesh.get_group(name))
        found.append(float(total))
    model = net()
    fully_shard(model, mesh=mesh)
    return found, train(model, rank), train(DistributedDataParallel(net()), rank)


def checkpoint(rank, world):
    """Save shards with torch.distributed.checkpoint, load them, and go on."""
    folder = [tempfile.mkdtemp(prefix="fastsync-mpi-")]
    dist.broadcast_object_list(folder)

    def made():
        model = net()
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made()
    train(model, rank, optimizer=optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    due = train(model, rank, optimizer=optimizer)

    other, optimizer = made()
    weights, state = get_state_dict(other, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(other, optimizer, model_state_dict=weights, optim_state_dict=state)
    return (
        due,
        train(other, rank, optimizer=optimizer),
        sorted(p.name for p in Path(folder[0]).iterdir()),
    )


def many_groups(rank, world):
    """More groups than MPI has communicators for, if they are not given back."""
    for _ in range(1500):
        group = dist.new_group()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        dist.destroy_process_group(group)
    return float(total)


def many_at_once(rank, world):
    """Large ones have a second half, which all ranks have to begin in the same order."""
    tensors = [torch.ones(n) for n in SIZES]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    futures = [work.get_future().then(lambda done: done.value()[0].sum()) for work in works]
    assert all(work.is_completed() or work.wait() for work in reversed(works))
    return [float(future.wait()) for future in futures]


def on_two_ranks(rank, world, seed):
    """Return what quick tests ask of two ranks: to start these takes longer than all of it."""
    return {
        "many at once": many_at_once(rank, world),
        "stages": fast_ddp(rank, world, STAGES, WIRES, True),
        "stages without shared memory": fast_ddp(rank, world, STAGES, WIRES, False),
        "ddp": ddp(rank, world),
        "shards": shards(rank, world),
        "checkpoint": checkpoint(rank, world),
        "collectives": random_collectives.run(rank, world, 300, seed),
    }
