"""Gradients that travel as bytes: what arrives, on every rank, in every form."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, Wire, register_codec
from fastsync.config.policy import BucketPolicy
from fastsync.wire.formats import FORMATS, make_codec, wire_formats
from tests.helpers.models import many
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import GatheredHalves, Halves

# Of the norm of random gradients: what a format keeps, at two roundings.
TOLERANCE = {
    "fp32": 1e-6,
    "bf16": 4e-3,
    "fp16": 5e-4,
    "fp8_e4m3": 5e-2,
    "fp8_e5m2": 1e-1,
    "int8": 1.5e-2,
    "int4": 0.25,
}
SIZES = (300, 200, 200, 7)


def model():
    torch.manual_seed(0)
    layers = [(nn.Linear(n, m), nn.ReLU()) for n, m in pairwise(SIZES)]
    return nn.Sequential(*[part for layer in layers for part in layer])


def inputs(step, rank):
    return torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(100 * step + rank))


def flat_grads(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def true_average(step, world):
    plain = model().double()
    for rank in range(world):
        (plain(inputs(step, rank).double()).square().mean() / world).backward()
    return flat_grads(plain)


def is_the_same_everywhere(tensor):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return all(torch.equal(everyones[0], other) for other in everyones)


def errors_of_steps(rank, world, wire, steps=3, device="cpu"):
    wrapped = FastDDP(model().to(device), wire=wire, bucket_cap_mb=0.1)
    errors = []
    for step in range(steps):
        wrapped.zero_grad()
        wrapped(inputs(step, rank).to(device)).square().mean().backward()
        found = flat_grads(wrapped)
        assert is_the_same_everywhere(found)
        found, wanted = found.cpu(), true_average(step, world)
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    return errors, len(wrapped._engine.plan.buckets)


@pytest.mark.slow(but=("fp8_e5m2-gather",))
@pytest.mark.parametrize("form", ["two_shot", "gather"])
@pytest.mark.parametrize("wire", FORMATS)
def test_averages_arrive_alike_and_about_right(wire, form):
    """Sums differ between forms in their rounding only. Ranks hold the same bits."""
    policy = Wire(wire, form=form, error_feedback=False)
    for errors, buckets in run_ranks(errors_of_steps, 3, policy):
        assert buckets > 1
        assert max(errors) < TOLERANCE[wire]
        assert wire == "fp32" or min(errors) > TOLERANCE[wire] / 100  # it did travel coded


def weights_after_steps(rank, world, wire, steps=4):
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(inputs(step, rank)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()])


@pytest.mark.slow(but=("fp16, form=gather, stochastic=True",))
@pytest.mark.parametrize(
    "wire",
    [
        Wire("int8", form="two_shot"),
        Wire("int4", form="gather", error_feedback=True),
        Wire("fp16", form="gather", stochastic=True),
    ],
    ids=Wire.describe,
)
def test_pieces_change_no_bit_of_a_coded_average(wire):
    """Each piece is coded when it leaves, and decoded when it has come."""
    whole, *cut = (
        run_ranks(weights_after_steps, 2, dataclasses.replace(wire, piece_bytes=size))
        for size in (1 << 30, 20_000, 3000)
    )
    for others in cut:
        assert all(torch.equal(mine, whole[0]) for mine in others)


def test_stochastic_rounding_arrives_alike():
    policy = Wire("int8", form="two_shot", stochastic=True)
    for errors, _ in run_ranks(errors_of_steps, 2, policy):
        assert TOLERANCE["int8"] / 100 < max(errors) < 2 * TOLERANCE["int8"]


def constant_gradients(rank, world, wire, steps):
    """The mean over steps of what arrives, when every step has the same gradients."""
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=0.1)
    total = 0
    for _ in range(steps):
        wrapped.zero_grad()
        wrapped(inputs(0, rank)).square().mean().backward()
        total = total + flat_grads(wrapped).double()
    wanted = true_average(0, world)
    return ((total / steps - wanted).norm() / wanted.norm()).item()


@pytest.mark.slow(but=("gather-fp8_e5m2",))
@pytest.mark.parametrize("wire", ["int4", "int8", "fp8_e5m2"])
@pytest.mark.parametrize("form", ["two_shot", "gather"])
def test_error_feedback_lets_nothing_be_lost(wire, form):
    """A later step brings what one step lacks, so the mean over n steps is off by a residual over
    n.
    """
    off = [
        run_ranks(constant_gradients, 2, Wire(wire, form=form, error_feedback=feedback), 12)[0]
        for feedback in (False, True)
    ]
    assert off[1] < off[0] / 4


def residual_mass(rank, world, wire, replans=False):
    """All gradients so far, less all averages so far, is the sum of all residuals.

    Return how far it is not, and the share of elements of which this rank keeps something.
    """
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=0.1)
    owed = 0
    for step in range(5):
        wrapped.zero_grad()
        wrapped(inputs(step, rank)).square().mean().backward()
        owed = owed + true_average(step, world) - flat_grads(wrapped).double()
        if replans and step == 2:
            engine = wrapped._engine
            engine._buckets = BucketPolicy((1 << 30,))
            engine._install(list(range(len(engine.params))))
    kept = wrapped.sync_state_dict()["residuals"].values()
    mass = torch.cat([r.flatten() for r in kept]).double()
    share = (mass != 0).double().mean().item()
    dist.all_reduce(mass)
    return ((mass - owed).norm() / owed.norm()).item(), share


@pytest.mark.parametrize("form", ["two_shot", "gather"])
def test_the_residuals_are_what_the_averages_lack(form):
    policy = Wire("int4", form=form)
    for off, _ in run_ranks(residual_mass, 3, policy):
        assert off < 1e-4


def poisoned(rank, world, wire, value):
    """One element of one rank's gradient is not finite in step 0, and all are in step 1."""
    wrapped = FastDDP(model(), wire=wire, bucket_cap_mb=0.1)
    found = []
    for step in range(2):
        wrapped.zero_grad()
        bad = value if rank == 1 and step == 0 else None
        handle = wrapped.module[0].weight.register_hook(lambda g, bad=bad: poison(g, bad))
        wrapped(inputs(step, rank)).square().mean().backward()
        handle.remove()
        found.append(wrapped.module[0].weight.grad.clone())
        found.append(wrapped.module[2].weight.grad.clone())
    return [(bool(f.isfinite().all()), bool(f.flatten()[1234].isfinite())) for f in found]


