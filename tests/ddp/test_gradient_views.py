"""Location of gradients: in the bucket, once, and never overwritten while they
are kept elsewhere.
"""

import pytest
import torch
from torch import nn

from fastsync import FastDDP
from tests.helpers.models import buffers, differences, grads, many, wrap
from tests.helpers.teams import run_ranks


def model_of(**options):
    torch.manual_seed(0)
    return FastDDP(many(3, 8), bucket_cap_mb=0.0005, **options)


def backward(model, seed, scale=1.0):
    torch.manual_seed(seed)
    (model(torch.randn(4, 8)) * scale).square().sum().backward()


def places(model):
    """Return where the buffers of its gradients begin."""
    return set(buffers([p.grad for p in model.parameters()]))


def look_at_buffers(rank, world):
    model = model_of()
    backward(model, rank)
    found = [(len(places(model)), len(model._engine.plan.buckets))]
    model.zero_grad()
    backward(model, rank)  # under the second plan
    found.append((len(places(model)), len(model._engine.plan.buckets)))
    addresses = []
    for step in range(4):
        model.zero_grad()
        backward(model, step)
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
    return found, addresses, [p.grad._is_view() for p in model.parameters()]


def test_one_buffer_per_bucket_and_always_the_same():
    for found, addresses, views in run_ranks(look_at_buffers, 2):
        for seen, buckets in found:
            assert seen == buckets > 1
        assert all(step == addresses[0] for step in addresses), "reused while nobody holds it"
        assert all(address % 64 == 0 for address in addresses[0])
        assert not any(views), "no autograd view: optimizers detach_() gradients"


HOLD = {
    "itself": lambda p: p.grad,
    "slice": lambda p: p.grad[0],
    "detached": lambda p: p.grad.detach(),
    "data": lambda p: p.grad.data,
    "reshaped": lambda p: p.grad.view(-1)[1:],
    "numpy": lambda p: torch.from_numpy(p.grad.numpy()),
    "storage": lambda p: p.grad.untyped_storage(),
}


def keep_gradients(rank, world, how):
    """Hold on to one parameter's gradient of each step and to a copy of its values."""
    model = model_of()
    parameter = next(model.parameters())
    held = []
    for step in range(6):
        model.zero_grad()
        backward(model, 10 * step + rank)
        mine = HOLD[how](parameter)
        values = [bytes(mine)] if how == "storage" else mine.clone()
        held.append((mine, values))
    if how == "storage":
        return all(bytes(mine) == values[0] for mine, values in held)
    return all(torch.equal(mine, values) for mine, values in held)


@pytest.mark.slow(but=("data",))
@pytest.mark.parametrize("how", HOLD)
def test_saved_gradients_are_never_overwritten(how):
    assert run_ranks(keep_gradients, 2, how) == [True, True]


def keep_one_of_many(rank, world):
    """Check that only the bucket of a gradient that is kept moves, and only while it is kept."""
    model = model_of()
    first = next(iter(model.parameters()))
    for step in range(3):
        model.zero_grad()
        backward(model, step)
    before = places(model)
    kept = first.grad
    model.zero_grad()
    backward(model, 5)
    moved = before - places(model)
    del kept
    during = places(model)
    model.zero_grad()
    backward(model, 6)
    return len(moved), places(model) == during


def test_a_saved_gradient_costs_one_buffer():
    assert run_ranks(keep_one_of_many, 2) == [(1, True)] * 2


def train_in_place(kind, rank, zero, optimizer, **options):
    torch.manual_seed(0)
    model = wrap(kind, many(3, 8), **options)
    opt = optimizer(model.parameters())
    seen = []
    for step in range(5):
        zero(model, opt)
        backward(model, 100 * step + rank)
        backward(model, 100 * step + 50 + rank)
        seen.append(grads(model))
        opt.step()
    return model, seen


def zero_in_place(model, opt):
    opt.zero_grad(set_to_none=False)


def detach_and_zero(model, opt):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


def multiply_by_hand(model, opt):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.25)


def compare_in_place(rank, world, view):
    found = []
    for zero in (zero_in_place, detach_and_zero, multiply_by_hand):
        runs = []
        for kind in ("fast", "torch"):
            options = {"gradient_as_bucket_view": view if kind == "fast" else False}
            runs.append(
                train_in_place(kind, rank, zero, lambda p: torch.optim.Adam(p, lr=0.01), **options)
            )
        (ours, our_grads), (_, their_grads) = runs
        found += [differences(a, b) for a, b in zip(our_grads, their_grads, strict=True)]
        if view:
            assert len(places(ours)) == len(ours._engine.plan.buckets)
    return found


@pytest.mark.slow("True")
@pytest.mark.parametrize("view", [True, False])
def test_gradients_that_stay_accumulate_in_place(view):
    for found in run_ranks(compare_in_place, 2, view):
        assert not any(found)


def watch_in_place(rank, world):
    model = model_of()
    for step in range(3):
        model.zero_grad(set_to_none=False)
        backward(model, step)
    tensors = [p.grad for p in model.parameters()]
    places = [g.data_ptr() for g in tensors]
    for step in range(3):
        model.zero_grad(set_to_none=False)
        backward(model, step)
    now = [p.grad for p in model.parameters()]
    return all(a is b for a, b in zip(tensors, now, strict=True)) and places == [
        g.data_ptr() for g in now
    ]


def test_gradients_that_stay_are_not_replaced():
    assert run_ranks(watch_in_place, 2) == [True, True]


def own_gradients(rank, world):
    """Without views each gradient keeps the tensor that autograd made for it."""
    model = model_of(gradient_as_bucket_view=False)
    made = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: made.__setitem__(q, q.grad))
    backward(model, rank)
    same = all(made[p] is p.grad for p in model.parameters())
    return same


def test_without_views_ownership_is_ddps():
    assert run_ranks(own_gradients, 2) == [True, True]


def keep_optimizer_state(rank, world):
    """Momentum that starts as the first gradient must not be a view of a buffer in use."""
    model = model_of()
    opt = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0, dampening=0.0)
    total = None
    for step in range(4):
        opt.zero_grad()
        backward(model, 7 * step + rank)
        now = [p.grad.clone() for p in model.parameters()]
        total = now if total is None else [a + b for a, b in zip(total, now, strict=True)]
        opt.step()
    state = [opt.state[p]["momentum_buffer"] for p in model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(state, total, strict=True))


def test_optimizer_state_is_unaffected():
    assert run_ranks(keep_optimizer_state, 2) == [True, True]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.a * x).sum() + (self.b * 2 * x).sum()


def swap_gradients(rank, world):
    """Gradients that the user replaced, or that came from elsewhere, are averaged like others."""
    model = FastDDP(Pair())
    for _ in range(2):
        model.zero_grad()
        model(torch.full((4,), float(rank + 1))).backward()
    a, b = model.module.a, model.module.b
    a.grad, b.grad = b.grad, a.grad  # 3 and 1.5, each now in the other's slot
    model(torch.full((4,), float(rank + 1))).backward()
    return a.grad.tolist(), b.grad.tolist()


def test_gradients_in_foreign_slots():
    for a, b in run_ranks(swap_gradients, 2):
        assert a == [4.5] * 4
        assert b == [4.5] * 4
