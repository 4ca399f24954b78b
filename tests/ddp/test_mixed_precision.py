"""mixed_precision=, next to what torch's own class makes of it."""

import contextlib
import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from fastsync import FastDDP, Wire
from tests.helpers.models import buffers
from tests.helpers.teams import run_ranks

HALF = _MixedPrecision(torch.float16, torch.float16, torch.float16)
BRAIN = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
WIDE_REDUCE = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)


class Net(nn.Module):
    """Layers of several kinds, one frozen parameter, one shared one and a buffer."""

    def __init__(self, twice):
        super().__init__()
        self.stem = nn.Linear(192, 8)
        self.stem.weight.data = self.stem.weight.data.t().contiguous().t()  # column by column
        self.body = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 8))
        self.offset = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.register_buffer("count", torch.tensor(0))
        self.seen = []
        self.twice = twice

    def forward(self, x):
        x = self.stem(x.flatten(1))
        self.seen = [x.dtype, self.offset.dtype, self.stem.weight.dtype]
        x = self.body(x) * self.scale + self.offset
        return self.body(x) if self.twice else x


class NoStream:
    """A stream and an event where there is neither: the CPU does one thing after the other."""

    def record(self):
        pass

    def wait(self, stream=None):
        pass

    def wait_stream(self, stream):
        pass


@contextlib.contextmanager
def streams_on_cpu():
    """Torch's class asks for streams and events in mixed precision, which the CPU has not."""
    with (
        mock.patch.object(torch, "Event", NoStream),
        mock.patch.object(torch.accelerator, "current_stream", NoStream),
    ):
        yield


def torchs(mixed, rank):
    """Torch's own class after a step whose gradients are dropped.

    Torch 2.13 makes the buckets of its first plan anew in the low precision, and then copies
    gradients to the old ones: what it averages in the first step is uninitialised memory. With
    gradient_as_bucket_view=True later steps are wrong, too, and under no_sync() it fails.
    """
    wrapped = DistributedDataParallel(net(False), mixed_precision=mixed)
    wrapped(image(rank, 0)).sum().backward()
    wrapped.zero_grad()
    return wrapped


def image(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 3, 8, 8, generator=generator)


