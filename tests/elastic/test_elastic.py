"""Trainings that survive the death of ranks: real processes, real signals, and the weights of the
rest.

The survivors must have, bit for bit, the weights of a training without elastic= with the survivors'
ranks from the step on that they name.
"""

import json
import random
import socket
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.config.arguments import grouped
from fastsync.testing import run_ranks
from tests.elastic.elastic_script import STEPS
from tests.helpers.scripts import cases_asked_for, run_jobs

SCRIPT = "tests.elastic.elastic_script"
# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "forward": (3, [(1, 2, "forward")], {}),
    "before": (3, [(2, 3, "before")], {"memory": False}),
    "between": (3, [(1, 2, "between")], {}),
    "between-gloo": (4, [(2, 3, "between")], {"memory": False, "destroys": True}),
    "after": (3, [(1, 2, "after")], {}),
    "after-gloo": (4, [(3, 2, "after")], {"memory": False}),
    "optimizer": (3, [(1, 2, "optimizer")], {}),
    "optimizer-gloo": (4, [(1, 2, "optimizer")], {"memory": False, "destroys": True}),
    "first-rank": (3, [(0, 2, "between")], {}),
    "first-rank-gloo": (4, [(0, 3, "between")], {"memory": False}),
    "first-step": (3, [(2, 0, "between")], {}),
    "first-step-gloo": (3, [(0, 0, "after")], {"memory": False}),
    "second-step-gloo": (3, [(1, 1, "forward")], {"memory": False}),
    "two-to-one": (2, [(0, 2, "between")], {}),
    "two-to-one-gloo": (2, [(1, 3, "after")], {"memory": False, "destroys": True}),
    "one-by-one": (4, [(3, 1, "between"), (0, 3, "forward")], {}),
    "one-by-one-gloo": (4, [(1, 2, "after"), (3, 4, "before")], {"memory": False}),
    "down-to-one-gloo": (3, [(1, 2, "between"), (0, 4, "between")], {"memory": False}),
    "two-at-once": (4, [(1, 2, "forward"), (3, 2, "between")], {}),
    "two-at-once-gloo": (4, [(1, 2, "forward"), (3, 2, "between")], {"memory": False}),
    "raises": (3, [(1, 2, "forward")], {"fails": True}),
    "raises-gloo": (3, [(2, 2, "forward")], {"fails": True, "memory": False}),
    "raises-lingers-gloo": (
        3,
        [(1, 2, "between")],
        {"fails": True, "lingers": True, "memory": False, "destroys": True},
    ),
    "accumulates": (3, [(1, 2, "between")], {"local": True}),
    "accumulates-gloo": (3, [(0, 2, "after")], {"local": True, "memory": False}),
    "copies": (3, [(1, 2, "after")], {"options": {"gradient_as_bucket_view": False}}),
    "copies-gloo": (
        3,
        [(1, 2, "after")],
        {"options": {"gradient_as_bucket_view": False}, "memory": False, "local": True},
    ),
    "sum": (3, [(1, 2, "between")], {"elastic": {"rescale": "sum_of_start"}, "divisor": 3}),
    "sum-alone": (2, [(1, 2, "between")], {"elastic": {"rescale": "sum_of_start"}, "divisor": 2}),
    "wide-gloo": (3, [(1, 2, "between")], {"memory": False, "width": 400}),
    "wide": (3, [(1, 2, "between")], {"width": 400}),
}


def run(folder, jobs, script=SCRIPT):
    """Return what each rank of each job has seen, and how it ended."""
    codes, seen = {}, {}
    for _, said in run_jobs(script, folder, jobs, timeout=500):
        codes |= said
    for name, arguments in jobs:
        files = [folder / f"{name}-{rank}.json" for rank in range(arguments["world"])]
        seen[name] = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    return codes, seen


def logs(folder, name, world):
    return "\n".join((folder / f"{name}-{rank}.log").read_text() for rank in range(world))


@dataclass
class Outcome:
    """Observations of the ranks of a training with deaths, and of one without.

    Attributes:
        changes: the ranks that train, and from which step on.
        codes: exit code of each rank.
        said: output of all ranks.
    """

    job: dict
    seen: list
    codes: list
    said: str
    expected: list | None = None  # what the others have seen

    @property
    def left(self):
        dead = {rank for rank, _, _ in self.job["deaths"]}
        return [rank for rank in range(self.job["world"]) if rank not in dead]

    @property
    def changes(self):
        """A rank that learns of two deaths at once has not seen the ranks in between."""
        return max((self.seen[rank].get("members", []) for rank in self.left), key=len)[1:]

    @property
    def reference(self):
        changed = {"deaths": [], "changes": self.changes, "elastic": False, "fails": False}
        return {**self.job, **changed}


