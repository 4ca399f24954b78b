"""PowerSGD, next to torch's communication hook of that name."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from fastsync import FastDDP, PowerSGD, Wire
from fastsync.build import extension
from fastsync.engine import core
from fastsync.testing import run_ranks
from tests.test_wire import (
    constant_gradients,
    flat_grads,
    inputs,
    is_the_same_everywhere,
    model,
    poisoned,
    residual_mass,
)

WARMUP = 2  # torch rebuilds its buckets after the first step


def train(wrapped, rank, steps, start=0):
    """Gradients of each step, of SGD."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    found = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        wrapped(inputs(step, rank)).square().mean().backward()
        found.append(flat_grads(wrapped).clone())
        optimizer.step()
    return found


def first_factors(wrapped):
    """The Q that each parameter's first step begins with, by position: [cols, rank]."""
    (bucket,) = wrapped._engine.plan.buckets
    sender = core.Sender(wrapped._engine.wire, dist.get_rank())
    spec = core.low_rank_spec(0, bucket.layout, bucket.coded, sender)
    factors = {}
    for place, matrix in enumerate(bucket.coded.layout.matrices):
        q = torch.empty(matrix.rank, matrix.cols)
        extension.load().fill_random(q, spec.seed + (place << 32))
        factors[bucket.params[matrix.slot]] = q.t()
    return factors


class Planted(powerSGD_hook.PowerSGDState):
    """torch's state, its first Q as given, in the order in which torch will ask for them."""

    def plant(self, bucket, params, factors):
        order = [next(i for i, p in enumerate(params) if p is q) for q in bucket.parameters()]
        qs = [factors[i] for i in order if i in factors]
        heights = [params[i].shape[0] for i in order if i in factors]
        left = sum(h * q.shape[1] for h, q in zip(heights, qs, strict=True))
        self.p_memory_dict[0] = torch.empty(left)
        self.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in qs])


def planted_hook(state, bucket):
    own, params, factors = state
    if own.iter == own.start_powerSGD_iter and 0 not in own.p_memory_dict:
        own.plant(bucket, params, factors)
    return powerSGD_hook.powerSGD_hook(own, bucket)


def beside_torch(rank, world, rank_of, feedback):
    wire = Wire(PowerSGD(rank_of), warmup_steps=WARMUP, error_feedback=feedback)
    fast = FastDDP(model(), wire=wire, bucket_cap_mb=100)
    ours = train(fast, rank, WARMUP)
    ours += train(fast, rank, 1, WARMUP)
    factors = first_factors(fast)
    ours += train(fast, rank, 5, WARMUP + 1)
    torch_model = DDP(model(), bucket_cap_mb=100)
    own = Planted(
        dist.group.WORLD,
        matrix_approximation_rank=rank_of,
        start_powerSGD_iter=WARMUP,
        use_error_feedback=feedback,
    )
    state = (own, list(torch_model.parameters()), factors)
    torch_model.register_comm_hook(state, planted_hook)
    theirs = train(torch_model, rank, WARMUP + 6)
    exact = DDP(model(), bucket_cap_mb=100)
    plain = train(exact, rank, WARMUP + 6)
    off = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)]
    lost = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, plain, strict=True)]
    same = all(is_the_same_everywhere(found) for found in ours)
    return off, lost[WARMUP:], same, len(factors)


@pytest.mark.slow(but=("4-False",))
@pytest.mark.parametrize(("rank", "feedback"), [(1, True), (2, True), (4, True), (4, False)])
def test_steps_are_those_of_torch_s_hook(rank, feedback):
    for off, lost, same, compressed in run_ranks(beside_torch, 2, rank, feedback):
        assert max(off) < 2e-4
        assert min(lost) > 1e-2  # it did travel compressed
        assert same
        assert compressed >= 2


def sizes(rank, world, wire):
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=100)
    train(wrapped, rank, 1)
    (bucket,) = wrapped._engine.plan.buckets
    return wrapped._engine.core.stats(), bucket.coded.layout, bucket.nbytes


