"""Arguments and methods that have no test of their own elsewhere, against torch's DDP."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastsync import FastDDP
from tests.helpers.models import batch, build, differences, grads, loss_of, state, wrap
from tests.helpers.teams import run_ranks

ARGUMENTS = {
    "dim": lambda model: {"dim": 1},
    "device_ids": lambda model: {"device_ids": []},
    "device_ids, output_device": lambda model: {"device_ids": None, "output_device": None},
    "check_reduction": lambda model: {"check_reduction": True},
    "find_unused_parameters": lambda model: {"find_unused_parameters": True},
    "gradient_as_bucket_view": lambda model: {"gradient_as_bucket_view": True},
    "static_graph": lambda model: {"static_graph": True},
    "skip_all_reduce_unused_params": lambda model: {
        "skip_all_reduce_unused_params": True,
        "find_unused_parameters": True,
    },
    "batched_grad_copy": lambda model: {"batched_grad_copy": True},
    "bucket_cap_mb_list": lambda model: {"bucket_cap_mb_list": [1, 2]},
    "process_group": lambda model: {"process_group": dist.new_group([0, 1])},
}


def trained(kind, rank, argument):
    model = build("many")
    wrapped = wrap(kind, model, **ARGUMENTS[argument](model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(wrapped(batch("many", 10 * step + rank))).backward()
        optimizer.step()
    return state(wrapped)


def compare_arguments(rank, world):
    warnings.simplefilter("ignore")
    torchs = DistributedDataParallel.__init__.__code__.co_varnames
    known = [a for a in ARGUMENTS if a != "batched_grad_copy" or a in torchs]
    return {a: differences(trained("fast", rank, a), trained("torch", rank, a)) for a in known}


def test_arguments_train_to_the_bits_of_ddp():
    for found in run_ranks(compare_arguments, 2):
        assert {argument: names for argument, names in found.items() if names} == {}


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def skip_unused(rank, world):
    sent = {}
    for skip in (True, False):
        model = FastDDP(
            Skipping(),
            bucket_cap_mb=1e-6,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skip,
        )
        model(torch.full((1, 4), float(rank))).sum().backward()
        sent[skip] = model.sync_stats()["collectives"]
    return sent, grads(model)["idle.weight"]


def test_buckets_that_nobody_uses_are_not_sent():
    assert run_ranks(skip_unused, 2) == [({True: 2, False: 4}, None)] * 2


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def helpers(rank, world):
    found = []
    x = torch.ones(2, 4)
    for kind in ("fast", "torch"):
        model = wrap(kind, Skipping(), dim=0)
        found.append(
            [
                outcome(lambda m=model: m.scatter((x,), {"y": x}, [0])),
                outcome(lambda m=model: m.to_kwargs((x,), {"y": x}, 0)),
                outcome(lambda m=model: m.gather([x, x], "cpu")),
                model.train(False) is model and not model.module.training,
                model.train().module.training,
                model.join_device,
                model.join_process_group is model.process_group,
                type(model.join_hook(divide_by_initial_world_size=True)).__name__,
                model.will_sync_module_buffers(),
                wrap(kind, build("conv")).will_sync_module_buffers(),
                [name for name, _ in model.named_parameters()],
            ]
        )
    return [str(a) == str(b) for a, b in zip(*found, strict=True)]


def test_helpers_answer_as_ddps():
    for found in run_ranks(helpers, 2):
        assert all(found), found
