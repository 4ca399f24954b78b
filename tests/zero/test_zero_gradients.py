"""zero=1 and 2: what scripts see of gradients, and when these travel."""

import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from fastsync import FastDDP, Wire
from fastsync.testing import RankError
from tests.helpers.teams import run_ranks
from tests.zero.zero_loops import batch, close, net, train, trained


def clip(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_infinite(model, optimizer):
    """Torch has no such norm of nothing."""
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.numel()], 0.01, math.inf)


def clip_values(model, optimizer):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def each_gradient(change):
    def between(model, optimizer):
        for param in model.parameters():
            if param.grad is not None:
                change(param, param.grad)

    return between


def own_norm(model, optimizer):
    """Clip as many scripts do: gradient by gradient, by a norm of another order."""
    norms = [p.grad.detach().norm(3) for p in model.parameters() if p.grad is not None]
    total = torch.stack(norms).norm(3).item()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.mul_(min(1.0, 0.1 / total))


def one_element(param, grad):
    if grad.numel():
        grad[(0,) * grad.dim()] = 0.25


def replaced(param, grad):
    param.grad = grad.sign() * grad.abs().sqrt()


def added(param, grad):
    grad += 0.01 * param.detach()


def by_numpy(param, grad):
    param.grad = torch.from_numpy(grad.numpy().copy()).clamp(max=0.01)


def by_list(param, grad):
    param.grad = torch.tensor(grad.tolist()).view_as(param).clamp(max=0.01)


def by_dlpack(param, grad):
    param.grad = torch.from_dlpack(grad).clone().clamp(max=0.01)


BETWEEN = {
    "nothing": lambda *_: None,
    "clip": clip,
    "clip to infinite norm": clip_infinite,
    "clip values": clip_values,
    "write": each_gradient(lambda p, g: g.mul_(0.5).add_(0.01 * p.detach())),
    "write one element": each_gradient(one_element),
    "replace": each_gradient(replaced),
    "add": each_gradient(added),
    "add then scale": each_gradient(lambda p, g: g.add_(p.detach(), alpha=0.1).mul_(0.3)),
    "without numbers that are none": each_gradient(lambda p, g: g.nan_to_num_()),
    "own norm": own_norm,
    "numpy": each_gradient(by_numpy),
    "list": each_gradient(by_list),
    "dlpack": each_gradient(by_dlpack),
    "copy": each_gradient(lambda p, g: setattr(p, "grad", copy.deepcopy(g) * 2)),
    "some to none": each_gradient(lambda p, g: setattr(p, "grad", g if p.dim() > 1 else None)),
    "centred": each_gradient(lambda p, g: g.sub_(g.mean()) if g.dim() > 1 else None),
}


@pytest.mark.slow
def test_what_scripts_do_between_backward_and_step():
    for wanted, found in run_ranks(everything_in_between, 3):
        for name in BETWEEN:
            assert close(found[name], wanted[name]), name


def everything_in_between(rank, world):
    by_stage = []
    for zero in (0, 1):
        by_stage.append({n: trained(rank, zero, "sgd", how)[0] for n, how in BETWEEN.items()})
    return by_stage


def accumulate(model, rank, step, times):
    """All but the last under no_sync(), as scripts do it."""
    for part in range(times - 1):
        with model.no_sync():
            model(batch(rank, 10 * step + part)).mean().backward()
    model(batch(rank, 10 * step + 9)).mean().backward()


def sizes_while_accumulating(rank, world, zero):
    """Elements of gradients that this rank holds after a backward under no_sync(), and bytes."""
    module = nn.Linear(64, 64)
    model = FastDDP(module, zero=zero, wire=Wire(shared_memory=False))
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = model.sync_stats().sent_bytes
    with model.no_sync():
        model(torch.randn(2, 64)).sum().backward()
    sent = model.sync_stats().sent_bytes - before
    held = sum(p.grad.numel() for p in module.parameters() if type(p.grad) is torch.Tensor)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return held, sent, model.sync_stats().sent_bytes - before


def test_stages_differ_while_gradients_accumulate():
    numel = 64 * 64 + 64
    for held, sent, total in run_ranks(sizes_while_accumulating, 2, 1):
        assert (held, sent) == (numel, 0)
        assert total == pytest.approx(4 * numel, rel=0.01), "half for gradients, half for weights"
    for held, sent, total in run_ranks(sizes_while_accumulating, 2, 2):
        assert held == 0 and sent == pytest.approx(2 * numel, rel=0.01)
        assert total == pytest.approx(6 * numel, rel=0.01)


def look_alone(rank, world, how):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "2"
    model = FastDDP(nn.Linear(8, 8), zero=1)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    grad = model.module.weight.grad
    texts = []
    looks = {"clone": grad.clone, "norm": grad.norm, "print": lambda: repr(grad)}
    if rank == 0 or how == "differ":
        try:
            texts.append(looks[how if how != "differ" else ("clone", "norm")[rank]]())
        except RuntimeError as error:
            texts.append(str(error))
    dist.barrier()
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("how", ["clone", "norm"])
def test_a_gradient_that_one_rank_looks_at_is_an_error(how):
    (text,), _ = run_ranks(look_alone, 2, how)
    assert "waited 2 s for the others to ask for" in text and "rank 1 did not come" in text
    assert "look at them on every rank, or on none" in text


