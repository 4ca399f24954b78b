"""Ranks that die and come back: real processes, real signals, and the weights of all ranks.

All must have, bit for bit, the weights of a training without elastic= that has had those ranks from
those steps on, and in which a rank that comes back is sent what the first of the others has.
"""

import json
import os
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.config.arguments import grouped
from fastsync.reducer.state_transfer import give, receive
from fastsync.testing import run_ranks
from tests.helpers.scripts import Forked, cases_asked_for, finish

# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "one": (3, [(1, 3, "between")], {}),
    "one-gloo": (3, [(2, 3, "forward")], {"memory": False}),
    "first-rank": (3, [(0, 2, "between")], {"optimizer": "SGD"}),
    "first-rank-gloo": (3, [(0, 4, "optimizer")], {"memory": False, "optimizer": "SGD"}),
    "two-to-one": (2, [(1, 2, "after")], {"buffers": True}),
    "two-to-one-first": (2, [(0, 3, "between")], {"memory": False}),
    "of-four": (4, [(2, 3, "between")], {"buffers": True}),
    "of-four-gloo": (4, [(3, 2, "between")], {"memory": False, "buffers": True}),
    "both": (3, [(0, 3, "between"), (2, 3, "between")], {}),
    "one-by-one-gloo": (3, [(1, 2, "between"), (2, 5, "between")], {"memory": False}),
    "accumulates": (3, [(1, 2, "between")], {"local": True}),
    "sum": (3, [(1, 2, "between")], {"elastic": {"rescale": "sum_of_start"}}),
    "every-third": (3, [(1, 4, "between")], {"every": 3}),
    "frozen": (3, [(1, 6, "between")], {"freezes": 0}),
}


SCRIPT = "tests.elastic.rejoin_script"


def run(folder, jobs, script=SCRIPT):
    """Return what each process of each job has seen, by rank and by its turn, and how it ended."""
    output = finish(Forked(script, folder, json.dumps(jobs)), timeout=300)
    codes = json.loads(output.splitlines()[-1])
    seen = {}
    for name, arguments in jobs:
        ranks = arguments["world"] + arguments.get("joins", 0)
        logs = [folder / f"{name}-{rank}.log" for rank in range(ranks)]
        found = {}
        for file in folder.glob("*.json"):
            job, rank, attempt = file.stem.rsplit("-", 2)
            if job == name:
                found[int(rank), int(attempt)] = json.loads(file.read_text())
        said = "\n".join(log.read_text() for log in logs if log.exists())
        seen[name] = Outcome(arguments, found, codes[name], said)
    return seen


@dataclass
class Outcome:
    """Observations of the processes of a training, how they ended, and what they said."""

    job: dict
    seen: dict
    codes: list
    said: str
    expected: "Outcome | None" = None

    @property
    def world(self):
        """All ranks that there have been."""
        return list(range(self.job["world"] + self.job.get("joins", 0)))

    @property
    def members(self):
        """From which step on which ranks train, as the rank saw it that was there longest."""
        return max((it.get("members", []) for it in self.seen.values()), key=len)

    @property
    def ended_well(self):
        return sorted(rank for rank, _, code in self.codes if code == 0)

    @property
    def errors(self):
        return [it["error"] for it in self.seen.values() if "error" in it]

    def check(self):
        """All ranks end in it, with the weights of a training without deaths."""
        assert self.ended_well == self.world, (self.codes, self.said)
        assert self.members[-1][1] == self.world, self.members
        for (rank, attempt), seen in self.seen.items():
            known = self.expected.seen[rank, 0]["weights"]
            for step, weights in seen.get("weights", {}).items():
                assert weights == known.get(step), (rank, attempt, step, self.members, self.said)

    def check_returns(self):
        """Check that the bits agree, no rank has an error, and dead ranks are back."""
        self.check()
        assert not self.errors
        for rank, _, _ in self.job["deaths"]:
            assert f"rank {rank} is back" in self.said