def test_bytes_are_those_of_the_factors():
    for stats, layout, nbytes in run_ranks(sizes, 3, PowerSGD(4)):
        # 300 x 200 and 200 x 200 are compressed at rank 4, 200 x 7 at no rank.
        assert [(m.rows, m.cols, m.rank) for m in layout.matrices] == [
            (200, 200, 4),
            (200, 300, 4),
        ]
        factors = 4 * (200 + 200 + 300 + 200)
        rest = 200 * 7 + 7 + 200 + 200 + layout.flags
        assert 0 <= stats["bytes"] // 4 - factors - rest < 16 * 9
        assert stats["bytes"] == nbytes
        assert stats["sent_bytes"] == 2 * 2 * nbytes // 3


def uncompressed(rank, world):
    """Nothing in the model becomes smaller."""
    wrapped = FastDDP(nn.Linear(4, 4), wire="powersgd")
    return [bucket.coded for bucket in wrapped._engine.plan.buckets]


def test_a_bucket_that_does_not_shrink_travels_as_it_is():
    assert run_ranks(uncompressed, 2) == [[None], [None]]


def test_error_feedback_lets_nothing_be_lost():
    off = [
        run_ranks(constant_gradients, 2, Wire(PowerSGD(2), error_feedback=feedback), 40)[0]
        for feedback in (False, None)
    ]
    assert off[1] < off[0] / 3


@pytest.mark.slow("True")
@pytest.mark.parametrize("warm", [True, False])
def test_the_residuals_are_what_the_averages_lack(warm):
    for off, lacking in run_ranks(residual_mass, 3, PowerSGD(2, warm_start=warm)):
        assert off < 1e-4
        assert lacking > 0.99


@pytest.mark.slow(but=("nan",))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_and_is_gone_in_the_next_step(value):
    for result in run_ranks(poisoned, 2, "powersgd", value):
        assert result[0] == (False, False)
        assert result[2:] == [(True, True), (True, True)]


def after(rank, world, before):
    """A gradient of ones, after steps with others; the plan is made anew after the first."""
    wrapped = FastDDP(nn.Linear(64, 64, bias=False), wire=PowerSGD(2))
    for scale in (1.0, *before, 1.0):
        wrapped.zero_grad()
        wrapped(torch.full((1, 64), scale)).sum().backward()
    return wrapped.module.weight.grad


@pytest.mark.slow(but=("before0",))
@pytest.mark.parametrize("before", [(1.0, 0.0, 0.0), (1.0, math.nan), (math.inf, 0.0)])
def test_no_step_spoils_the_factor_that_the_next_one_starts_with(before):
    for found in run_ranks(after, 2, before):
        assert torch.allclose(found, torch.ones(64, 64), atol=1e-5)


