"""Ranks that die, come back and join between averages: real processes, real signals.

What each rank has after each step is that of a training in plain torch, in one process, in which
each average is the mean over the ranks that have come to it.
"""

import copy
import json
from dataclasses import dataclass

import pytest
import torch

from fastsync import DiLoCo
from fastsync.sync.schedule import cut
from tests.helpers.scripts import Forked, cases_asked_for, finish
from tests.sync.membership_script import Job, flat
from tests.sync.oracle import coded
from tests.sync.test_modes import OPTIMIZERS, batch, net

LOCAL = ["LocalSGD", {"every": 4}]
STREAMING = ["DiLoCo", {"every": 4, "fragments": 2}]
CODED = ["DiLoCo", {"every": 3, "wire": "int8"}]
CASES = {
    "inner": {"mode": LOCAL, "deaths": [(1, 6, "forward")]},
    "inner-outer": {"mode": STREAMING, "deaths": [(2, 5, "forward")], "world": 4},
    "first-step": {"mode": LOCAL, "deaths": [(0, 1, "forward")]},
    "first-comparison": {"mode": LOCAL, "deaths": [(0, 1, "compare")]},
    "comparison": {"mode": LOCAL, "deaths": [(2, 8, "compare")], "world": 4},
    "average": {"mode": LOCAL, "deaths": [(1, 4, "sum")], "make": "sgd"},
    "average-coded": {"mode": CODED, "deaths": [(1, 6, "sum")]},
    "vote": {"mode": CODED, "deaths": [(0, 6, "vote")]},
    "vote-fragment": {"mode": STREAMING, "deaths": [(1, 6, "vote")], "world": 4},
    "between-fragments": {"mode": STREAMING, "deaths": [(1, 7, "forward")]},
    "before-merge": {"mode": STREAMING, "deaths": [(2, 8, "merge")]},
    "one-by-one": {"mode": CODED, "deaths": [(2, 2, "forward"), (0, 9, "sum")]},
    "node": {"mode": STREAMING, "deaths": [(2, 5, "forward"), (3, 5, "forward")], "world": 4},
    "ends-a-round": {"mode": STREAMING, "deaths": [(1, 9, "sum 2")], "end_at": 9},
    "arrived-on-one": {"mode": CODED, "deaths": [(2, 6, "vote")], "breaks": [1, 6]},
    "arrived-on-one-fragments": {
        "mode": STREAMING,
        "deaths": [(0, 9, "vote")],
        "breaks": [2, 9],
        "end_at": 9,
        "world": 4,
    },
    "warmup": {
        "mode": ["LocalSGD", {"every": 4, "warmup": 5}],
        "deaths": [(1, 3, "forward"), (2, 9, "sum")],
        "world": 4,
    },
    "joins-in-warmup-outer": {
        "mode": ["DiLoCo", {"every": 3, "warmup": 500, "wire": "int8"}],
        "joins": 1,
        "steps": 510,
    },
    "joins-in-warmup": {
        "mode": ["LocalSGD", {"every": 4, "warmup": 500}],
        "joins": 1,
        "steps": 505,
    },
    "joins": {"mode": LOCAL, "joins": 1},
    "joins-outer": {"mode": STREAMING, "joins": 1, "world": 2},
    "joins-coded": {"mode": CODED, "joins": 2, "world": 2},
    "comes-back": {"mode": CODED, "deaths": [(1, 4, "forward")], "returns": 1},
    "comes-back-fragments": {"mode": STREAMING, "deaths": [(0, 6, "sum")], "returns": 1},
    "late": {"mode": LOCAL, "late": {1: [4]}, "patience": 5},
    "late-until-forward": {"mode": CODED, "late": {2: [6]}, "patience": 5, "asks": False},
    "late-first": {"mode": CODED, "late": {0: [3, 120]}, "patience": 5, "steps": 126},
    "late-fragment": {"mode": STREAMING, "late": {2: [6], 3: [6]}, "patience": 5, "world": 4},
    "late-and-death": {
        "mode": LOCAL,
        "late": {1: [4]},
        "deaths": [(2, 6, "sum")],
        "patience": 5,
        "world": 4,
    },
}


