"""Trains like rejoin_script.py, with shared optimizers. See test_elastic_rejoin_zero.py."""

import os
import signal
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fastsync.zero import neighbour_copies, sharded_optimizer
from tests.elastic import rejoin_script
from tests.elastic.elastic_zero_script import WideSteps, digest_state, make_optimizers

# Where a process may die while all share the state with a rank that comes back.
PLACES = {
    "sharing": (neighbour_copies._Recut, "_collect"),
    "shared": (neighbour_copies.Neighbours, "install"),
}


@dataclass
class Job(rejoin_script.Job):
    """One training.

    Attributes:
        zero, halves, masters, wire: see elastic_zero_script.
        sharing: deaths while all share the state with a rank that comes back: rank, number of the
            process, and one of `PLACES`.
        used: a process that was started again makes a step before it catches up.
        passes: how catch_up() is given the optimizers: "all", "wrapped", "within" another object;
            or not: "schedules" alone. Of two ranks, with the latter, the one that is left trains
            until the other has been refused.
    """

    zero: int = 0
    halves: bool = False
    masters: bool = False
    wire: str | None = None
    sharing: list = field(default_factory=list)
    used: bool = False
    passes: str = "all"

    @property
    def ends(self):
        return super().ends + len(self.sharing)


class Holder:
    """Object that contains optimizers."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return {"held": [each.state_dict() for each in self.held]}

    def load_state_dict(self, state):
        for each, theirs in zip(self.held, state["held"], strict=True):
            each.load_state_dict(theirs)


class Wrapped:
    """Wrapper of an optimizer, like those of libraries."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


def die_while_sharing(place, world):
    owner, name = PLACES[place]
    call = getattr(owner, name)

    def reached(self, *args):
        if self._partition.size == world:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, *args)

    setattr(owner, name, reached)


class Training(rejoin_script.Training):
    """One rank's."""

    make_optimizers = staticmethod(make_optimizers)

    def __init__(self, job, rank, attempt, file):
        sharded_optimizer._BUFFER = 20_000  # so that there are several
        super().__init__(job, rank, attempt, file)
        for who, number, place in job.sharing:
            if (who, number) == (rank, attempt):
                die_while_sharing(place, job.world)

    def make_net(self):
        net = super().make_net()
        return net.to(torch.bfloat16) if self.job.masters else net

    def wrapped_with(self):
        job = self.job
        masters = {"master_weights": job.masters, "parameter_wire": job.wire} if job.zero else {}
        return {"zero": job.zero, **masters}

    @property
    def states(self):
        held = {"all": self.optimizers, "schedules": []}
        held["wrapped"] = [Wrapped(each) for each in self.optimizers]
        if self.job.passes == "within":
            return [Holder(self.optimizers)]
        return [*held[self.job.passes if self.job.zero else "all"], *self.schedules]

    def catch_up(self):
        if self.job.used and self.attempt:
            for param in self.net.parameters():
                param.grad = torch.ones_like(param)
            for each in self.optimizers:
                each.step()
                each.state_dict()
        return super().catch_up()

    def is_over(self, step):
        if self.job.passes in ("within", "schedules"):
            return self.fate.file.with_name(f"{self.job.passes}-1-1.json").exists()
        return super().is_over(step)

    def run(self):
        super().run()
        self.seen["state"] = digest_state(self.optimizers)

    def step(self, step):
        for each in self.optimizers:
            if isinstance(each, WideSteps):
                each.alone = dist.get_world_size(self.model.process_group) == 1
        super().step(step)
        if step == 1:  # what all ranks do together those do not know of who come back
            digest_state(self.optimizers)

    def loss(self, inputs):
        return self.model(inputs.to(torch.bfloat16) if self.job.masters else inputs)


if __name__ == "__main__":
    rejoin_script.main(Job, Training)
