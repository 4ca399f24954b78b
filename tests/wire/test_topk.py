"""Top-k: the right elements are chosen, and what is not sent comes later."""

import math

import pytest
import torch
import torch.distributed as dist

from fastsync import ChunkedTopK, FastDDP, TopK, Wire
from fastsync._build import extension
from tests.helpers.teams import run_ranks
from tests.wire.test_wire import (
    constant_gradients,
    errors_of_steps,
    flat_grads,
    inputs,
    is_the_same_everywhere,
    model,
    poisoned,
    residual_mass,
)


def positions_of(values, count, by_torch):
    positions = torch.empty(count, dtype=torch.int32)
    extension.load().select_largest(values, positions, by_torch)
    return positions.sort().values.long()


def by_sorting(values, count):
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    return magnitudes.argsort(descending=True, stable=True)[:count].sort().values


def adversarial(numel):
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    wild = normal.clone()
    wild[torch.rand(numel, generator=generator) < 0.1] = math.inf
    wild[torch.rand(numel, generator=generator) < 0.1] = -math.nan
    yield from (normal, wild, torch.zeros(numel), torch.full((numel,), -2.0))
    yield torch.randint(-3, 4, (numel,), generator=generator).float()
    yield normal * 1e-42  # denormal
    yield 1 + normal.abs() * 1e-6  # equal upper halves
    yield normal * 10 ** torch.linspace(-38, 38, numel)


@pytest.mark.slow(but=("2-True",))
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("numel", [1, 2, 17, 1000, 70_000])
def test_selection_is_that_of_a_stable_sort(numel, by_torch):
    """Exactly so many, of equals the first, NaN before infinity before numbers."""
    for values in adversarial(numel):
        for count in {1, max(1, numel // 100), max(1, numel // 2), numel}:
            found = positions_of(values, count, by_torch)
            assert torch.equal(found, by_sorting(values, count))


def test_the_largest_values_are_those_of_torch_topk():
    values = torch.randn(5000)
    found = values[positions_of(values, 50, False)].abs().sort().values
    assert torch.equal(found, values.abs().topk(50).values.sort().values)


@pytest.mark.slow("4-5")
@pytest.mark.parametrize(("numel", "count"), [(4, 5), (4, 0)])
def test_selection_checks_its_count(numel, count):
    with pytest.raises(ValueError, match=f"cannot select {count} of {numel}"):
        positions_of(torch.ones(numel), count, False)


def test_everything_kept_is_the_average():
    policy = Wire(TopK(1.0), error_feedback=False)
    for errors, buckets in run_ranks(errors_of_steps, 3, policy):
        assert buckets > 1
        assert max(errors) < 1e-6


def one_step(rank, world, density):
    """Return what arrives without error feedback, and what should, by plain torch."""
    wrapped = FastDDP(model(), wire=Wire(TopK(density), error_feedback=False))
    wrapped.zero_grad()
    wrapped(inputs(0, rank)).square().mean().backward()
    (bucket,) = wrapped._engine.plan.buckets
    assert is_the_same_everywhere(flat_grads(wrapped))
    plain = model()
    (plain(inputs(0, rank)).square().mean()).backward()
    params = list(plain.parameters())
    mine = torch.cat([params[i].grad.flatten() for i in bucket.params]) / world
    kept = by_sorting(mine, max(1, round(density * mine.numel())))
    wanted = torch.zeros_like(mine).index_copy(0, kept, mine[kept])
    dist.all_reduce(wanted)
    params = list(wrapped.parameters())
    found = torch.cat([params[i].grad.flatten() for i in bucket.params])
    return (found - wanted).abs().max().item(), wrapped._engine.core.stats(), bucket, mine.numel()


def test_a_step_is_the_sum_of_what_each_rank_keeps():
    for off, stats, bucket, numel in run_ranks(one_step, 3, 0.05):
        assert off < 1e-8
        assert bucket.coded.layout.coded_bytes == 8 * round(0.05 * numel)
        flags = 4 * bucket.coded.layout.flags_per_chunk
        assert 0 <= stats["bytes"] - bucket.coded.layout.coded_bytes - flags < 16
        assert stats["sent_bytes"] == 2 * stats["bytes"]


def test_a_bucket_is_one_piece_however_small_pieces_are():
    policy = Wire(TopK(0.5), error_feedback=False, piece_bytes=1)
    assert all(max(errors) < 1 for errors, _ in run_ranks(errors_of_steps, 2, policy))


# --- top-k of buckets and by chunks alike

KINDS = {"topk": TopK, "chunked_topk": ChunkedTopK}


@pytest.mark.parametrize("kind", KINDS)
def test_error_feedback_is_on_and_lets_nothing_be_lost(kind):
    off = [
        run_ranks(constant_gradients, 2, Wire(KINDS[kind](0.3), error_feedback=feedback), 12)[0]
        for feedback in (False, None)
    ]
    assert off[1] < off[0] / 3


@pytest.mark.slow("chunked_topk-two_shot")
@pytest.mark.parametrize(
    ("kind", "form"), [("topk", "auto"), ("chunked_topk", "auto"), ("chunked_topk", "two_shot")]
)
def test_the_residuals_are_what_the_averages_lack(kind, form):
    for off, _ in run_ranks(residual_mass, 3, Wire(KINDS[kind](0.1), form)):
        assert off < 1e-4


@pytest.mark.slow(but=("topk-nan", "chunked_topk-nan"))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_arrives_as_such_and_is_gone_in_the_next_step(kind, value):
    for result in run_ranks(poisoned, 2, KINDS[kind](), value):
        assert result == [(False, False), (True, True), (True, True), (True, True)]


def mismatched(rank, world, kind):
    with pytest.raises(RuntimeError, match=rf"(?s){kind}\(density=0.2\).*{kind}\(density=0.1\)"):
        FastDDP(model(), wire=KINDS[kind](0.1 * (rank + 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_other_densities_are_told(kind):
    run_ranks(mismatched, 2, kind)


@pytest.mark.slow(but=("topk-1.01", "chunked_topk-1.01"))
@pytest.mark.parametrize("density", [0, -0.1, 1.01, math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_density_is_checked(kind, density):
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        KINDS[kind](density)


def test_other_forms_and_too_large_buckets_are_refused():
    with pytest.raises(ValueError, match="topk does not travel in the form 'two_shot'"):
        Wire("topk", form="two_shot")
    with pytest.raises(ValueError, match="smaller bucket_cap_mb"):
        TopK().coded_bytes(1 << 31)
