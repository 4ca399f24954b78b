"""Communication hooks: torch's own, unmodified, against torch's DistributedDataParallel."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from fastsync import FastDDP
from fastsync.testing import run_ranks

STEPS = 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))


def train(wrapped, rank, steps=STEPS, idle=0):
    """All weights after `steps` steps, of which the first `idle` change nothing."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(5)  # PowerSGD draws its start
        wrapped(torch.randn(16, 32, generator=generator)).square().mean().backward()
        if step >= idle:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()])


def power_sgd():
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3)


def local_sgd():
    return post_localSGD_hook.PostLocalSGDState(
        dist.group.WORLD, dist.group.WORLD, start_localSGD_iter=4
    )


def local_sgd_alone():
    """From the fourth step on, every rank trains for itself."""
    alone, _ = dist.new_subgroups(1)
    return post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, alone, start_localSGD_iter=3)


def no_state():
    return None


def world_group():
    return dist.group.WORLD


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, no_state),
    "fp16": (default_hooks.fp16_compress_hook, no_state),
    "fp16 around allreduce": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        no_state,
    ),
    "fp16 around PowerSGD": (
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        power_sgd,
    ),
    "PowerSGD": (powerSGD_hook.powerSGD_hook, power_sgd),
    "batched PowerSGD": (powerSGD_hook.batched_powerSGD_hook, power_sgd),
    "post-local SGD": (post_localSGD_hook.post_localSGD_hook, local_sgd),
    "post-local SGD, alone": (post_localSGD_hook.post_localSGD_hook, local_sgd_alone),
    "quantized": (quantization_hooks.quantization_pertensor_hook, world_group),
    "quantized by channel": (quantization_hooks.quantization_perchannel_hook, world_group),
    "no-op": (debugging_hooks.noop_hook, no_state),
}


def gather_stacked(outputs, tensor, group=None, async_op=False):
    work = dist.all_gather(outputs, tensor, group=group, async_op=True)
    stacked = work.get_future().then(lambda done: [torch.stack(done.value())])
    return SimpleNamespace(get_future=lambda: stacked)


def repair_torchs_hooks():
    """Repair three of torch's hooks, which fail on Gloo or everywhere, under any wrapper.

    The quantizing ones expect one tensor from a gather that yields a list, and batched PowerSGD
    hands a matrix to a function for batches of them.
    """
    quantization_hooks.dist = SimpleNamespace(group=dist.group, all_gather=gather_stacked)
    of_batches = powerSGD_hook._orthogonalize
    powerSGD_hook._orthogonalize = lambda m, epsilon=0: of_batches(
        m.view(-1, *m.shape[-2:]), epsilon
    )


def against_ddp(rank, world, name, options):
    repair_torchs_hooks()
    hook, state = HOOKS[name]
    ours = FastDDP(model(), **options)
    shared = {k: v for k, v in options.items() if k == "bucket_cap_mb"}
    theirs = DistributedDataParallel(model(), **shared)
    ours.register_comm_hook(state(), hook)
    theirs.register_comm_hook(state(), hook)
    # Channels are cut from the bucket, where gradients lie in DDP's order from the second step on.
    idle = 1 if "channel" in name else 0
    return torch.equal(train(ours, rank, idle=idle), train(theirs, rank, idle=idle))


@pytest.mark.slow(but=("fp16 around allreduce-copies",))
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"]
)
@pytest.mark.parametrize("name", HOOKS)
def test_torchs_own_hooks_give_the_same_bits(name, options):
    assert all(run_ranks(against_ddp, 2, name, options))


@pytest.mark.slow("allreduce")
@pytest.mark.parametrize("name", ["allreduce", "fp16"])
def test_hooks_on_many_small_buckets(name):
    assert all(run_ranks(against_ddp, 2, name, {"bucket_cap_mb": 0.001}))


BF16_HOOKS = [
    default_hooks.bf16_compress_hook,
    default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
]


def bf16_refused(rank, world):
    texts = []
    for hook in BF16_HOOKS:
        for kind in (FastDDP, DistributedDataParallel):
            try:
                kind(model()).register_comm_hook(None, hook)
                texts.append("")
            except TypeError as error:
                texts.append(str(error))
    return texts


def test_bf16_on_gloo_is_refused_as_by_ddp():
    """Check that FastDDP refuses it where DDP does, which depends on how torch was built."""
    for texts in run_ranks(bf16_refused, 2):
        assert texts[::2] == texts[1::2]
        assert len(set(texts)) == 1


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, forwards):
        for layer in self.layers if forwards else reversed(self.layers):
            x = layer(x).relu()
        return x


