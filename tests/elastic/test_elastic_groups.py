"""Survivors' process groups, and what survivors refuse: without a GPU, over Gloo."""

from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync._build.env import NCCL_LETS_LIVE
from fastsync._torch import (
    break_group,
    connect_group,
    group_store,
    is_gloo,
    make_group,
    renewed_backend,
    set_group_timeout,
    talks_by_gloo,
)
from fastsync.config.arguments import grouped
from fastsync.config.fault_policies import ElasticPolicy
from fastsync.config.policy import SyncPolicy
from fastsync.config.topology import Network
from fastsync.reducer.agreement import PlanFacts, agree_on_plan
from fastsync.testing import run_ranks
from tests.helpers.scripts import Forked, finish

PATIENCE = timedelta(seconds=30)


def leave_and_go_on(rank, world):
    """The last rank does not come to the sum of all. The others make a group of their own."""
    group = dist.group.WORLD
    if rank == world - 1:
        return 0.0
    waiting = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    break_group(group)
    backend = renewed_backend(group)
    again = make_group(group_store(group), rank, list(range(world - 1)), "again", PATIENCE, backend)
    connect_group(again, torch.device("cpu"))
    set_group_timeout(again, 2 * PATIENCE)
    assert is_gloo(again) and talks_by_gloo(again)
    total = torch.ones(1)
    dist.all_reduce(total, group=again)
    assert not waiting.is_completed()
    return total.item()


def test_a_group_is_broken_and_made_anew_while_a_sum_waits_for_who_is_gone():
    assert run_ranks(leave_and_go_on, 3) == [2.0, 2.0, 0.0]


class InPython(dist.ProcessGroup):
    """Process group that tells nothing of its backends."""


def kinds(rank, world):
    on_gpus = dist.new_group(backend="cuda:gloo")
    on_cpus = dist.new_group(backend="cpu:gloo")
    groups = [dist.group.WORLD, on_cpus, on_gpus, InPython(rank, world)]
    return [renewed_backend(g) for g in groups], [talks_by_gloo(g) for g in groups]


def test_groups_that_can_be_made_anew():
    for backends, talks in run_ranks(kinds, 2):
        assert backends == ["gloo", "gloo", None, None]
        assert talks == [True, True, False, False]


class Told:
    """A group as far as it tells of its backends; those of `aborted` were told to abort."""

    def __init__(self, **backends):
        self.backends, self.aborted = backends, []
        self._device_types = [torch.device(name) for name in backends]

    def _get_backend(self, device):
        name = self.backends[device.type]
        return SimpleNamespace(name=lambda: name, abort=lambda: self.aborted.append(device.type))


def test_which_backends_are_made_anew_and_which_are_aborted():
    both = Told(cuda="nccl", cpu="gloo")
    assert renewed_backend(both) == "cpu:gloo,cuda:nccl" and talks_by_gloo(both)
    assert not is_gloo(both)
    break_group(both)
    assert both.aborted == ["cuda"]
    for other in (Told(cpu="nccl", cuda="nccl"), Told(cpu="gloo", cuda="ucc"), Told(cuda="nccl")):
        assert renewed_backend(other) is None
    gloo = Told(cpu="gloo", cuda="gloo")
    break_group(gloo)
    assert not gloo.aborted and is_gloo(gloo) and renewed_backend(gloo) == "gloo"


def agree_for_gpus(rank, world):
    mine = PlanFacts([rank == 0, True], [1, 0] if rank == 0 else [0, 1], Network(1e9 * rank, 0.0))
    agreed = agree_on_plan(mine, dist.group.WORLD, torch.device("cuda"))
    return agreed.trained, agreed.order, agreed.network


def test_what_ranks_with_gpus_tell_each_other_travels_between_hosts():
    """There is no GPU to tell it on. The latency of a device's collectives is not measured."""
    for found in run_ranks(agree_for_gpus, 2):
        assert found == ([True, True], [1, 0], Network(1e9, 0.0))


REFUSED = {
    "zero=1": {"zero": 1},
    "wire='int8'": {"wire": "int8"},
    "wire='bf16, form=two_shot'": {"wire": fastsync.Wire("bf16", "two_shot")},
}


def refusals(rank, world):
    found = {}
    for name, options in REFUSED.items():
        try:
            fastsync.FastDDP(
                nn.Linear(2, 2, device="meta"),
                faults=fastsync.Faults(elastic=True),
                **grouped(options),
            )
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_has_no_way_back_from_gpus_is_refused_by_name():
    for found in run_ranks(refusals, 2):
        assert list(found) == list(REFUSED)
        for name, text in found.items():
            assert f"elastic with parameters on GPUs does not go with {name}" in text


def test_no_step_of_it_is_captured_into_a_graph():
    assert "leave elastic out" in SyncPolicy(elastic=ElasticPolicy()).uncapturable
    assert not SyncPolicy().uncapturable


def test_the_launcher_has_torch_leave_ranks_alive(monkeypatch, tmp_path):
    """Unless the user says otherwise, as of one of two variables here."""
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    for name in NCCL_LETS_LIVE:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "says.py"
    script.write_text("import os\nprint(*(f'{n}={v}' for n, v in os.environ.items()), sep='\\n')\n")
    said = finish(Forked("fastsync.elastic", "--nproc-per-node", 1, script)).splitlines()
    assert own.keys() < NCCL_LETS_LIVE.keys()
    assert {f"{name}={value}" for name, value in (NCCL_LETS_LIVE | own).items()} <= {*said}