@dataclass
class Outcome:
    """Observations of the processes of a training, by rank and turn, and how they ended."""

    job: Job
    seen: dict
    codes: list
    said: str

    @property
    def members(self):
        """From which step on which ranks train, as the rank saw it that was there longest."""
        return max((it["members"] for it in self.seen.values()), key=len)

    def check(self):
        """All that are left have ended well, with what the oracle has."""
        job, members = self.job, self.members
        ended = {rank for rank, _, code in self.codes if code == 0}
        dead = {rank for rank, _, code in self.codes if code == -9}
        assert dead <= {rank for rank, *_ in job.deaths}, (self.codes, self.said)
        assert ended == {*range(job.world + job.joins)} - (set() if job.returns else dead)
        assert ended <= {*members[-1][1]}, (self.codes, members, self.said)
        steps = max(int(step) for it in self.seen.values() for step in it["params"])
        wanted, outer = train(job, members, steps)
        for (rank, _), it in self.seen.items():
            assert "error" not in it, it["error"]
            assert len(it["left_out"]) == len(job.late.get(rank, [])), (rank, it["left_out"])
            assert all("have gone on without this one" in text for text in it["left_out"])
            for step, params in it["params"].items():
                assert close(params, wanted[int(step)][rank]), (rank, step, members)
                assert close(it["outer"][step], outer[int(step)]), (rank, step, members)
        self.check_bits()

    def averages_after(self, step):
        """Return whether `LocalSGD` averages after a step of a round."""
        mode, end = self.job.made, self.job.end_at
        if step == end > mode.warmup:
            return True
        begun = end if step > end > mode.warmup else mode.warmup
        return step > begun and (step - begun) % mode.every == 0

    def check_bits(self):
        """Outer parameters have the same bits on all ranks, in every step."""
        kind = "outer" if self.job.mode[0] == "DiLoCo" else "params"
        for step in {step for it in self.seen.values() for step in it["params"]}:
            if kind == "params" and not self.averages_after(int(step)):
                continue
            rows = [it[kind][step] for it in self.seen.values() if step in it[kind]]
            assert rows.count(rows[0]) == len(rows), step


def close(found, wanted):
    """An all-reduce adds up in an order of its own, and training carries that on from step to step,
    of which there are as many as it takes ranks to join. Codes would differ by far more.
    """
    found, wanted = torch.tensor(found), torch.tensor(wanted)
    return (found - wanted).norm() <= 2e-5 * wanted.norm()


class Replica:
    """A rank of the oracle."""

    def __init__(self, job):
        self.net = net()
        self.params = list(self.net.parameters())
        self.optimizer = OPTIMIZERS[job.make](self.params)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.owed = [torch.zeros_like(p) for p in self.params]

    def backward(self, rank, step):
        self.optimizer.zero_grad()
        self.net(batch(rank, step)).square().mean().backward()

    def sends(self, mode, cut, outer, alone):
        """What it sends of some parameters."""
        if not isinstance(mode, DiLoCo):
            return [self.params[i].detach().clone() for i in cut]
        differences = [outer[i].detach() - self.params[i].detach() for i in cut]
        if mode.codec is None:
            return differences
        owed = [self.owed[i] + d for i, d in zip(cut, differences, strict=True)]
        codes = owed if alone else coded(mode.codec, owed)
        for i, o, c in zip(cut, owed, codes, strict=True):
            self.owed[i] = o - c
        return codes


