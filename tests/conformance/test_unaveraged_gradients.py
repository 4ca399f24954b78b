"""Steps on gradients that no backward has averaged."""

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fastsync import FastDDP
from tests.conformance.stages import Net, batch, check, full, loss_of, net, train
from tests.helpers.teams import run_ranks

# Each rank steps on pieces of the parameters.
SHARDED_STEPS = ("zero1", "zero1-small", "zero2")
REFUSED = r"not averaged and differ between the ranks, such as that of .*zero=0"


class Partly(Net):
    """Leaves the last layers out where it is told to."""

    def forward(self, x, whole=True):
        return super().forward(x) if whole else self.first(x)


def under_no_sync(model, x):
    with model.no_sync():
        loss_of(model(x)).backward()


def through_the_bare_module(model, x):
    loss_of(model.module(x)).backward()


def twice_through_one_graph(model, x):
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def one_layer_more(model, x):
    """A loss of one layer alone, after the backward that synchronises."""
    loss_of(model(x)).backward()
    loss_of(model.module.first(x)).backward()


def steps_on_what_is_there(wrap, rank, backward):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank)
    optimizer.zero_grad()
    backward(model, batch(rank, 3))
    optimizer.step()
    return full(model)


def averages_by_hand(wrap, rank):
    """As a script that sends all gradients in one message does."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        under_no_sync(model, batch(rank, step))
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
    return full(model)


def looks_aside(wrap, rank):
    """Gradients of another loss are thrown away before the step."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        through_the_bare_module(model, batch(rank, 50 + step))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model(batch(rank, step))).backward()
        kept = [param.grad.clone() for param in model.parameters()]
        through_the_bare_module(model, batch(rank, 70 + step))
        for param, grad in zip(model.parameters(), kept, strict=True):
            param.grad = grad
        optimizer.step()
    return full(model)


def averages_in_another_wrapper(wrap, rank):
    """The wrapper that shares the optimizer's state averages nothing from the second step on, and
    one rank alone uses what the optimizer steps on.
    """
    module = net(Partly)
    model = wrap(module, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(module.head.parameters(), 0.01)
    train(model, optimizer, rank, range(1))
    another = wrap(module, find_unused_parameters=True)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(another(batch(rank, step), rank == 1)).backward()
        optimizer.step()
    return full(another)


# zero=2 averages under no_sync(), too.
REFUSALS = [
    (backward, stage)
    for backward in (
        under_no_sync,
        through_the_bare_module,
        twice_through_one_graph,
        one_layer_more,
    )
    for stage in SHARDED_STEPS
    if (backward, stage) != (under_no_sync, "zero2")
]


@pytest.mark.parametrize(
    ("backward", "stage"), REFUSALS, ids=lambda value: getattr(value, "__name__", value)
)
def test_ranks_that_would_train_apart_get_an_error(backward, stage):
    check(steps_on_what_is_there, stage, backward, error=REFUSED)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ["zero0", *SHARDED_STEPS])
@pytest.mark.parametrize(
    "script",
    [averages_by_hand, looks_aside, averages_in_another_wrapper],
    ids=lambda s: s.__name__,
)
def test_equal_gradients_are_stepped_on(script, stage):
    check(script, stage)


def ends_while_another_reads(rank, world):
    """Rank 0 is stopped where it waits for rank 1, which has its error, and no model any more,
    before rank 0 goes on.
    """
    model = FastDDP(net(), zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank)
    twice_through_one_graph(model, batch(rank, 3))
    processes = [0] * world
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        time.sleep(0.5)
        os.kill(processes[0], signal.SIGSTOP)
        # Should rank 0 have been too late to wait, both go on together.
        goes_on = threading.Timer(5.0, os.kill, (processes[0], signal.SIGCONT))
        goes_on.start()
    try:
        optimizer.step()
    except RuntimeError as error:
        text = str(error)
    if rank == 1:
        del model, optimizer
        gc.collect()
        os.kill(processes[0], signal.SIGCONT)
        goes_on.cancel()
    return text


def test_the_error_of_a_slow_rank_is_the_same():
    for text in run_ranks(ends_while_another_reads, 2):
        assert re.search(REFUSED, text), text
