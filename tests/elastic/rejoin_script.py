"""Trains on forked ranks that die and come back. See test_elastic_rejoin.py.

Jobs run side by side, each like `python -m fastsync.elastic`: this process serves the store and
starts a rank again that has ended badly. What a process has seen goes to
`<folder>/<job>-<rank>-<the how manieth>.json`; who is killed writes nothing.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # wrapping a module would import it
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore

import fastsync
from fastsync._build import extension
from fastsync._torch import group_store, make_group
from fastsync.config.arguments import grouped
from fastsync.ddp.rank_identity import ELASTIC_STORE
from fastsync.faults.join_gate import ENDED
from fastsync.reducer.engine import Progress
from tests.elastic import elastic_script
from tests.elastic.elastic_script import Fate, Net, as_taken, batch

LIMIT = 90.0  # seconds for all jobs
PAUSE = 0.02  # seconds that a step takes at least
AFTER = 3  # steps that are made when all are back


@dataclass
class Job:
    """One training.

    Attributes:
        joins: how many ranks come that have not begun the training.
        joins_after: seconds until each of them is started; empty: it is at once.
        began: of a training without deaths: how many ranks its twin began with.
        deaths: rank, step and place of each, of processes of the start.
        changes: of a training without deaths: from which step on which ranks train.
        steps: likewise, how many; 0: until all are back.
        odd: what a process does that was started again, by its number: "other model", "dies
            waiting", "dies taking", "no catch_up", "loads a checkpoint".
        again: deaths once all have come back: rank, number of the process, how many steps after
            that, and place.
        wires: by step, what gradients travel as from then on.
        giver_dies: the first rank, when it is to give what it has for the first time.
        every: backwards between two steps of the optimizer, which gradients accumulate over.
        freezes: the step from which on one layer's weight is frozen; -1: none.
    """

    world: int = 3
    joins: int = 0
    joins_after: list = field(default_factory=list)
    began: int = 0
    deaths: list = field(default_factory=list)
    changes: list = field(default_factory=list)
    steps: int = 0
    odd: dict = field(default_factory=dict)
    again: list = field(default_factory=list)
    giver_dies: bool = False
    wires: dict = field(default_factory=dict)
    optimizer: str = "AdamW"
    buffers: bool = False
    memory: bool = True
    local: bool = False
    every: int = 1
    freezes: int = -1
    elastic: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def most(self):
        """Return how many ranks there are in the end."""
        return self.world + self.joins

    @property
    def ends(self):
        """Return how many processes end badly."""
        return len(self.deaths) + len(self.odd) + self.giver_dies + len(self.again)


class Deadly:
    """Object that dies when it is asked for its state, or given another."""

    def __init__(self, gives=False, takes=False):
        self.gives, self.takes = gives, takes

    def state_dict(self):
        if self.gives:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state):
        if self.takes:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(net, model):
    kept = model.sync_state_dict()["residuals"]
    held = [*net.parameters(), *net.buffers(), *(kept[name] for name in sorted(kept))]
    parts = (t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in held)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def wire_at(job, step):
    return as_taken({"wire": job.wires[str(step)]})["wire"]


def load_checkpoint(model):
    """Load a checkpoint with residuals, as a script does that does not know that it comes back."""
    state = model.sync_state_dict()
    assert state["residuals"]
    state["residuals"] = {name: torch.ones(r.shape) for name, r in state["residuals"].items()}
    model.load_sync_state_dict(state)


def optimizers_of(net, job):
    if job.optimizer == "SGD":
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)]
    return [torch.optim.AdamW(net.parameters(), lr=0.01)]


class Training:
    """One rank's."""

    make_optimizers = staticmethod(optimizers_of)

    def __init__(self, job, rank, attempt, file):
        self.job, self.rank, self.odd = job, rank, job.odd.get(str(attempt), "")
        self.fate = Fate(elastic_script.Job(deaths=[] if attempt else job.deaths), rank, file)
        self.net = self.make_net()
        self.optimizers = self.make_optimizers(self.net, job)
        inner = (getattr(each, "inner", each) for each in self.optimizers)
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 5, 0.9) for each in inner]
        self.seen = {"weights": {}, "members": []}
        elastic = False if job.changes else fastsync.ElasticPolicy(**job.elastic)
        options = {"bucket_cap_mb": 0.02, "find_unused_parameters": True}
        options |= as_taken(job.options)
        if job.buffers:
            options["broadcast_buffers"] = False
        self.model = fastsync.FastDDP(
            self.net, **grouped({"elastic": elastic, **options, **self.wrapped_with()})
        )
        self.attempt, self.is_doomed = attempt, False

    def make_net(self):
        net = Net(self.fate, 24 if self.odd == "other model" else 48)
        if self.job.buffers:
            net.layers[1] = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48))
        return net

    def wrapped_with(self):
        """Return more arguments for FastDDP."""
        return {}

    @property
    def states(self):
        return [*self.optimizers, *self.schedules]

    def catch_up(self):
        if self.odd == "no catch_up":
            return 0
        if self.odd == "loads a checkpoint":
            load_checkpoint(self.model)
        if self.odd == "dies waiting":
            threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
        gives = self.job.giver_dies and self.rank == 0 and not self.attempt
        deadly = Deadly(gives, self.odd == "dies taking")
        return self.model.catch_up(*self.states, deadly)

    def run(self):
        step = 0 if self.job.changes else self.catch_up()
        while not self.is_over(step):
            if self.trains(step):
                self.step(step)
            step += 1

    def is_over(self, step):
        if self.job.changes:
            return step >= self.job.steps
        now = self.model.elastic
        last = max((when for _, when, _ in self.job.deaths), default=-1)
        whole = now.size == self.job.most and now.since > last + 1
        if self.job.again:  # a death makes an epoch, and so does a return
            whole = whole and now.epoch >= 2 * self.job.ends
        return whole and step + 1 >= now.since + AFTER

    def step(self, step):
        if str(step) in self.job.wires:
            self.model.set_wire(wire_at(self.job, step))
        self.die_again(step)
        self.fate.begin(step)
        began = time.monotonic()
        if step % self.job.every == 0:
            for each in self.optimizers:
                each.zero_grad()
        if step == self.job.freezes:  # who comes back later learns of it
            self.net.layers[2].weight.requires_grad_(False)
        if self.job.local:
            with self.model.no_sync():
                self.backward(step, 1)
        self.backward(step, 0)
        self.fate.reach("optimizer")
        self.weigh()
        if (step + 1) % self.job.every == 0:
            for each in (*self.optimizers, *self.schedules):
                each.step()
        self.seen["weights"][str(step)] = digest(self.net, self.model)
        self.note_members()
        if self.model.elastic is not None:
            time.sleep(max(0.0, began + PAUSE - time.monotonic()))

    def backward(self, step, part):
        loss = self.loss(batch(self.rank, step, part, 48))
        self.note_members()  # some may have joined, and one die before this step is made
        loss.backward()

    def loss(self, inputs):
        return self.model(inputs)

    def die_again(self, step):
        """Decides about it in the first step in which all are there again."""
        now = self.model.elastic
        if now is None or not now.epoch or now.size < self.job.most or self.is_doomed:
            return
        self.is_doomed = True
        for rank, attempt, steps, place in self.job.again:
            if (rank, attempt) == (self.rank, self.attempt):
                self.fate.due.add((step + steps, place))

    def weigh(self):
        """A single rank of a training without elastic= divides nothing."""
        alone = dist.get_world_size(self.model.process_group) == 1
        if self.job.changes and alone and self.job.elastic.get("rescale") == "sum_of_start":
            for param in self.net.parameters():
                if param.grad is not None:
                    param.grad.mul_(1 / (self.job.began or self.job.world))

    def note_members(self):
        if self.model.elastic is None:
            return
        now = [self.model.elastic.since, list(self.model.elastic.ranks)]
        if now not in self.seen["members"]:
            self.seen["members"].append(now)

    def trains(self, step):
        """Switch to other ranks from some step on, where this is a training without deaths."""
        for number, (since, ranks) in enumerate(self.job.changes):
            if since == step + 1 and self.rank in ranks:
                before = self.job.changes[number - 1][1] if number else range(self.job.world)
                group = self.make_group(number, ranks)
                givers = sorted(set(before) & set(ranks))
                # Each has what one of those that train has, whose buffers are its own.
                for place, joining_rank in enumerate(sorted(set(ranks) - set(before))):
                    giver = ranks.index(givers[place % len(givers)])
                    self.attach(group, giver, self.rank == joining_rank)
                self.model.process_group = group
                # Who has joined makes no plan of its own after its first step.
                self.model._engine.use_group(group, agreed=not self.job.began)
                if self.job.elastic.get("rescale") == "sum_of_start":
                    self.model._engine.core.set_divisor(self.job.began or self.job.world)
        present = [ranks for since, ranks in self.job.changes if since <= step + 1]
        return not present or self.rank in present[-1]

    def make_group(self, number, ranks):
        """torch's new_group() would count those that a rank has been in."""
        store = group_store(dist.group.WORLD)
        name, limit = f"change-{number}", timedelta(seconds=60)
        return make_group(store, ranks.index(self.rank), ranks, name, limit)

    def attach(self, group, giver, lacks):
        engine = self.model._engine
        order = [engine.params[i].name for i in engine.next_order()]
        held = [engine.wire, engine.core.steps(), order, self.net.state_dict()]
        held += [each.state_dict() for each in self.states]
        dist.broadcast_object_list(held, group_src=giver, group=group)
        if lacks:
            engine.policy = replace(engine.policy, wire=held[0])
            engine.core.resume(held[1])
            engine.core.load_residuals([None] * len(engine.params))
            if self.job.began:
                engine.use_group(self.make_group(f"{held[1]}-{self.rank}", [self.rank]))
                progress = Progress(held[1], held[2], engine.measured())
                engine.resume(progress, residuals={}, follows=True)
            for each, state in zip((self.net, *self.states), held[3:], strict=True):
                each.load_state_dict(state)