def outcomes_of(folder, cases, script=SCRIPT, plain=None):
    """`plain`: what else differs in the trainings without deaths."""
    jobs = [
        (name, {"world": world, "deaths": deaths, "elastic": True, **options})
        for name, (world, deaths, options) in cases.items()
    ]
    codes, seen = run(folder, jobs, script)
    found = {
        name: Outcome(job, seen[name], codes[name], logs(folder, name, job["world"]))
        for name, job in jobs
    }
    references = [(f"{name}-reference", it.reference | (plain or {})) for name, it in found.items()]
    _, known = run(folder, references, script)
    for name, it in found.items():
        it.expected = known[f"{name}-reference"]
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Return the outcome of each case that a test of this run asks for."""
    return outcomes_of(tmp_path_factory.mktemp("elastic"), cases_asked_for(request, CASES))


def check(outcome):
    left, said = outcome.left, outcome.said
    assert [outcome.codes[rank] for rank in left] == [0] * len(left), said
    steps = outcome.job.get("steps", STEPS)
    for rank in left:
        members = outcome.seen[rank]["members"]
        assert not outcome.changes or members[-1] == outcome.changes[-1], members
        expected = outcome.expected[rank]["weights"]
        assert len(expected) == steps
        assert outcome.seen[rank]["weights"] == expected, (rank, members, said)


@pytest.mark.slow(but=("between-gloo",))
@pytest.mark.parametrize("case", CASES)
def test_survivors_weights_are_those_of_fewer_ranks(outcomes, case):
    outcome = outcomes[case]
    check(outcome)
    assert outcome.changes[-1][1] == outcome.left
    for rank, _, _ in CASES[case][1]:
        # It is unknown how a process ended whose parent has waited for it by then.
        ended = ("was killed by SIGKILL", "ended without a word")
        how = ("raised ValueError: bad batch",) if "raises" in case else ended
        assert any(f"rank {rank} {words}" in outcome.said for words in how), outcome.said


@pytest.mark.slow
def test_a_death_after_the_last_step_changes_nothing(tmp_path):
    cases = {"last": (3, [(1, STEPS - 1, "optimizer")], {})}
    outcome = outcomes_of(tmp_path, cases)["last"]
    check(outcome)
    assert not outcome.changes


def drawn(seed):
    """Deaths of one or two of four ranks, at any time of any step."""
    draw = random.Random(seed)
    dead = draw.sample(range(4), draw.choice((1, 2)))
    deaths = [(rank, draw.randrange(STEPS), round(draw.uniform(0, 15), 1)) for rank in dead]
    return 4, deaths, {"memory": draw.random() < 0.5, "destroys": draw.random() < 0.5}


@pytest.mark.slow
def test_deaths_at_any_time(tmp_path):
    """Wherever that finds the ranks; perhaps at their end."""
    for name, outcome in outcomes_of(tmp_path, {f"{s}": drawn(s) for s in range(8)}).items():
        assert None not in outcome.codes, (name, outcome.said)
        check(outcome)


def errors(folder, script=SCRIPT, **arguments):
    """Return what the ranks that are left have raised; by default rank 0 dies."""
    job = {"world": 3, "deaths": [(0, 2, "between")], "elastic": True, **arguments}
    codes, seen = run(folder, [("job", job)], script)
    assert None not in codes["job"], codes
    dead = {rank for rank, _, _ in job["deaths"]}
    return [found["error"] for rank, found in enumerate(seen["job"]) if rank not in dead]


@pytest.mark.slow
def test_too_few_ranks_end_the_training(tmp_path):
    for text in errors(tmp_path, elastic={"min_ranks": 3}):
        assert text.startswith("SyncFault: fastsync: rank 0 was killed by SIGKILL.")
        assert "[1, 2], are fewer than min_ranks=3" in text


@pytest.mark.slow
def test_a_store_that_dies_with_its_rank_ends_the_training(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for text in errors(tmp_path, port=port):
        assert "the rendezvous store has gone with them" in text
        assert "python -m fastsync.elastic" in text


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x):
        return self.layers(x)


class Bytes(fastsync.Codec):
    name = "bytes"

    def coded_bytes(self, numel):
        return numel


REFUSED = {
    "zero=3": {"zero": 3},
    "shard_by='element'": {"zero": 1, "shard_by": "element"},
    "wire='topk(density=0.01)'": {"wire": "topk"},
    "wire='bytes'": {"wire": Bytes()},
    "overrides={'*': 'bytes'}": {"wire": fastsync.Wire("int8", overrides={"*": Bytes()})},
    "in any form but the hierarchical one": {"wire": fastsync.Wire("int8", "hierarchical")},
    "wire='int8' and zero=1": {"wire": "int8", "zero": 1},
    "static_graph": {"static_graph": True},
    "skip_all_reduce_unused_params": {"skip_all_reduce_unused_params": True},
    "nonfinite='raise'": {"nonfinite": "raise"},
    "replicas": {"replicas": True},
    "on_skip='average_others'": {"on_skip": "average_others"},
    "timeline": {"timeline": True},
    "broadcast_buffers=False": {"module": WithBuffers},
    "Embedding(sparse=False)": {"module": lambda: nn.Embedding(4, 2, sparse=True)},
    "min_ranks is 3, but only 2": {"elastic": fastsync.ElasticPolicy(min_ranks=3)},
}


def text_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def refusals(rank, world):
    found = {}
    for name, options in REFUSED.items():
        module = options.get("module", lambda: nn.Linear(2, 2))()
        given = {"elastic": True, **{k: v for k, v in options.items() if k != "module"}}
        found[name] = text_of(lambda m=module, g=given: fastsync.FastDDP(m, **grouped(g)))
    model = fastsync.FastDDP(nn.Linear(2, 2), faults=fastsync.Faults(elastic=True))
    found["hook"] = text_of(lambda: model.register_comm_hook(None, lambda state, bucket: None))
    found["join()"] = text_of(lambda: model.join())
    found["wire"] = text_of(lambda: model.set_wire("topk"))
    model(torch.ones(1, 2)).sum().backward()
    return found


def test_what_cannot_be_survived_is_refused_by_name():
    for found in run_ranks(refusals, 2):
        for name, text in found.items():
            assert "elastic" in text and name in text, (name, text)


def meet_in_a_file(rank, world, path):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fastsync.FastDDP(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return text_of(lambda: fastsync.FastDDP(nn.Linear(2, 2), faults=fastsync.Faults(elastic=True)))


def test_a_store_in_a_file_is_refused(tmp_path):
    """Others train with one."""
    for text in run_ranks(meet_in_a_file, 2, tmp_path / "store"):
        assert "elastic does not go with a rendezvous store that is no TCP store" in text
