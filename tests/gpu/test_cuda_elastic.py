"""Trainings on GPUs that survive the death of ranks: the weights of the rest, as in
test_elastic.py.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fastsync
from fastsync._torch import (
    break_group,
    connect_group,
    group_store,
    make_group,
    renewed_backend,
)
from tests.elastic.test_elastic import check, outcomes_of
from tests.helpers.devices import needs_gpu, run_cuda_ranks

pytestmark = needs_gpu
# Ranks, deaths (rank, step, place), how they differ from the default.
CASES = {
    "forward": (3, [(1, 2, "forward")], {}),
    "before": (3, [(2, 3, "before")], {}),
    "between": (4, [(2, 3, "between")], {"destroys": True}),
    "after": (3, [(1, 2, "after")], {}),
    "optimizer": (3, [(1, 2, "optimizer")], {}),
    "first-rank": (3, [(0, 3, "between")], {}),
    "first-step": (3, [(0, 0, "after")], {}),
    "two-to-one": (2, [(1, 3, "after")], {}),
    "one-by-one": (4, [(1, 2, "after"), (3, 4, "before")], {}),
    "two-at-once": (4, [(1, 2, "forward"), (3, 2, "between")], {}),
    "raises": (3, [(2, 2, "forward")], {"fails": True}),
    "accumulates": (3, [(1, 2, "between")], {"local": True}),
    "copies": (3, [(1, 2, "after")], {"options": {"gradient_as_bucket_view": False}}),
    "streams": (3, [(1, 2, "between")], {"streams": True}),
    "streams-accumulates": (3, [(1, 3, "after")], {"streams": True, "local": True}),
    "wide": (3, [(1, 2, "between")], {"width": 1024}),
    "sum": (3, [(1, 2, "between")], {"elastic": {"rescale": "sum_of_start"}, "divisor": 3}),
    "bf16": (3, [(1, 2, "between")], {"options": {"wire": {"format": "bf16", "form": "native"}}}),
}


# Sums of two ranks have the same bits in any communicator.
NCCL_CASES = {
    "forward": (3, [(1, 2, "forward")], {}),
    "between": (3, [(2, 3, "between")], {}),
    "after": (3, [(1, 2, "after")], {}),
    "optimizer": (3, [(1, 2, "optimizer")], {}),
    "first-rank": (3, [(0, 3, "between")], {}),
    "first-step": (2, [(1, 0, "between")], {}),
    "two-to-one": (2, [(1, 3, "after")], {}),
    "down-to-one": (3, [(1, 2, "between"), (0, 4, "between")], {}),
    "raises": (3, [(2, 2, "forward")], {"fails": True}),
    "accumulates": (3, [(1, 2, "between")], {"local": True}),
    "streams": (3, [(1, 2, "between")], {"streams": True}),
    "destroys": (2, [(0, 2, "forward")], {"destroys": True}),
}
BOTH = "cpu:gloo,cuda:nccl"


def at_once(cases, number=3):
    """Return the names of each batch of cases that ranks run at the same time."""
    names = list(cases)
    return [names[first : first + number] for first in range(0, len(names), number)]


def check_on_gpus(folder, cases, names, backend):
    on_gpus = {"device": "cuda", "backend": backend}
    chosen = {}
    for name in names:
        world, deaths, more = cases[name]
        chosen[name] = (world, deaths, {**more, **on_gpus})
    for outcome in outcomes_of(folder, chosen).values():
        check(outcome)
        assert outcome.changes[-1][1] == outcome.left


@pytest.mark.parametrize("names", at_once(CASES), ids=", ".join)
def test_survivors_weights_are_those_of_fewer_ranks(tmp_path, names):
    """Over Gloo, which moves what lies on GPUs."""
    check_on_gpus(tmp_path, CASES, names, "gloo")


@pytest.mark.parametrize("names", at_once(NCCL_CASES), ids=", ".join)
def test_survivors_abort_a_communicator_and_make_another(tmp_path, names):
    check_on_gpus(tmp_path, NCCL_CASES, names, BOTH)


def make_anew(rank, world, comes):
    """Ranks abort their communicator, and sum over another one; the last rank `comes` to a sum."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    numbers = torch.ones(1 << 20, device=device)
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    waiting = None
    if comes or rank < world - 1:
        waiting = dist.all_reduce(numbers.clone(), async_op=True)
    dist.barrier(dist.new_group(backend="gloo"))
    ended = waiting is not None and waiting.is_completed()
    break_group(group)
    torch.cuda.synchronize()  # no kernel waits any more
    ranks, backend = list(range(world)), renewed_backend(group)
    again = make_group(group_store(group), rank, ranks, "again", timedelta(seconds=30), backend)
    connect_group(again, device)
    total = torch.ones(8, device=device)
    dist.all_reduce(total, group=again)
    return comes or not ended, numbers[0].item(), total.tolist()


@pytest.mark.parametrize(("world", "comes"), [(1, True), (2, True), (2, False), (3, False)])
def test_a_communicator_is_aborted_and_made_anew(world, comes):
    """Abort a communicator where a rank does not come to a sum, on which the
    others' kernels wait.
    """
    for found in run_cuda_ranks(make_anew, world, comes, transport=BOTH):
        assert found == (True, world, [world] * 8)


def refusal(rank, world):
    try:
        fastsync.FastDDP(torch.nn.Linear(2, 2).cuda(), faults=fastsync.Faults(elastic=True))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("transport", "text"),
    [("nccl", "'cpu:gloo,cuda:nccl'"), (BOTH, "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 and")],
)
def test_nccl_that_would_end_survivors_is_refused(transport, text):
    for found in run_cuda_ranks(refusal, 2, transport=transport):
        assert text in found