def outcomes_of(folder, cases, script=SCRIPT, plain=None):
    """Return the outcomes; `plain`: what else differs in the trainings without deaths."""
    jobs = [
        (name, {"world": world, "deaths": deaths, **options})
        for name, (world, deaths, options) in cases.items()
    ]
    found = run(folder, jobs, script)
    twins = []
    for name, it in found.items():
        made = (int(step) for seen in it.seen.values() for step in seen.get("weights", ()))
        steps = 1 + max(made, default=0)
        changed = {"deaths": [], "odd": {}, "again": [], "giver_dies": False, **(plain or {})}
        began = it.job["world"]
        if len(it.world) > began:
            changed |= {"world": len(it.world), "joins": 0, "began": began}
        changed |= {"changes": it.members[len(it.world) == began :], "steps": steps}
        twins.append((f"{name}.twin", it.job | changed))
    known = run(folder, twins, script)
    for name, it in found.items():
        it.expected = known[f"{name}.twin"]
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Return the outcome of each case that a test of this run asks for."""
    return outcomes_of(tmp_path_factory.mktemp("rejoin"), cases_asked_for(request, CASES))


@pytest.mark.slow(but=("one",))
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_a_training_with_as_many_ranks(outcomes, case):
    outcome = outcomes[case]
    outcome.check_returns()
    for rank, step, _ in CASES[case][1]:
        assert any(rank not in ranks and since > step for since, ranks in outcome.members)
        back = [it for (who, attempt), it in outcome.seen.items() if who == rank and attempt]
        first = min(int(step) for step in back[0]["weights"])
        assert first + 1 in [since for since, _ in outcome.members[2:]]


JOINS = {
    "one-joins": (2, [], {"joins": 1, "buffers": True}),
    "two-join-gloo": (2, [], {"joins": 2, "memory": False}),
    "joins-and-dies": (2, [], {"joins": 1, "again": [(2, 1, 2, "between")]}),
    "joins-and-sums": (2, [(0, 3, "after")], {"joins": 1, "elastic": {"rescale": "sum_of_start"}}),
}


@pytest.fixture(scope="module")
def joined(tmp_path_factory, request):
    return outcomes_of(tmp_path_factory.mktemp("joins"), cases_asked_for(request, JOINS))


@pytest.mark.slow
@pytest.mark.parametrize("case", JOINS)
def test_ranks_that_join_have_the_weights_of_a_training_with_as_many(joined, case):
    outcome = joined[case]
    outcome.check()
    assert not outcome.errors
    for rank in outcome.world[outcome.job["world"] :]:
        assert f"rank {rank} has joined" in outcome.said


ODD = {
    "dies-waiting": (3, [(1, 2, "between")], {"odd": {"1": "dies waiting"}}),
    "dies-taking": (3, [(1, 2, "between")], {"odd": {"1": "dies taking"}}),
    "dies-taking-gloo": (2, [(0, 2, "between")], {"odd": {"1": "dies taking"}, "memory": False}),
    "giver-dies": (3, [(1, 2, "between")], {"giver_dies": True}),
    "other-model": (3, [(1, 2, "between")], {"odd": {"1": "other model"}}),
    "no-catch_up": (2, [(1, 2, "between")], {"odd": {"1": "no catch_up"}}),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return outcomes_of(tmp_path_factory.mktemp("odd"), ODD)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dies-waiting", "dies-taking", "dies-taking-gloo"])
def test_who_dies_on_the_way_back_is_left_out_and_may_try_again(odd, case):
    odd[case].check()
    assert not odd[case].errors
    assert sorted(code for _, _, code in odd[case].codes)[:2] == [-9, -9]


@pytest.mark.slow
def test_a_death_of_who_gives_is_survived_and_both_come_back(odd):
    outcome = odd["giver-dies"]
    outcome.check()
    assert not outcome.errors
    assert "it tries again" in outcome.said
    assert [2] in [ranks for _, ranks in outcome.members]


@pytest.mark.slow
def test_another_model_is_refused_on_the_rank_that_brings_it(odd):
    outcome = odd["other-model"]
    outcome.check()
    (error,) = outcome.errors
    assert error.startswith(
        "RankMismatchError: rank 1 was started while others train, but differs"
    ), error
    assert "'layers.0.weight'" in error and "(24, 24)" in error


@pytest.mark.slow
def test_who_does_not_catch_up_does_not_train(odd):
    outcome = odd["no-catch_up"]
    outcome.check()
    (error,) = outcome.errors
    assert "call model.catch_up(optimizer) before the first step" in error


def drawn(seed):
    """Deaths of one or two of four ranks, at any time of two steps."""
    draw = random.Random(seed)
    dead = draw.sample(range(4), draw.choice((1, 2)))
    deaths = [(rank, draw.randrange(1, 6), round(draw.uniform(0, 15), 1)) for rank in dead]
    return 4, deaths, {"memory": draw.random() < 0.5, "buffers": draw.random() < 0.5}


@pytest.mark.slow
def test_deaths_and_returns_at_any_time(tmp_path):
    for outcome in outcomes_of(tmp_path, {f"{s}": drawn(s) for s in range(4)}).values():
        outcome.check()
        assert not outcome.errors, outcome.said


def drawn_joins(seed):
    """Up to two ranks that join, at any time, and perhaps a death."""
    draw = random.Random(seed)
    deaths = [(draw.randrange(2), draw.randrange(1, 6), round(draw.uniform(0, 15), 1))]
    times = [round(draw.uniform(0, 1.5), 2) for _ in range(draw.choice((1, 2)))]
    options = {"memory": draw.random() < 0.5, "buffers": draw.random() < 0.5}
    joins = {"joins": len(times), "joins_after": times}
    return draw.choice((2, 3)), deaths[: draw.choice((0, 1))], {**joins, **options}


@pytest.mark.slow
def test_ranks_join_at_any_time(tmp_path):
    for outcome in outcomes_of(tmp_path, {f"{s}": drawn_joins(s) for s in range(6)}).values():
        outcome.check()
        assert not outcome.errors, outcome.said


def given():
    draw = torch.Generator().manual_seed(0)
    large = [torch.randn(600, 700 + i, generator=draw) for i in range(5)]
    odd = [torch.zeros(0), torch.tensor(7), torch.arange(6).view(2, 3).T, torch.ones(3).bool()]
    return {"large": large, "odd": odd, "state": {"lr": 0.1, 3: large[0].half()}}


def fail():
    raise KeyError("no state")


def handed_over(rank, world):
    group = dist.group.WORLD
    if rank == 0:
        give(given, group, 1)
        give(fail, group, 1)
        return None
    return receive(group, 0), text_of(lambda: receive(group, 0))


def test_what_is_given_is_what_arrives():
    _, (taken, text) = run_ranks(handed_over, 2)
    for name in ("large", "odd"):
        for mine, theirs in zip(taken[name], given()[name], strict=True):
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)
    assert taken["state"]["lr"] == 0.1
    assert torch.equal(taken["state"][3], given()["large"][0].half())
    assert "cannot give its state: KeyError: 'no state'" in text


def text_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(rank, world):
    def model(**options):
        return fastsync.FastDDP(nn.Linear(2, 2), **grouped(options))

    found = [model(elastic=True).catch_up(), text_of(model().catch_up)]
    os.environ["FASTSYNC_ELASTIC_RANK"] = f"{rank}/{world}"  # as its launcher does
    first, second = model(elastic=True), model(elastic=True)
    return [*found, first.catch_up(), text_of(lambda: first.catch_up(1)), text_of(second.catch_up)]


def test_what_catch_up_refuses():
    for start_of_one, plain, begun, again, second in run_ranks(refusals, 2):
        assert start_of_one == begun == 0
        assert plain == "RuntimeError: catch_up() needs FastDDP(model, faults=Faults(elastic=True))"
        assert again.startswith("RuntimeError: catch_up() is given states once")
        assert second.startswith("ValueError: catch_up() of a second model")
