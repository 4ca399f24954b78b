"""Storages of single gradients: code that looks at one finds that gradient, and may give it other
memory.
"""

import copy
import io
import mmap
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP
from tests.helpers.models import MODELS, batch, buffers, build, differences, grads, loss_of, wrap
from tests.helpers.teams import run_ranks


class Mixture(nn.Module):
    """Parameters of many kinds: large, small, empty, complex, channels-last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(64, 4096)
        self.small = nn.Linear(4096, 3)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.phases = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.filters = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.small(self.large(x)) + self.empty.sum()
        image = x[:, :, None, None].expand(-1, -1, 4, 4)
        return self.filters(image).mean() + (x @ self.phases.real).sum() + self.phases.imag.sum()


def summed(state, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def mixture(hook=None):
    model = FastDDP(Mixture())
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def costs(model):
    """For each gradient: whether what is made of it is equal to it and no larger."""
    for name, param in model.module.named_parameters():
        grad, stored = param.grad, saved(param.grad)
        made = [
            pickle.loads(pickle.dumps(grad)),
            copy.deepcopy(grad),
            torch.load(io.BytesIO(stored)),
        ]
        assert len(stored) < grad.nbytes + 2048, name
        for other in (grad, *made):
            assert torch.equal(other, grad), name
            assert other.untyped_storage().nbytes() == grad.nbytes, name
            assert other.storage_offset() == 0 and other.stride() == param.stride(), name
    return len(saved(model.module.small.bias.grad))


def look_at_each(rank, world, hook):
    model = mixture(hook)
    sizes = []
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        model(torch.randn(2, 64)).backward()
        sizes.append(costs(model))
    real = [p.grad for p in model.parameters() if p.grad.numel() and not p.is_complex()]
    others = 1  # of complex gradients
    return sizes, len(buffers(real)), len(model._engine.plan.buckets) - others


@pytest.mark.slow("hook")
@pytest.mark.parametrize("hook", [None, summed], ids=["all-reduce", "hook"])
def test_a_gradient_is_saved_alone(hook):
    for sizes, places, buckets in run_ranks(look_at_each, 2, hook):
        assert max(sizes) < 2048
        assert places == buckets


def share(grad):
    grad.share_memory_()


def resize(grad):
    """Resize the storage, as a tensor of its own would take it: other memory, the same values."""
    values = grad.clone()
    storage = grad.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    grad.copy_(values)


MOVES = {"share": share, "resize": resize}


def train_moved(kind, move, name, rank, none):
    """Gradients in a storage whose memory is exchanged after the second step."""
    model = wrap(kind, build(name), bucket_cap_mb=0.2)
    params = list(model.parameters())
    seen, moved = [], []
    for step in range(5):
        model.zero_grad(set_to_none=none)
        loss_of(model(batch(name, 10 * step + rank))).backward()
        seen.append(grads(model))
        if kind == "fast" and step == 1:
            moved = [p.grad for p in params[::2]]
            for grad in moved:
                MOVES[move](grad)
            places = [grad.data_ptr() for grad in moved]
    if kind == "torch":
        return seen
    stayed = [p.grad is grad for p, grad in zip(params[::2], moved, strict=True)]
    stayed += [grad.data_ptr() == place for grad, place in zip(moved, places, strict=True)]
    if move == "share":
        assert all(grad.is_shared() for grad in moved)
    return seen, stayed, moved


def move_gradients(rank, world, move, none):
    found = []
    for name in MODELS:
        theirs = train_moved("torch", move, name, rank, none)
        ours, stayed, moved = train_moved("fast", move, name, rank, none)
        assert all(stayed) != none or not any(stayed[: len(moved)])
        found += [differences(a, b) for a, b in zip(ours, theirs, strict=True)]
    return found


@pytest.mark.slow(but=("share-made anew",))
@pytest.mark.parametrize("none", [False, True], ids=["stay", "made anew"])
@pytest.mark.parametrize("move", MOVES)
def test_a_gradient_whose_memory_is_exchanged_gets_averages_there(move, none):
    for found in run_ranks(move_gradients, 2, move, none):
        assert not any(found)


def watch(rank, world):
    """Maps a gradient's memory once more, as a process does that it is sent to."""
    model = FastDDP(nn.Linear(2, 1))
    for _ in range(2):  # then the plan stays
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
    file, size = model.module.weight.grad.untyped_storage()._share_fd_cpu_()
    elsewhere = torch.frombuffer(mmap.mmap(file, size), dtype=torch.float32)
    seen = [elsewhere.tolist()]
    model.zero_grad(set_to_none=False)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    return [*seen, elsewhere.tolist()]


def test_another_process_sees_averages_arrive():
    assert run_ranks(watch, 2) == [[[0.5, 0.5], [1.5, 1.5]]] * 2


def shared_by_the_hook(state, bucket):
    """Give the bucket's storage other memory, as sending it to another process does."""
    bucket.buffer().share_memory_()
    return summed(state, bucket)


def train_hooked(kind, hook, rank):
    model = wrap(kind, build("many"), bucket_cap_mb=0.01)
    model.register_comm_hook(None, hook)
    seen, held = [], []
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model(batch("many", 10 * step + rank))).backward()
        seen.append(grads(model))
        if step % 2:  # the next step makes others
            held += [(p.grad, p.grad.clone()) for p in model.parameters()]
    return seen, all(torch.equal(grad, values) for grad, values in held)


def share_buffers(rank, world):
    theirs, _ = train_hooked("torch", summed, rank)
    ours, kept = train_hooked("fast", shared_by_the_hook, rank)
    return kept, [differences(a, b) for a, b in zip(ours, theirs, strict=True)]


def test_a_hook_may_share_its_buffer():
    for kept, found in run_ranks(share_buffers, 2):
        assert kept
        assert not any(found)