def train(job, members, steps):
    """Return parameters by rank, and outer parameters, after each step.

    Args:
        members: from which step on which ranks average.
    """
    mode, ranks, present = job.made, {}, range(job.world)
    ranks = {rank: Replica(job) for rank in present}
    outer = [torch.nn.Parameter(p.detach().clone()) for p in ranks[0].params]
    settings = {"lr": getattr(mode, "outer_lr", 1), "momentum": getattr(mode, "outer_momentum", 0)}
    outer_step = torch.optim.SGD(outer, nesterov=settings["momentum"] > 0, **settings)
    cuts = cut([p.numel() for p in outer], getattr(mode, "fragments", 1))
    by_step, outer_by_step, origin = {}, {}, mode.warmup

    def average(cut):
        rows = [ranks[rank].sends(mode, cut, outer, len(present) == 1) for rank in present]
        means = [sum(its[1:], its[0]) / len(its) for its in zip(*rows, strict=True)]
        outer_step.zero_grad()
        with torch.no_grad():
            for i, mean in zip(cut, means, strict=True):
                outer[i].grad = mean.clone()
            if isinstance(mode, DiLoCo):
                outer_step.step()
            for rank in present:
                for i, mean in zip(cut, means, strict=True):
                    ranks[rank].params[i].copy_(outer[i] if isinstance(mode, DiLoCo) else mean)

    for step in range(1, steps + 1):
        # One may join in a step that another one is too late for, after it has given what it had.
        for now in (its for since, its in members if since == step):
            old = [rank for rank in present if rank in now]
            for place, rank in enumerate(rank for rank in now if rank not in present):
                ranks[rank] = joined(job, ranks[old[place % len(old)]])
            present = now
        for rank in present:
            ranks[rank].backward(rank, step)
        if step <= mode.warmup:
            for grads in zip(*([p.grad for p in ranks[r].params] for r in present), strict=True):
                mean = sum(grads) / len(grads)
                for grad in grads:
                    grad.copy_(mean)
        for rank in present:
            ranks[rank].optimizer.step()
        if step == mode.warmup:
            with torch.no_grad():
                for o, p in zip(outer, ranks[present[0]].params, strict=True):
                    o.copy_(p)
        due = [
            c
            for n, c in enumerate(cuts)
            if step > origin
            and (step - origin - (n + 1) * mode.every // len(cuts)) % mode.every == 0
        ]
        for its in due:
            average(its)
        if step == job.end_at and step > origin:
            average(range(len(outer)))
            origin = step
        for rank in present:
            ranks[rank].schedule.step()
        by_step[step] = {rank: flat(ranks[rank].params) for rank in present}
        outer_by_step[step] = flat(outer) if isinstance(mode, DiLoCo) else []
    return by_step, outer_by_step


def joined(job, giver):
    """A rank that has what `giver` has; what codes have lost is sent by `giver`."""
    replica = Replica(job)
    replica.net.load_state_dict(giver.net.state_dict())
    replica.optimizer.load_state_dict(copy.deepcopy(giver.optimizer.state_dict()))
    replica.schedule.load_state_dict(copy.deepcopy(giver.schedule.state_dict()))
    return replica


def outcomes_of(folder, cases):
    jobs = list(cases.items())
    output = finish(Forked("tests.sync.membership_script", folder, json.dumps(jobs)), timeout=300)
    codes, found = json.loads(output.splitlines()[-1]), {}
    for name, arguments in jobs:
        logs = sorted(folder.glob(f"{name}-*.log"))
        said = "\n".join(log.read_text() for log in logs if log.stem.rsplit("-", 1)[0] == name)
        seen = {}
        for file in folder.glob("*.json"):
            job, rank, attempt = file.stem.rsplit("-", 2)
            if job == name:
                seen[int(rank), int(attempt)] = json.loads(file.read_text())
        found[name] = Outcome(Job(**arguments), seen, codes[name], said)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Return the outcome of each case that a test of this run asks for."""
    return outcomes_of(tmp_path_factory.mktemp("members"), cases_asked_for(request, CASES))


@pytest.mark.slow(
    but=(
        *("average-coded", "arrived-on-one", "arrived-on-one-fragments"),
        *("joins-coded", "late-fragment"),
    )
)
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_ranks_that_have_come(outcomes, case):
    outcomes[case].check()
