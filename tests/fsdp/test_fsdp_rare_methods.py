"""Methods of FSDP2's that few scripts call: each is there, and does what it says or says that it
cannot."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule

from fastsync import FSDPModule, fully_shard
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import OPTIMIZERS, Block, apply, farthest, loss_of, net, whole, words
from tests.helpers.teams import run_ranks

PUBLIC = [name for name in vars(TorchModule) if not name.startswith("_")]


def signature(function):
    parameters = list(inspect.signature(function).parameters.values())
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize("name", PUBLIC)
def test_methods_are_torchs(name):
    """None is torch's own, which would ask for a state that modules here do not have."""
    classes = FSDPModule.__mro__
    ours = next(cls for cls in classes if name in vars(cls))
    assert classes.index(ours) < classes.index(TorchModule)
    assert signature(vars(ours)[name]) == signature(vars(TorchModule)[name])


class Listed(nn.Module):
    """An embedding that is a unit, and what computes with its rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(11, 17), Block()
        self.head = nn.Linear(17, 11)

    def forward(self, batch):
        return self.head(self.block(self.embed(batch)))


def not_in_backward(rank, world, gathered):
    """Gradients, and how many gathers a step takes."""
    model = Listed()
    for unit in (model.embed, model.block, model):
        fully_shard(unit)
    model.embed.set_unshard_in_backward(gathered)
    counts = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, words(rank, step)).backward()
        counts.append(sum(counted["gathers"] for counted in state_of(model).context.counters()))
    return whole([p.grad for p in model.parameters()]), counts[2] - counts[1]


def test_an_embedding_need_not_be_gathered_in_backward():
    alone = Listed()
    for rank in range(2):
        (loss_of(alone, words(rank, 2)) / 2).backward()
    for gathered, gathers in ((True, 5), (False, 4)):
        for found, taken in run_ranks(not_in_backward, 2, gathered):
            assert farthest(found, [p.grad for p in alone.parameters()]) <= 1e-6
            assert taken == gathers


def asked_for_what_is_so(model):
    model.set_post_optim_event(torch.Event("cpu"))
    model.set_reduce_scatter_unused_params(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_separate_reduce_scatter_group(False)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model._set_unshard_async_op(True)


def told(rank, world, tell):
    model = apply(fully_shard, net())
    if tell:
        asked_for_what_is_so(model)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_reduce_scatter_divide_factor(1.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loss_of(model, words(rank, 0)).backward()
    optimizer.step()
    return whole(model.parameters())


def test_what_is_always_so_may_be_asked_for():
    alone = net()
    optimizer = OPTIMIZERS["sgd"](alone.parameters())
    for rank in range(2):  # sums, for a divisor of 1
        loss_of(alone, words(rank, 0)).backward()
    optimizer.step()
    for tell in (False, True):
        for found in run_ranks(told, 2, tell):
            assert farthest(found, alone.parameters()) <= 1e-6


REFUSED = {
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_symm_mem_for_comm": (),
    "set_separate_reduce_scatter_group": (),
}


def refuse(rank, world):
    layer = fully_shard(nn.Linear(3, 3))
    for name, args in REFUSED.items():
        with pytest.raises(NotImplementedError, match=rf"does not support {name}\(\)"):
            getattr(layer, name)(*args)


def test_what_is_not_supported_is_an_error():
    run_ranks(refuse, 2)