class Partly(nn.Module):
    """One layer that only rank 0 uses, and one that no rank does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.both, self.some, self.none = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, some):
        return self.both(x) + (self.some(x) if some else 0)


def partly_used(rank, world):
    wrapped = FastDDP(Partly(), wire=PowerSGD(2), find_unused_parameters=True)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(2, 64), rank == 0).sum().backward()
    module = wrapped.module
    return module.some.weight.grad, module.none.weight.grad, wrapped._engine.core.used_counts()


def test_flags_travel_with_what_is_not_compressed():
    for some, none, counts in run_ranks(partly_used, 2):
        assert torch.allclose(some, torch.ones(64, 64), atol=1e-5)  # 2 rows of ones, halved
        assert none is None
        assert sorted(counts) == [0, 0, 1, 1, 2, 2]


def uneven(rank, world):
    wrapped = FastDDP(model(), wire=PowerSGD(2))
    with Join([wrapped]):
        train(wrapped, rank, 2 + 3 * rank)
    return is_the_same_everywhere(torch.cat([p.detach().flatten() for p in wrapped.parameters()]))


def test_ranks_that_ran_out_of_inputs_take_part():
    assert run_ranks(uneven, 2) == [True, True]


def channels_last(rank, world):
    """One position per rank, so the gradients are of rank one as [outputs, the rest]."""
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)
    wrapped = FastDDP(conv, wire=PowerSGD(4))
    images = torch.randn(1, 32, 3, 3, generator=torch.Generator().manual_seed(rank))
    wrapped(images.to(memory_format=torch.channels_last)).square().sum().backward()
    (bucket,) = wrapped._engine.plan.buckets
    average = conv.weight.grad.clone()
    conv.weight.grad = None
    conv(images).square().sum().backward()
    wanted = conv.weight.grad / world
    dist.all_reduce(wanted)
    off = ((average - wanted).norm() / wanted.norm()).item()
    return bucket.coded.layout.matrices[0], off


def test_memory_formats_keep_their_first_dimension_as_rows():
    for matrix, off in run_ranks(channels_last, 2):
        assert (matrix.rows, matrix.cols) == (64, 32 * 9)
        assert off < 1e-5


@pytest.mark.slow("False")
@pytest.mark.parametrize("by_torch", [False, True])
def test_orthonormal_vectors_span_what_they_did(by_torch):
    torch.manual_seed(0)
    vectors = torch.randn(4, 300)
    vectors[2] *= 1e30
    vectors[3] *= 1e-30
    found = vectors.clone()
    extension.load().orthonormalise(found, None, by_torch)
    assert torch.allclose(found @ found.t(), torch.eye(4), atol=1e-5)
    unit = vectors / vectors.abs().amax(1, keepdim=True)
    assert torch.allclose(unit @ found.t() @ found, unit, atol=1e-4)


@pytest.mark.slow("True")
@pytest.mark.parametrize("by_torch", [False, True])
def test_dependent_vectors_vanish_or_are_replaced(by_torch):
    torch.manual_seed(0)
    vectors = torch.randn(3, 50)
    vectors[1] = 2 * vectors[0]
    found = vectors.clone()
    extension.load().orthonormalise(found, None, by_torch)
    assert not found[1].any() and found[2].norm().item() == pytest.approx(1)
    vectors[2] = math.nan
    extension.load().orthonormalise(vectors, torch.randn(3, 50), by_torch)
    assert torch.allclose(vectors @ vectors.t(), torch.eye(3), atol=1e-5)


@pytest.mark.slow(but=("inf-False",))
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_poison_spreads(value, by_torch):
    vectors = torch.randn(2, 50)
    vectors[0, 3] = value
    extension.load().orthonormalise(vectors, None, by_torch)
    assert not vectors[0].isfinite().all()


@pytest.mark.slow("False")
@pytest.mark.parametrize("by_torch", [False, True])
def test_the_product_and_what_it_lacks(by_torch):
    torch.manual_seed(0)
    left, right, matrix = torch.randn(3, 70), torch.randn(3, 1100), torch.randn(70, 1100)
    matrix[5, 600] = math.inf
    found, residual = matrix.clone(), torch.full_like(matrix, 7.0)
    extension.load().low_rank_product((left, right), 0.5, found, residual, by_torch)
    assert torch.allclose(found, left.t() @ right, atol=1e-5)
    wanted = matrix - 0.5 * found
    wanted[5, 600] = 7.0
    assert torch.allclose(residual, wanted, atol=1e-6)


def mismatched(rank, world):
    with pytest.raises(RuntimeError, match=r"(?s)powersgd\(rank=2,.*powersgd\(rank=1,"):
        FastDDP(model(), wire=PowerSGD(rank + 1))


def test_ranks_with_other_settings_are_told():
    run_ranks(mismatched, 2)


def complex_gradients(rank, world):
    with pytest.raises(ValueError, match="complex64, which powersgd cannot carry"):
        FastDDP(nn.Linear(8, 8).to(torch.complex64), wire="powersgd")


def test_complex_gradients_are_refused():
    run_ranks(complex_gradients, 2)


@pytest.mark.slow("0", "-1")
@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_the_rank_is_checked(rank):
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1"):
        PowerSGD(rank)


def test_other_bad_settings():
    with pytest.raises(ValueError, match="min_compression"):
        PowerSGD(min_compression=0.5)
    with pytest.raises(ValueError, match="powersgd does not travel in the form 'gather'"):
        Wire("powersgd", form="gather")
