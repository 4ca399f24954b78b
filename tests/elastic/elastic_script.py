"""Trains on forked ranks of which some die, and prints which did not end. See test_elastic.py.

A job is a name and its arguments, those of `Job`. A rank writes what it has seen to
`<folder>/<job>-<rank>.json`; who is killed writes the time before it is.
"""

import gc
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # wrapping a module would import it
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync._build import extension
from fastsync._build.env import NCCL_LETS_LIVE
from fastsync._torch import TCPStore, group_timeout
from fastsync.config.arguments import grouped
from tests.helpers.forked_ranks import end_of, fork_ranks
from tests.helpers.served_store import end_store, serve_store

LIMIT = 60.0  # seconds for a job
TIMEOUT = 120.0  # seconds, of the process group: who waits so long has not ended by LIMIT
STEPS = 6
WIDTH = 48
LAYERS = 6
ANY = -1  # for a step: the first that comes to the place


@dataclass
class Job:
    """One training.

    Attributes:
        deaths: rank, step and place of each; a place that is a number: milliseconds after the
            beginning of the step.
        changes: of a training without deaths: from which step on which ranks train.
        divisor: of the gradients, after the first change; 0: the number of ranks.
        elastic: what FastDDP is given.
        local: forwards under no_sync() in each step, and gradients that are zeroed, not dropped.
        fails: the rank's script ends by an exception instead of a signal.
        lingers: its process lasts until the others have ended, and with it its connections.
        device: of the model. Ranks share the GPUs that there are.
        streams: the first half of the layers, and all of the backward, run on streams of their own.
        backend: of the process group.
    """

    world: int = 3
    deaths: list = field(default_factory=list)
    changes: list = field(default_factory=list)
    divisor: float = 0
    elastic: object = False
    options: dict = field(default_factory=dict)
    memory: bool = True
    local: bool = False
    fails: bool = False
    lingers: bool = False
    destroys: bool = False
    port: int = 0  # of a store that rank 0 serves; 0: one that outlives every rank
    width: int = WIDTH
    steps: int = STEPS
    device: str = "cpu"
    streams: bool = False
    backend: str = "gloo"