def run(folder, name, rank, attempt, job, training):
    file = Path(folder, f"{name}-{rank}-{attempt}.json")
    log = os.open(f"{folder}/{name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = training(job, rank, attempt, file)
    try:
        training.run()
    except BaseException as error:
        training.seen["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        file.write_text(json.dumps(training.seen))


class Server:
    """A process with a store, which has threads: ranks are not forked from it."""

    def __init__(self):
        told, port = os.pipe()
        asked, self.ending = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(port, str(store.port).encode())
            while os.read(asked, 1):
                PrefixStore(ELASTIC_STORE, store).set(ENDED, "")
        self.port = int(os.read(told, 16))

    def say_ended(self):
        os.write(self.ending, b"!")

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Team:
    """The ranks of a job."""

    def __init__(self, folder, name, job, training):
        self.folder, self.name, self.job, self.training = folder, name, job, training
        self.server = Server()
        self.servers = [self.server]  # and one for the group of each process that starts later
        self.running, self.codes, self.attempts = {}, [], 0
        for rank in range(job.world):
            self.fork(rank, 0)
        began = time.monotonic()
        times = job.joins_after or [0.0] * job.joins
        self.due = [(began + after, job.world + n) for n, after in enumerate(times)]
        self.look()

    def start_later(self, rank):
        self.attempts += 1
        self.fork(rank, self.attempts)

    def fork(self, rank, attempt):
        if attempt:
            self.servers.append(Server())
        own = self.servers[-1] if attempt else self.server
        pid = os.fork()
        if pid == 0:
            place = {"RANK": 0 if attempt else rank, "WORLD_SIZE": 1 if attempt else self.job.world}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own.port}
            if attempt:
                place["FASTSYNC_ELASTIC_STORE"] = f"127.0.0.1:{self.server.port}"
            place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt}
            place |= {"FASTSYNC_ELASTIC_RANK": f"{rank}/{self.job.world}"}
            place |= {"FASTSYNC_SHM": int(self.job.memory)}
            os.environ.update({name: str(value) for name, value in place.items()})
            run(self.folder, self.name, rank, attempt, self.job, self.training)
            sys.exit()
        self.running[pid] = (rank, attempt)

    def look(self):
        for due in [due for due in self.due if due[0] <= time.monotonic()]:
            self.due.remove(due)
            self.start_later(due[1])
        for pid, (rank, attempt) in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self.running[pid]
            code = os.waitstatus_to_exitcode(status)
            self.codes.append([rank, attempt, code])
            if code == 0:
                self.server.say_ended()
            elif self.attempts < self.job.ends + self.job.joins:
                self.start_later(rank)

    def kill(self):
        for pid, (rank, attempt) in self.running.items():
            os.kill(pid, signal.SIGABRT if "-v" in sys.argv else signal.SIGKILL)
            os.waitpid(pid, 0)
            self.codes.append([rank, attempt, None])
        for server in self.servers:
            server.kill()


def main(job_class=Job, training=Training):
    folder, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    extension.load()
    teams = [Team(folder, name, job_class(**given), training) for name, given in jobs]
    deadline = time.monotonic() + LIMIT
    while any(team.running for team in teams) and time.monotonic() < deadline:
        for team in teams:
            team.look()
        time.sleep(0.01)
    for team in teams:
        team.kill()
    print(json.dumps({team.name: team.codes for team in teams}))


if __name__ == "__main__":
    main()