def turn_under_a_hook(rank, world):
    plans = []
    for hooked in (True, False):
        wrapped = FastDDP(Turning(), bucket_cap_mb=1e-4)
        if hooked:
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(30):
            wrapped(torch.randn(4, 32), step < 5).sum().backward()
        plans.append(wrapped.sync_stats()["plans"])
    return plans


def test_plans_stay_under_a_hook():
    """Hooks keep states of buckets, which another plan would put to the wrong ones."""
    for hooked, plain in run_ranks(turn_under_a_hook, 2):
        assert hooked == 3, "one at the start, one for the hook, one in the order of the first step"
        assert plain > 2, "without a hook the plan would have followed"


def sum_instead(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def fresh_result(state, bucket):
    """Return a tensor of its own, in another dtype."""
    future = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), 3.0, dtype=torch.float64))
    return future


def replace_hooks(rank, world):
    wrapped = FastDDP(model())
    data = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))
    norms = []
    for hook in (default_hooks.allreduce_hook, sum_instead, fresh_result):
        wrapped.register_comm_hook(None, hook)
        wrapped.zero_grad()
        wrapped(data).sum().backward()
        norms.append([p.grad.clone() for p in wrapped.parameters()])
    mean, total, constant = norms
    return (
        all(torch.equal(2 * a, b) for a, b in zip(mean, total, strict=True))
        and all(bool((c == 3).all()) and c.dtype == torch.float32 for c in constant)
        and all(not torch.equal(a, b) for a, b in zip(mean, total, strict=True))
    )


def test_a_hook_may_be_replaced_and_may_return_its_own_tensor():
    assert all(run_ranks(replace_hooks, 2))


def fail(state, bucket):
    raise LookupError("the hook's own trouble")


def failing_hook(rank, world):
    wrapped = FastDDP(model())
    wrapped.register_comm_hook(None, fail)
    with pytest.raises(LookupError, match="own trouble"):
        wrapped(torch.randn(4, 32)).sum().backward()


def test_an_error_in_a_hook_arrives_as_it_is():
    run_ranks(failing_hook, 2)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, which):
        return self.branches[which](x)


def failing_now_and_then(rank, world):
    """Return what each step's biases got; ranks use other branches, and the sums of some steps
    fail.
    """
    fails = []

    def hook(state, bucket):
        def done(future):
            if fails:
                raise LookupError("the sum's own trouble")
            return future.value()

        return default_hooks.allreduce_hook(state, bucket).then(done)

    wrapped = FastDDP(Branching(), find_unused_parameters=True)
    wrapped.register_comm_hook(None, hook)
    seen = []
    for step in range(9):
        wrapped.zero_grad()
        fails[:] = ["now"] * (step % 3 == 1)
        try:
            wrapped(torch.ones(1, 4), (step + rank) % 3).sum().backward()
        except RuntimeError:
            seen.append("failed")
            continue
        biases = [branch.bias.grad for branch in wrapped.module.branches]
        seen.append([None if grad is None else grad[0].item() for grad in biases])
    return seen


def test_used_flags_are_right_after_steps_that_failed():
    expected = []
    for step in range(9):
        used = [0.5, 0.5, 0.5]
        used[(step + 2) % 3] = None
        expected.append("failed" if step % 3 == 1 else used)
    assert run_ranks(failing_now_and_then, 2) == [expected] * 2


def builtin(rank, world, kind):
    ours, theirs = FastDDP(model()), DistributedDataParallel(model())
    for wrapped in (ours, theirs):
        wrapped._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    return torch.allclose(train(ours, rank), train(theirs, rank), atol=1e-3)


@pytest.mark.slow("ALLREDUCE")
@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks(kind):
    assert all(run_ranks(builtin, 2, kind))


def complex_gradients(rank, world):
    torch.manual_seed(0)
    base = nn.ParameterList([nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))])

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = base

        def forward(self, x):
            return (self.weights[0] @ x).abs().sum()

    plain, hooked = FastDDP(Product()), FastDDP(copy.deepcopy(Product()))
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    data = torch.randn(5, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(rank))
    for wrapped in (plain, hooked):
        wrapped(data).backward()
    return torch.equal(plain.module.weights[0].grad, hooked.module.weights[0].grad)


def test_complex_gradients_under_a_hook():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(run_ranks(complex_gradients, 2))