class Fate:
    """How a rank dies."""

    def __init__(self, job, rank, file):
        self.due = {(step, place) for who, step, place in job.deaths if who == rank}
        self.fails, self.lingers, self.file = job.fails, job.lingers, file
        self.step = -1

    def begin(self, step):
        self.step = step
        for when, place in self.due:
            if when == step and not isinstance(place, str):
                threading.Timer(place / 1000, self.die).start()

    def reach(self, place):
        if (self.step, place) in self.due or (ANY, place) in self.due:
            self.die()

    def die(self):
        self.file.write_text(json.dumps({"killed": time.time()}))
        if self.lingers:
            threading.Thread(target=time.sleep, args=(LIMIT,)).start()
        if self.fails:
            raise ValueError("bad batch")
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    """Layers that tell where a step is; one of them is used in every second step alone."""

    def __init__(self, fate, width, streams=False):
        super().__init__()
        torch.manual_seed(0)
        self.side = torch.cuda.Stream() if streams else None
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.rare = nn.Linear(width, width)
        self.fate = fate
        for place, index in {"before": -1, "between": LAYERS // 2, "after": 0}.items():
            self.layers[index].weight.register_hook(lambda grad, at=place: fate.reach(at))

    def first_half(self, x):
        for layer in self.layers[: LAYERS // 2]:
            x = layer(x).tanh()
        return x

    def forward(self, x):
        x = self.first_half(x) if self.side is None else on_stream(self.side, self.first_half, x)
        self.fate.reach("forward")
        for layer in self.layers[LAYERS // 2 :]:
            x = layer(x).tanh()
        if self.fate.step % 2:
            x = self.rare(x)
        return x.square().mean()


def on_stream(stream, fn, x):
    """Return `fn(x)`, computed late on `stream`, where its backward runs, too."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        made = fn(x)
    torch.cuda.current_stream().wait_stream(stream)
    made.record_stream(torch.cuda.current_stream())
    return made


def batch(rank, step, part, width):
    seed = 1000 * rank + 10 * step + part
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def prepare_device(rank, job):
    """For the rank's process, before it makes a process group."""
    if job.device == "cpu":
        return
    from tests.helpers.devices import (
        share_gpus,  # asks for GPUs, which is not allowed before a fork
    )

    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **NCCL_LETS_LIVE}
    torch.use_deterministic_algorithms(True)
    share_gpus(rank, job.world)


def digest(module, model=None):
    """Return a digest of the weights, and of what error feedback keeps back on this rank."""
    kept = {} if model is None else model.sync_state_dict()["residuals"]
    tensors = [*module.parameters(), *(kept[name] for name in sorted(kept))]
    parts = (t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def as_taken(options):
    """Return options for FastDDP: a wire that is more than a name comes as what `Wire` takes."""
    wire = options.get("wire")
    return {**options, "wire": fastsync.Wire(**wire)} if isinstance(wire, dict) else options


def change_group(model, job, step, rank):
    """Train with fewer ranks from some step on. Return whether this rank does."""
    for since, ranks in job.changes:
        if since != step + 1:
            continue
        if rank not in ranks:
            return False
        model._update_process_group(dist.new_group(ranks, use_local_synchronization=True))
        if job.divisor:
            model._engine.core.set_divisor(job.divisor)
    return True


def note_members(model, seen):
    if model.elastic is None:
        return
    now = [model.elastic.since, list(model.elastic.ranks)]
    if now not in seen["members"]:
        seen["members"].append(now)


def train(rank, job, fate, seen):
    net = Net(fate, job.width, job.streams).to(job.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: fate.reach("optimizer"))
    elastic = job.elastic
    if isinstance(elastic, dict):
        elastic = fastsync.ElasticPolicy(**elastic)
    options = {"bucket_cap_mb": 0.02, "find_unused_parameters": True, **as_taken(job.options)}
    model = fastsync.FastDDP(net, faults=fastsync.Faults(elastic=elastic), **grouped(options))
    note_members(model, seen)
    for step in range(job.steps):
        if not change_group(model, job, step, rank):
            return
        fate.begin(step)
        optimizer.zero_grad(set_to_none=not job.local)
        if job.local:
            with model.no_sync():
                model(batch(rank, step, 1, job.width).to(job.device)).backward()
        model(batch(rank, step, 0, job.width).to(job.device)).backward()
        seen["backward"].append(time.time())
        if job.divisor and not job.elastic and dist.get_world_size(model.process_group) == 1:
            for param in net.parameters():
                if param.grad is not None:
                    param.grad.mul_(1 / job.divisor)
        optimizer.step()
        seen["weights"].append(digest(net, model))
        note_members(model, seen)
    links = model._engine.routes._all_links()
    seen["patience"] = [group_timeout(link).total_seconds() for link in links]


def run(folder, name, rank, job, train, served):
    seen = {"weights": [], "members": [], "backward": []}
    file = Path(folder, f"{name}-{rank}.json")
    logging.basicConfig(level=logging.WARNING)
    prepare_device(rank, job)
    dist.init_process_group(
        job.backend,
        store=TCPStore("127.0.0.1", job.port or served, is_master=bool(job.port) and rank == 0),
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        train(rank, job, Fate(job, rank, file), seen)
    except BaseException as error:
        seen["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        file.write_text(json.dumps(seen))
    if job.destroys:
        dist.destroy_process_group()


def main(job_class=Job, train=train):
    folder, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    extension.load()
    gc.freeze()  # what the ranks have in common is not worth the time of a search
    codes = {}
    for name, arguments in jobs:
        job = job_class(**arguments)
        os.environ["FASTSYNC_SHM"] = "1" if job.memory else "0"
        port, process = serve_store()
        given = {"job": job, "train": train, "served": port}
        children = fork_ranks(
            job.world, f"{folder}/{name}-{{}}.log".format, partial(run, folder, name, **given)
        )
        codes[name] = end_of(children, LIMIT, len(job.deaths) if job.lingers else 0)
        end_store(process)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