def poison(gradient, value):
    gradient = gradient.clone()
    if value is not None:
        gradient.view(-1)[1234] = value
    return gradient


@pytest.mark.slow(but=("fp8_e5m2--inf-gather",))
@pytest.mark.parametrize("form", ["two_shot", "gather"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", [name for name in FORMATS if name != "fp32"])
def test_what_is_not_finite_arrives_as_such_and_is_gone_in_the_next_step(wire, value, form):
    policy = Wire(wire, form=form, error_feedback=True)
    for result in run_ranks(poisoned, 2, policy, value):
        assert result == [(False, False), (True, True), (True, True), (True, True)]


def huge(rank, world, wire):
    """Gradients that fp16 cannot hold, and others that it would flush to zero."""
    layer = nn.Linear(256, 2, bias=False)
    wrapped = FastDDP(layer, wire=wire)
    scale = torch.tensor([[1e30], [1e-30]])
    (wrapped(torch.ones(1, 256)) * scale.T).sum().backward()
    return layer.weight.grad[:, 0].tolist()


@pytest.mark.slow(but=("fp8_e4m3",))
@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_range_is_a_block_s_own(wire):
    for large, small in run_ranks(huge, 2, wire):
        assert large == pytest.approx(1e30, rel=0.1)
        assert small == pytest.approx(1e-30, rel=0.1)


def plans(rank, world, wire):
    wrapped = FastDDP(many(3, 64), wire=wire, bucket_cap_mb=0.02)
    found = []
    for _ in range(4):
        buckets = wrapped._engine.plan.buckets
        found.append([b.coded.codec.name if b.coded else "fp32" for b in buckets])
        wrapped.zero_grad()
        wrapped(torch.randn(4, 64)).square().sum().backward()
    return found


def test_warmup_steps_travel_as_they_are():
    found = run_ranks(plans, 2, Wire("int8", warmup_steps=2))[0]
    assert [set(step) for step in found] == [{"fp32"}, {"fp32"}, {"fp32"}, {"int8"}] or [
        set(step) for step in found
    ] == [{"fp32"}, {"fp32"}, {"int8"}, {"int8"}]


def test_overrides_by_name():
    found = run_ranks(plans, 2, Wire("int8", overrides={"*.bias": "fp32", "0.*": "bf16"}))[0]
    assert set(found[-1]) == {"fp32", "bf16", "int8"}


@pytest.mark.slow("Halves")
@pytest.mark.parametrize("codec", [Halves, GatheredHalves])
def test_a_codec_of_the_user_s(codec):
    for errors, _ in run_ranks(errors_of_steps, 3, codec()):
        assert 1e-5 < max(errors) < 2e-3


class Failing(Halves):
    def decode(self, wire, values):
        raise ZeroDivisionError("no decoding today")


def fail(rank, world):
    with pytest.raises(RuntimeError, match=r"(?s)decode\(\) raised.*no decoding today"):
        errors_of_steps(rank, world, Failing())


def test_an_error_in_a_codec_surfaces_with_its_text():
    run_ranks(fail, 2)


def test_powersgd_is_a_hook_of_torch():
    for wrap in (Wire, Wire.of, lambda name: Wire(overrides={"*": name})):
        with pytest.raises(ValueError, match=r"powerSGD_hook with model\.register_comm_hook\(\)"):
            wrap("powersgd")


def test_names_can_be_registered_once():
    register_codec("halves", Halves)
    assert make_codec("halves").name == "halves"
    assert set(wire_formats()) >= {*FORMATS, "topk", "halves"}
    for taken in ("halves", "int8"):
        with pytest.raises(ValueError, match="exists already"):
            register_codec(taken, Halves)


def test_what_is_no_codec_is_refused():
    with pytest.raises(ValueError, match=r"lacks .*encode"):
        Wire(object())
    with pytest.raises(ValueError, match=r"'fp4'.*'fp32'.*'int8'"):
        Wire("fp4")
    with pytest.raises(ValueError, match="natively"):
        Wire("int8", form="native")
    with pytest.raises(ValueError, match="three_shot"):
        Wire("int8", form="three_shot")
    with pytest.raises(ValueError, match="min_bytes"):
        Wire("int8", min_bytes=-1)
    with pytest.raises(ValueError, match="piece_bytes"):
        Wire("int8", piece_bytes=0)
    with pytest.raises(ValueError, match="'fp4'"):
        Wire("int8", overrides={"a": "fp4"})


def test_formats_are_those_of_the_kernels():
    from fastsync._build import extension

    for name, known in FORMATS.items():
        assert extension.load().format_traits(name) == (known.block, known.bits, known.scale_bytes)