def train(wrapped, rank, set_to_none):
    """Gradients of every step, and the weights in the end."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    grads = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        wrapped(image(rank, step)).square().mean().backward()
        grads.append([p.grad.clone() for p in trained(wrapped)])
        optimizer.step()
    return grads, [p.detach().clone() for p in wrapped.parameters()]


def net(twice=True):
    torch.manual_seed(0)
    return Net(twice)


def against_ddp(rank, world, mixed, options, set_to_none):
    ours = train(FastDDP(net(False), mixed_precision=mixed, **options), rank, set_to_none)
    with streams_on_cpu():
        theirs = train(torchs(mixed, rank), rank, True)
    return ours, theirs


@pytest.mark.slow(but=("bf16-False-False",))
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("mixed", [HALF, BRAIN], ids=["fp16", "bf16"])
def test_trains_as_ddp_does(mixed, views, set_to_none):
    """Halving before the sum instead of after it changes no bit of a normal number."""
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.01}
    tiny = torch.finfo(mixed.param_dtype).tiny
    for (grads, weights), (their_grads, their_weights) in run_ranks(
        against_ddp, 2, mixed, options, set_to_none
    ):
        for got, expected in zip(grads, their_grads, strict=True):
            for g, e in zip(got, expected, strict=True):
                assert g.dtype is torch.float32
                assert e.abs().max() > 100 * tiny
                torch.testing.assert_close(g, e, rtol=0, atol=tiny)
        for w, e in zip(weights, their_weights, strict=True):
            torch.testing.assert_close(w, e, rtol=0, atol=4 * tiny)


def exact_average(rank, world, options, micro_steps):
    """Gradients, and the average of bf16 gradients computed by hand in fp32."""
    wrapped = FastDDP(net(), mixed_precision=WIDE_REDUCE, **options)
    expected = None
    for micro in range(micro_steps):
        low = copy.deepcopy(net()).bfloat16()
        low(image(rank, micro).bfloat16()).square().mean().backward()
        mine = [p.grad.float() for p in low.parameters() if p.requires_grad]
        expected = (
            mine if expected is None else [a + b for a, b in zip(expected, mine, strict=True)]
        )
        last = micro == micro_steps - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            wrapped(image(rank, micro)).square().mean().backward()
    for gradient in expected:
        dist.all_reduce(gradient.div_(2))
    got = [p.grad for p in wrapped.parameters() if p.requires_grad]
    return all(map(torch.equal, got, expected)), len(buffers(got)), len(got)


@pytest.mark.slow(but=("True-1",))
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("views", [True, False])
def test_reducing_in_fp32_averages_exactly(views, micro_steps):
    options = {"gradient_as_bucket_view": views}
    for equal, places, count in run_ranks(exact_average, 2, options, micro_steps):
        assert equal
        assert (places == 1) == views, f"{places} buffers for {count} gradients"


def precisions(rank, world):
    wrapped = FastDDP(net(), mixed_precision=HALF)
    inner = wrapped.module
    stored = {n: p.data_ptr() for n, p in wrapped.named_parameters()}
    facts = []

    def check(when):
        same = all(p.data_ptr() == stored[n] for n, p in wrapped.named_parameters())
        facts.append((when, same and all(p.dtype is torch.float32 for p in wrapped.parameters())))

    check("after wrapping")
    out = wrapped(image(rank, 0))
    facts.append(("in forward", set(inner.seen) == {torch.float16}))
    check("after a forward")
    out.sum().backward()
    check("after a backward")
    with wrapped.no_sync():
        wrapped(image(rank, 1)).sum().backward()
    check("after no_sync")
    facts.append(("fp32 gradients", all(p.grad.dtype is torch.float32 for p in trained(wrapped))))
    wrapped.eval()
    with torch.no_grad():
        facts.append(("fp16 output", wrapped(image(rank, 2)).dtype is torch.float16))
    check("after evaluation")
    with pytest.raises(IndexError):
        wrapped(torch.ones(1))
    check("after a forward that failed")
    with pytest.raises(ZeroDivisionError):
        Fails.apply(wrapped(image(rank, 3))).sum().backward()
    check("after a backward that failed early")
    with pytest.raises(ZeroDivisionError):
        wrapped(Fails.apply(image(rank, 3).requires_grad_())).sum().backward()
    check("after a backward that failed late")
    facts.append(("counter", inner.count.dtype is torch.int64))
    facts.append(("buffer", inner.scale.dtype is torch.float16))
    p = inner.stem.weight
    facts.append(("attributes", (p._mp_param.dtype, p._fp_param.dtype) == (torch.float16, p.dtype)))
    return facts


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def trained(wrapped):
    return [p for p in wrapped.parameters() if p.requires_grad]


def test_parameters_are_in_full_precision_outside_of_forward_and_backward():
    for facts in run_ranks(precisions, 1):
        assert [when for when, fine in facts if not fine] == []


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner = net()
        self.first = nn.Conv2d(3, 3, 1)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


def checkpoints(rank, world, reentrant):
    torch.manual_seed(1)
    plain = Checkpointed(reentrant)
    plain.forward = lambda x: plain.inner(plain.first(x))
    torch.manual_seed(1)
    results = []
    for module in (plain, Checkpointed(reentrant)):
        wrapped = FastDDP(module, mixed_precision=HALF)
        for step in range(3):
            wrapped.zero_grad()
            wrapped(image(rank, step)).sum().backward()
        results.append([p.grad for p in trained(wrapped)])
    return all(map(torch.equal, *results))


@pytest.mark.slow("False")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant):
    assert run_ranks(checkpoints, 2, reentrant) == [True, True]


def ignored(rank, world):
    module = net()
    names = ["body.0.weight", "scale"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    wrapped = FastDDP(module, mixed_precision=HALF)
    low = []
    module.body[0].register_forward_pre_hook(
        lambda layer, args: low.append((layer.weight.dtype, layer.bias.dtype))
    )
    with contextlib.suppress(RuntimeError):  # a layer of two dtypes
        wrapped(image(rank, 0))
    weight = module.body[0].weight
    return low[0], module.scale.dtype, hasattr(weight, "_mp_param") or hasattr(weight, "_fp_param")


def test_what_is_ignored_stays_as_it_is():
    for low, buffer, marked in run_ranks(ignored, 2):
        assert low == (torch.float32, torch.float16)
        assert buffer is torch.float32
        assert not marked


def freezing(rank, world):
    wrapped = FastDDP(net(), mixed_precision=WIDE_REDUCE, find_unused_parameters=True)
    stem, grads = wrapped.module.stem.weight, []
    for step, trains in enumerate((True, False, False, True, True)):
        stem.requires_grad_(trains)
        wrapped.zero_grad()
        wrapped(image(rank, step)).square().mean().backward()
        grads.append([p.grad for p in wrapped.parameters()])
        assert (stem.grad is not None) == trains
    return grads


def test_freezing_and_thawing():
    one, other = run_ranks(freezing, 2)
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (torch.equal(a, b) and a.dtype is torch.float32)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, part):
        return self.parts[part](x)


def unused(rank, world, views):
    torch.manual_seed(0)
    wrapped = FastDDP(
        Branches(),
        mixed_precision=HALF,
        find_unused_parameters=True,
        gradient_as_bucket_view=views,
    )
    wrapped(torch.ones(2, 4), rank).sum().backward()
    return [None if p.grad is None else p.grad for p in wrapped.module.parts.parameters()]


@pytest.mark.slow("True")
@pytest.mark.parametrize("views", [True, False])
def test_parameters_that_some_ranks_do_not_use(views):
    one, other = run_ranks(unused, 2, views)
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if index >= 4:
            assert a is None
            assert b is None
        else:
            assert torch.equal(a, b)
            assert torch.equal(a, torch.ones_like(a))  # two rows of ones, halved


def sparse(rank, world):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    wrapped = FastDDP(module, mixed_precision=HALF)
    wrapped(torch.tensor([rank, 2])).sum().backward()
    grad = module[0].weight.grad
    return grad.is_sparse, grad.dtype, grad.to_dense()


def test_sparse_gradients():
    one, other = run_ranks(sparse, 2)
    assert one[:2] == other[:2] == (True, torch.float32)
    assert torch.equal(one[2], other[2])
    assert one[2][:3].abs().sum(dim=1).gt(0).all()


def only_reduced(rank, world, dtype):
    mixed = _MixedPrecision(reduce_dtype=dtype)
    wrapped = FastDDP(net(), mixed_precision=mixed)
    wire = Wire("bf16" if dtype is torch.bfloat16 else "fp16", form="native")
    narrow = FastDDP(net(), wire=wire)
    for model in (wrapped, narrow):
        model(image(rank, 0)).square().mean().backward()
    assert wrapped.module.seen == [torch.float32] * 3
    return all(map(torch.equal, *([p.grad for p in trained(m)] for m in (wrapped, narrow))))


@pytest.mark.slow("dtype1")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_reduce_dtype_alone_is_a_wire(dtype):
    assert run_ranks(only_reduced, 2, dtype) == [True, True]


def pickled(rank, world):
    wrapped = FastDDP(net(), mixed_precision=HALF)
    stream = io.BytesIO()
    torch.save(wrapped, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    copied = copy.deepcopy(wrapped)
    grads = []
    for model in (wrapped, again, copied):
        model(image(rank, 0)).square().mean().backward()
        assert model.module.seen[0] is torch.float16
        grads.append([p.grad for p in trained(model)])
    return all(
        torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True)
    )


def test_pickling_and_copying():
    assert run_ranks(pickled, 2) == [True, True]


def with_fp64(rank, world):
    with pytest.raises(ValueError, match=r"param_dtype of mixed_precision is torch\.float64"):
        FastDDP(net(), mixed_precision=_MixedPrecision(torch.float64))
    with pytest.raises(ValueError, match=r"cannot reduce parameters of float64, as 'weight' is"):
        FastDDP(nn.Linear(2, 2).double(), mixed_precision=HALF)


def test_what_cannot_be_narrowed():
    run_ranks(with_fp64, 2)
