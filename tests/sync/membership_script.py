"""Trains on forked ranks, with `sync=`, of which some die, come back or join. See
test_membership.py.

Jobs run side by side, as in tests/elastic/rejoin_script.py. A death has a rank, a step from 1 on,
and a place: "forward", "compare", "sum", "vote", "merge" (of which each is the beginning; "sum 2":
of the second one in the step), or a number of milliseconds after the beginning of the step.
"""

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

import fastsync
from fastsync.sync.exchange import Exchange
from fastsync.sync.fragments import Fragment, OuterFragment
from tests.elastic import rejoin_script
from tests.sync.test_modes import OPTIMIZERS, batch, net

PAUSE = 0.01  # seconds that a step takes at least, where a rank is to come
ROUNDS_AFTER = 2  # that are made when all have come


@dataclass
class Job:
    """One training.

    Attributes:
        mode: name of the class, and its arguments.
        steps: that are made at least.
        joins: ranks that come that have not begun the training.
        returns: dead ranks that are started again: 1 where one dies and none joins, or 0.
        breaks: a rank, and a step in which it gets no average, once another rank is dead.
        late: ranks, each with steps whose average it comes to once the others have left it out.
        patience: seconds.
        asks: those that were left out learn of it before their next step, and not in its forward.
    """

    world: int = 3
    mode: list = field(default_factory=lambda: ["LocalSGD", {"every": 4}])
    deaths: list = field(default_factory=list)
    steps: int = 13
    joins: int = 0
    joins_after: list = field(default_factory=list)
    returns: int = 0
    make: str = "adamw"
    end_at: int = 0  # a step after which all ranks end the round
    memory: bool = False
    breaks: list = field(default_factory=lambda: [-1, 0])
    late: dict = field(default_factory=dict)
    patience: float | None = None
    asks: bool = True

    @property
    def ends(self):
        """Return how many processes are started again, so that those that join are not counted."""
        return self.returns or -self.joins

    @property
    def made(self):
        """The mode."""
        return getattr(fastsync, self.mode[0])(**self.mode[1])


def flat(tensors):
    """Return all values of some tensors."""
    return [value for tensor in tensors for value in tensor.flatten().tolist()]


class Fate:
    """How a rank dies."""

    def __init__(self, deaths):
        self.deaths, self.step, self.came = deaths, 0, Counter()
        for name, place in {"compare": "compare", "sum_flat": "sum", "vote": "vote"}.items():
            self.watch(Exchange, name, place)
        self.watch(Exchange, "gather_codes", "sum")
        self.watch(OuterFragment, "_update", "merge")

    def watch(self, owner, name, place):
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            self.reach(place)
            return call(*args, **kwargs)

        setattr(owner, name, watched)

    def begin(self, step):
        self.step, self.came = step, Counter()
        for when, place in self.deaths:
            if when == step and not isinstance(place, str):
                threading.Timer(place / 1000, self.die).start()

    def reach(self, place):
        self.came[place] += 1
        number = self.came[place]
        if [self.step, place if number == 1 else f"{place} {number}"] in self.deaths:
            self.die()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Training:
    """One rank's."""

    def __init__(self, job, rank, attempt, file):
        self.job, self.rank = job, rank
        doomed = [] if attempt else job.deaths
        self.fate = Fate([[step, place] for who, step, place in doomed if who == rank])
        self.net = net()
        self.net.register_forward_pre_hook(self.input)
        self.optimizer = OPTIMIZERS[job.make](self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        faults = fastsync.Faults(elastic=fastsync.ElasticPolicy(patience=job.patience))
        self.model = fastsync.FastDDP(self.net, sync=job.made, faults=faults)
        self.complete = None  # the step since which all have come
        if rank == job.breaks[0]:
            self.break_average()
        self.seen = {"params": {}, "members": [], "outer": {}, "waits": {}, "left_out": []}

    def watch_members(self):
        """Note ranks that change twice in one step, too."""
        elastic = self.model._elastic
        use = elastic._use

        def used(*group):
            use(*group)
            self.note_members()

        elastic._use = used

    def break_average(self):
        """Let an average fail here, as a connection may do where a rank has ended."""
        arrive, broken = Fragment.arrive, []

        def breaking(fragment):
            arrive(fragment)
            if self.fate.step == self.job.breaks[1] and not broken:
                broken.append(fragment)
                while not self.model._elastic._gone():
                    time.sleep(0.01)
                raise RuntimeError("connection reset by peer")

        Fragment.arrive = breaking

    def run(self):
        step = self.model.catch_up(self.optimizer, self.schedule)
        self.seen["start"] = step
        self.watch_members()
        self.note_members()
        while not self.is_over(step):
            step += 1
            step = self.step(step)
            if self.job.late and self.job.asks:
                self.note_members()
                step = self.model.catch_up()

    @property
    def waits(self):
        """Whether it trains until ranks have come."""
        return bool(self.job.joins or self.job.returns or self.job.late)

    def input(self, net, args):
        """Return the input of the step that the others make, with which a forward goes on."""
        return batch(self.rank, max(self.fate.step, self.model.elastic.since))

    def come_late(self, step):
        """Wait until the others have averaged without this rank."""
        if step not in self.job.late.get(str(self.rank), []):
            return
        elastic = self.model._elastic
        name = f"{elastic.place.name}/{elastic.now.epoch + 1}/decision"
        while not elastic.identity.store.check([name]):
            time.sleep(0.01)

    def is_over(self, step):
        if not self.waits:
            return step == self.job.steps
        every = self.job.made.every
        until = max(self.job.steps, (self.complete or 0) + ROUNDS_AFTER * every)
        # Those that have come back have not seen who was there at the end of the step.
        there = self.complete and self.all_are_there() and self.model.elastic.since <= step
        return there and step % every == 0 and step >= until

    def step(self, step):
        self.fate.begin(step)
        began = time.monotonic()
        self.optimizer.zero_grad()
        self.fate.reach("forward")
        self.model(batch(self.rank, step)).square().mean().backward()
        step = max(step, self.model.elastic.since)
        self.note_members()
        self.come_late(step)
        ready = time.monotonic()
        self.optimizer.step()
        self.seen["waits"][step] = time.monotonic() - ready
        self.schedule.step()
        if step == self.job.end_at:
            self.model.end_round()
        self.note_members()
        if self.model._elastic.left_out:
            self.note_left_out()
            return step
        self.seen["params"][step] = flat(self.net.parameters())
        kept = self.model.sync_state_dict()["rounds"]["optimizers"][0]["kept"]
        self.seen["outer"][step] = flat(kept.get("outer", {}).values())
        if self.waits:
            time.sleep(max(0.0, began + PAUSE - time.monotonic()))
        return step

    def note_left_out(self):
        try:
            self.model.end_round()
        except RuntimeError as error:
            self.seen["left_out"].append(str(error))

    def note_members(self):
        now = [self.model.elastic.since, list(self.model.elastic.ranks)]
        if now not in self.seen["members"]:
            self.seen["members"].append(now)
        if self.complete is None and self.model.elastic.epoch and self.all_are_there():
            self.complete = now[0]

    def all_are_there(self):
        job = self.job
        first = job.world if job.joins and not job.late else 0
        those = {*range(first, job.world + job.joins)}
        if not job.returns:
            those -= {rank for rank, *_ in job.deaths}
        return those <= {*self.model.elastic.ranks}


if __name__ == "__main__":
    rejoin_script.main(Job, Training)
