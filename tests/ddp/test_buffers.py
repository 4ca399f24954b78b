"""Buffers at each forward: DDP's values, without the broadcasts that could change none."""

import contextlib
import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync.ddp.fast_ddp as wrapped_front
from fastsync import FastDDP
from fastsync.ddp.buffers import broadcast, can_broadcast
from tests.helpers.teams import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def rows(rank, step):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step))


# What happens in each step: (mode, gradients, under no_sync).
TRAIN, SILENT, EVAL, TUNE, WATCH = (
    ("train", True, False),
    ("train", True, True),
    ("eval", False, False),
    ("eval", True, False),
    ("train", False, False),
)
SCRIPT = (TRAIN, EVAL, EVAL, TRAIN, SILENT, SILENT, TRAIN, TUNE, TUNE, TUNE, TRAIN, WATCH, TUNE)


@contextlib.contextmanager
def counted():
    """Broadcast, by torch's function or ours."""
    sent = mock.Mock()
    theirs, ours = dist._broadcast_coalesced, wrapped_front.broadcast
    with (
        mock.patch.object(dist, "_broadcast_coalesced", lambda *a: (sent(), theirs(*a))),
        mock.patch.object(wrapped_front, "broadcast", lambda *a: (sent(), ours(*a))),
    ):
        yield sent


def follow(wrapped, rank, script):
    """Outputs, buffers and the number of broadcasts after each step."""
    seen = []
    for step, (mode, differentiate, silent) in enumerate(script):
        wrapped.train(mode == "train")
        with (
            counted() as sent,
            torch.set_grad_enabled(differentiate),
            wrapped.no_sync() if silent else contextlib.nullcontext(),
        ):
            out = wrapped(rows(rank, step))
            if differentiate:
                out.square().sum().backward()
        buffers = [b.detach().clone() for b in wrapped.buffers()]
        seen.append((out.detach(), buffers, sent.call_count))
    return seen


def compare(rank, world, script, options):
    torch.manual_seed(rank)  # buffers and parameters start from rank 0's
    ours = follow(FastDDP(Net(), **options), rank, script)
    torch.manual_seed(rank)
    theirs = follow(DistributedDataParallel(Net(), **options), rank, script)
    same = [
        torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return same, [a[2] for a in ours], [b[2] for b in theirs]


# Not every version of torch has it.
SYNC_BUFFERS = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters


@pytest.mark.slow(but=("{'broadcast_buffers': False}",))
@pytest.mark.parametrize(
    "options",
    [{}, {"broadcast_buffers": False}, *([{"forward_sync_buffers": True}] * SYNC_BUFFERS)],
    ids=str,
)
def test_buffers_are_those_of_ddp_at_every_step(options):
    for same, ours, theirs in run_ranks(compare, 2, SCRIPT, options):
        assert same == [True] * len(SCRIPT)
        assert all(a <= b for a, b in zip(ours, theirs, strict=True))
        assert max(ours) == (0 if options.get("broadcast_buffers") is False else 1)


def test_nothing_is_sent_where_nothing_can_have_changed():
    """Fine-tuning with frozen statistics: DDP broadcasts them at every forward."""
    script = (TRAIN, TUNE, TUNE, TUNE, TRAIN, TUNE, TUNE)
    for same, ours, theirs in run_ranks(compare, 2, script, {}):
        assert same == [True] * len(script)
        assert theirs == [1] * len(script)
        assert ours == [1, 1, 0, 0, 0, 1, 0]


def part_in_training(rank, world):
    """The model evaluates, but its normalisation does not."""
    wrapped = FastDDP(Net())
    counts, buffers = [], []
    for step in range(4):
        wrapped.eval()
        wrapped.module.norm.train()
        with counted() as sent:
            wrapped(rows(rank, step)).sum().backward()
        counts.append(sent.call_count)
    wrapped.eval()
    wrapped(rows(rank, 9)).sum().backward()
    buffers = [b.clone() for b in wrapped.buffers()]
    return counts, buffers


def test_a_part_that_still_trains_is_synchronised():
    (counts, one), (_, other) = run_ranks(part_in_training, 2)
    assert counts == [1, 1, 1, 1]
    assert all(map(torch.equal, one, other))


def alone(rank, world):
    wrapped = FastDDP(Net())
    with counted() as sent:
        for step in range(3):
            wrapped(rows(rank, step)).sum().backward()
    return sent.call_count


def test_one_rank_has_nobody_to_tell():
    assert run_ranks(alone, 1) == [0]


def uneven(rank, world):
    """A rank that ran out of inputs takes part in the broadcasts of the others."""
    results = []
    for cls in (FastDDP, DistributedDataParallel):
        torch.manual_seed(0)
        wrapped = cls(Net())
        wrapped.eval()
        with wrapped.join():
            for step in range(1 + 2 * rank):
                wrapped(rows(rank, step)).square().sum().backward()
        results.append([b.clone() for b in wrapped.buffers()])
    return all(map(torch.equal, *results))


def test_uneven_inputs_in_eval_mode():
    assert run_ranks(uneven, 2) == [True, True]


def all_kinds():
    torch.manual_seed(5)
    return [
        torch.tensor(1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([True, False, True]),
        torch.randn(5).bfloat16(),
        torch.empty(0),
        torch.randn(7, dtype=torch.float64),
        torch.randn(2).to(torch.float8_e4m3fn),
        torch.randn(4, 5).t()[1:],
        torch.tensor([float("nan"), -0.0]),
    ]


def bits_of(buffers):
    return [buffer.contiguous().view(torch.uint8) for buffer in buffers if buffer.dim()]


def mixed(rank, world, source):
    group = FastDDP(nn.Linear(2, 2)).process_group
    buffers = [b if rank == source else torch.zeros_like(b) for b in all_kinds()]
    assert can_broadcast(buffers, group) and not can_broadcast([torch.zeros(2) * 1j], group)
    broadcast(buffers, group, source)
    broadcast([torch.empty(0)], group, source)
    return bits_of(buffers), buffers[0]


@pytest.mark.parametrize("source", [0, 2])
def test_buffers_of_all_kinds_arrive_bit_by_bit(source):
    wanted = bits_of(all_kinds())
    for bits, number in run_ranks(mixed, 3, source):
        assert all(map(torch.equal, bits, wanted)) and number == 1
