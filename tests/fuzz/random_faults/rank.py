"""Rank of a schedule: it trains, and writes down what it sees as it goes."""

import hashlib
import json
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import fastsync
import fastsync.reducer.engine as engine
from fastsync._torch import TCPStore
from fastsync.config.arguments import grouped
from tests.fuzz.random_faults.schedule import BEFORE, LAYERS, STEPS, WRAPPERS

__all__ = ["run"]

WIDTH = 32


class BadBatch(ValueError):
    """Error that a rank raises."""


class Log:
    """Lines of JSON, of which none is lost when the process is killed."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **what):
        os.write(self.file, (json.dumps({"at": time.monotonic(), **what}) + "\n").encode())


class Net(nn.Module):
    """Net whose layers are places for faults, in forward and backward."""

    def __init__(self, reach):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.reach = reach

    def named_buffers(self, *args, **kwargs):
        self.reach("wrap")
        return super().named_buffers(*args, **kwargs)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            self.reach("forward", index)
            x = layer(x).tanh()
            x.register_hook(lambda grad, index=index: self.reach("backward", index))
        return x.square().mean()


class Trainer:
    """One rank's; its fault happens where the schedule says."""

    def __init__(self, schedule, rank, log):
        self.schedule, self.rank, self.log, self.step = schedule, rank, log, BEFORE

    def reach(self, place, layer=None):
        at = self.schedule
        if at is None or self.rank != at.victim or (place, self.step) != (at.place, at.step):
            return
        if layer in (None, at.layer):
            self.log.write(fault=at.fault)
            self.fail(at.fault)

    def fail(self, fault):
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)  # the process that started the ranks ends a pause
        elif fault == "exit":
            os._exit(3)
        elif fault == "raise":
            raise BadBatch("bad batch")

    def watch_votes(self):
        """Let the fault happen where this rank would say what it knows for a plan."""
        vote = engine.agree_on_plan

        def reach_and_vote(*facts):
            self.reach("vote")
            return vote(*facts)

        engine.agree_on_plan = reach_and_vote

    def train(self, wrapper):
        self.watch_votes()
        model = wrap(Net(self.reach), WRAPPERS[wrapper])
        self.log.write(wrapped=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.reach("step"))
        for self.step in range(STEPS):
            self.reach("batch")
            seed = 100 * self.rank + self.step
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(x).backward()
            self.reach("between")
            optimizer.step()
            self.log.write(step=self.step, weights=digest(model))
            self.reach("checkpoint")
            optimizer.state_dict()  # which all ranks collect, where they share it


def wrap(net, options):
    if options is not None:
        return fastsync.FastDDP(net, **grouped({"bucket_cap_mb": 0.005, **options}))
    for layer in net.layers:
        fastsync.fully_shard(layer)
    return fastsync.fully_shard(net)


def digest(model):
    """Return a digest of the bits of the weights that this rank holds."""
    state = hashlib.blake2b(digest_size=8)
    for param in model.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        state.update(local.detach().contiguous().numpy().tobytes())
    return state.hexdigest()


def run(prefix, schedule, wrapper, world, rank, port):
    """Trains in this process; without a `schedule` nothing goes wrong."""
    log = Log(f"{prefix}-{rank}.log")
    output = os.open(f"{prefix}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if schedule is not None and schedule.fault == "stop":  # ranks that have met wait no longer
        _set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    try:
        Trainer(schedule, rank, log).train(wrapper)
        log.write(end="finished")
    except fastsync.SyncFault as error:
        log.write(end="SyncFault", ranks=error.ranks, text=str(error))
        raise
    except BaseException as error:
        log.write(end=type(error).__name__, text=str(error))
        raise