def look_at_different_ones(rank, world, shared_memory):
    """Look at parts of two parameters of one shape, one on each rank."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = FastDDP(model, zero=1, wire=Wire(shared_memory=shared_memory))
    optimizer = optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    weight, texts = model.module[rank].weight, []
    for look in (weight.grad.clone, optimizer.state[weight]["exp_avg"].clone):
        with pytest.raises(RuntimeError) as raised:
            look()
        texts.append(str(raised.value))
    dist.barrier()
    return texts


@pytest.mark.parametrize("shared_memory", [False, True])
def test_ranks_that_look_at_different_parameters_are_told(shared_memory):
    for rank, texts in enumerate(run_ranks(look_at_different_ones, 2, shared_memory)):
        for what, text in zip(("the gradient", "'exp_avg' in the state"), texts, strict=True):
            said = f"rank {rank} asks for {what} of '{rank}.weight', but other ranks ask"
            assert said in text, text


def test_looks_that_differ_are_errors_and_printing_is_free():
    for (text,) in run_ranks(look_alone, 2, "differ"):
        assert "but other ranks ask for something else" in text
    (text,), _ = run_ranks(look_alone, 2, "print")
    assert "spread over the ranks" in text


class Stopped(Exception):
    """Error that a backward raises."""


def stop(model, x):
    """Make a backward that raises before the gradients of the first layer.

    Return the parameters that had a gradient then.
    """
    there = []

    def note_and_raise(_):
        there.extend(p.grad is not None for p in model.parameters())
        raise Stopped

    def watch(layer, inputs, output):
        output.register_hook(note_and_raise)

    hook = model.module.conv.register_forward_hook(watch)
    loss = model(x).mean()
    hook.remove()
    with pytest.raises(Stopped):
        loss.backward()
    return there


AFTERWARDS = {
    "nothing": lambda model: [],
    "none": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "look": lambda model: [p.grad.clone() for p in model.parameters() if p.grad is not None],
    "accumulate": lambda model: accumulate(model, 0, 5, 2),
}


def stopped_backward(rank, world, then):
    """A script goes on after a backward that raised on every rank, on top of earlier averages."""
    results = []
    for zero in (0, 1, 2):
        module = net()
        model = FastDDP(module, zero=zero, find_unused_parameters=True)
        optimizer = optim.SGD(model.parameters(), 0.05)
        train(model, optimizer, rank, range(2))
        there = stop(model, batch(rank, 7))
        seen = AFTERWARDS[then](model) or []
        model(batch(rank, 8)).mean().backward()
        optimizer.step()
        train(model, optimizer, rank, [9])
        results.append((there, [p.detach() for p in module.parameters()] + seen))
    return results


@pytest.mark.slow(but=("nothing",))
@pytest.mark.parametrize("then", AFTERWARDS)
def test_a_backward_that_raises(then):
    for wanted, *others in run_ranks(stopped_backward, 2, then):
        for found in others:
            assert found[0] == wanted[0] and close(found[1], wanted[1])


def memory_of_sums(rank, world):
    """Return whether gradients that are added to averages stay where autograd has made them."""
    model = FastDDP(nn.Linear(8, 8), zero=1)
    optimizer = optim.SGD(model.parameters(), 0.1)
    made, kept = [], []
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    weight = model.module.weight
    weight.register_hook(lambda grad: made.append(grad.data_ptr()))
    with model.no_sync():
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            kept.append(weight.grad.share.pending.data_ptr())
    return made[0], kept


def test_gradients_that_are_added_to_averages_are_not_copied():
    for made, kept in run_ranks(memory_of_sums, 2):
        assert kept == [made, made]


def changed_on_the_way(rank, world, change):
    results = []
    for zero in (0, 1):
        module = net()
        model = FastDDP(module, zero=zero, find_unused_parameters=True)
        optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.5)
        train(model, optimizer, rank, range(2))
        model(batch(rank, 2)).mean().backward()  # accumulates on spread gradients
        if change == "wire":
            model.set_wire("fp16")
        elif change == "hook":
            model.register_comm_hook(None, fp16_compress_hook)
        else:
            optimizer = optim.AdamW(model.parameters(), 0.01)
        train(model, optimizer, rank, range(3, 5))
        results.append([p.detach() for p in module.parameters()])
    return results


@pytest.mark.slow(but=("wire",))
@pytest.mark.parametrize("change", ["wire", "hook", "optimizer"])
def test_a_change_of_wire_hook_and_optimizer(change):
    for wanted, found in run_ranks(changed_on_the_way, 2, change):
        assert close(found, wanted)


def zero_on_one_rank(rank, world):
    model = FastDDP(nn.Linear(8, 8), zero=1)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        if step < 2 or rank == 0:
            optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def test_gradients_that_one_rank_alone_has_zeroed_are_an_error():
    with pytest.raises(RankError, match=r"1 of 2 ranks had a gradient of an earlier backward"):
        run_ranks(zero_on_one_rank, 2)


def norms_of_what_is_scaled(rank, world):
    """Check that the norm of a gradient that was changed in place is that of its new values."""
    model = FastDDP(nn.Linear(8, 8), zero=1)
    optimizer = optim.SGD(model.parameters(), 0.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    grad = model.module.weight.grad  # of ones, twice
    norms = [grad.norm().item()]
    changes = (
        lambda: grad.mul_(0.5),
        lambda: grad.data.div_(2.0),
        lambda: torch._foreach_mul_([grad], 0.5),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            [grad], torch.zeros(1), torch.tensor(0.5)
        ),
        lambda: grad.clamp_(max=0.0625),
        lambda: grad.zero_(),
    )
    for change in changes:
        change()
        norms.append(grad.norm().item())
    return norms


def test_norms_follow_what_is_done_in_place():
    wanted = [16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0]
    assert run_ranks(norms_of_what_is_scaled, 2) == [pytest.approx(wanted)] * 2
