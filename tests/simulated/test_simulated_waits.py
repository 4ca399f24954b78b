"""Waits of the host for the device in a step, and the number of kernels that a step launches.

tests/gpu/test_host_waits.py finds places in the code that no test here reaches.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

import fastsync
from fastsync import FastDDP
from fastsync.config.arguments import grouped
from tests.conformance.stages import STAGES
from tests.fsdp.fsdp_models import Net, loss_of, net, words
from tests.simulated.ranks import run_simulated
from tests.simulated.test_simulated_features import GUARDED, LOWER, by_block, ddp, fast

DEVICE = "sim"
FIRST, LAST = 3, 5


class Partly(nn.Module):
    """Rank 0 leaves out a layer of each of its halves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.sides = nn.ModuleList(nn.Linear(11, 11) for _ in range(2))
        self.rank = 0

    def forward(self, batch):
        x = self.net(batch)
        for side in self.sides if self.rank else ():
            x = side(x)
        return x


def lower(**options):
    return lambda model: FastDDP(model.bfloat16(), **grouped({"master_weights": True, **options}))


def plain(model, opt, backward):
    backward()
    opt.step()


def clipped(model, opt, backward):
    backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()


def clipped_by_model(model, opt, backward):
    backward()
    model.clip_grad_norm_(0.1)
    opt.step()


def accumulated(model, opt, backward):
    with model.no_sync():
        backward()
    backward()
    opt.step()


def weighted(model, opt, backward):
    for micro in range(2):
        model.add_weight(torch.full((), 3.0, device=DEVICE) if micro else 2)
        with nullcontext() if micro or not hasattr(model, "no_sync") else model.no_sync():
            backward()
    opt.step()


def accumulated_often(model, opt, backward):
    """The host is ahead of its device by all backwards: the device is busy before the first one."""
    busy = torch.ones(1200, 1200, device=DEVICE)
    for _ in range(4):
        busy = busy @ busy
    with model.no_sync():
        for _ in range(4):
            backward()
    backward()
    opt.step()


class Scaled:
    def __init__(self):
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)

    def __call__(self, model, opt, backward):
        backward(self.scaler.scale)
        self.scaler.step(opt)
        self.scaler.update()


def hooked(model):
    wrapped = by_block(fastsync.fully_shard)(model)
    for param in wrapped.parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(1))
    return wrapped


# What no step waits in: the wrapper, and how a step goes.
NEVER = {
    **{stage: (wrap, plain) for stage, wrap in STAGES.items() if stage != "fully_shard"},
    "fully_shard": (by_block(fastsync.fully_shard), plain),
    "fully_shard, mixed": (by_block(fastsync.fully_shard, mp_policy=LOWER), plain),
    "fully_shard, hooks": (hooked, plain),
    **{wire: (fast(wire=wire), plain) for wire in ("bf16", "fp8_e4m3", "int8", "topk")},
    **{f"int8, zero={stage}": (fast(wire="int8", zero=stage), plain) for stage in (1, 2, 3)},
    "parameter wire": (fast(zero=2, wire="int8", parameter_wire="int8"), plain),
    "parameter wire, zero=3": (fast(zero=3, wire="int8", parameter_wire="int8"), plain),
    "masters, zero=1": (lower(zero=1), plain),
    "masters, zero=2": (lower(zero=2), plain),
    "masters, parameter wire": (lower(zero=2, parameter_wire="int8"), plain),
    "clipping": (fast(), clipped),
    "clipping, zero=2": (fast(zero=2), clipped),
    "clipping by the model, zero=1": (fast(zero=1), clipped_by_model),
    "clipping, fully_shard": (by_block(fastsync.fully_shard), clipped),
    "accumulation, zero=1": (fast(zero=1), accumulated),
    "accumulation, zero=2": (fast(zero=2), accumulated),
    "long accumulation, zero=2": (fast(zero=2), accumulated_often),
    "weights": (fast(), weighted),
    "weights, zero=2": (fast(zero=2), weighted),
    "weights, int8": (fast(wire="int8"), weighted),
    "weights, fully_shard": (by_block(fastsync.fully_shard), weighted),
    "small buckets, zero=2": (fast(zero=2, bucket_cap_mb=0.002), plain),
}


def waits_of_steps(rank, world, wrap, step, model=net):
    """Return for each of some steps what waited in its backwards, and what before its end."""
    from tests.simulated.device import _where, low, placed

    made = placed(model())
    made.rank = rank
    wrapped = wrap(made)
    opt = optim.AdamW(wrapped.parameters(), 0.01, foreach=True)
    step = step() if isinstance(step, type) else step
    found = []

    def backward(scale=lambda loss: loss):
        scale(loss_of(wrapped, batch)).backward()
        in_backward.extend(low.report().waits)

    low.ask_where(_where)
    for number in range(1, LAST + 1):
        low.synchronize()  # so that what has long arrived has done so here, too
        low.report(reset=True)
        batch = words(rank, number).pin_memory().to(DEVICE, non_blocking=True)
        in_backward = []
        step(wrapped, opt, backward)
        opt.zero_grad()
        if number >= FIRST:
            found.append((in_backward, low.report().waits))
    low.ask_where(None)
    return found


def of(rank, world, case):
    return waits_of_steps(rank, world, *NEVER[case])


@pytest.mark.slow(
    but=(
        "zero0",
        "fully_shard",
        "int8",
        "clipping, zero=2",
    )
)
@pytest.mark.parametrize("case", NEVER)
def test_no_step_waits(case):
    for found in run_simulated(of, 2, case):
        for _, waits in found:
            assert not waits, "\n".join(waits)


def scaled(rank, world, zero):
    return [waits_of_steps(rank, world, wrap, Scaled) for wrap in (ddp, fast(zero=zero))]


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("zero", [0, 2])
def test_only_the_scaler_asks_for_a_value(zero):
    for theirs, ours in run_simulated(scaled, 2, zero):
        assert [len(waits) for _, waits in ours] == [len(waits) for _, waits in theirs]


def guarded(rank, world, options):
    return waits_of_steps(rank, world, fast(nonfinite="skip", **options), plain)


@pytest.mark.slow(but=("2-int8",))
@pytest.mark.parametrize("case", GUARDED)
@pytest.mark.parametrize("world", [1, 2])
def test_nonfinite_asks_once_in_the_step(world, case):
    for found in run_simulated(guarded, world, GUARDED[case]):
        for in_backward, waits in found:
            assert not in_backward, "\n".join(in_backward)
            assert len(waits) == 1, "\n".join(waits)


def unused(rank, world, zero):
    wrap = fast(zero=zero, bucket_cap_mb=0.0001)
    return waits_of_steps(rank, world, wrap, plain, model=Partly)


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("zero", [0, 2])
def test_unused_parameters_are_asked_for_once(zero):
    missed, others = run_simulated(unused, 2, zero)
    assert [len(waits) for _, waits in missed] == [1] * len(missed)
    assert not any(waits for _, waits in others)


def unused_or_guarded(rank, world, zero):
    """Return the races of the last step, whose flags stay on the device."""
    from tests.simulated.device import detecting

    races = []
    options = {"zero": zero, "bucket_cap_mb": 0.0001, "nonfinite": "skip"}
    with detecting(races):
        waits_of_steps(rank, world, fast(**options), plain, model=Partly)
    return races


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("zero", [0, 2])
def test_flags_that_stay_on_the_device_do_not_race(zero):
    for races in run_simulated(unused_or_guarded, 2, zero):
        assert not races, "\n".join(races)


def launches(rank, world, wrap, groups):
    """Return how many kernels of the project's own, and tasks, a step launches."""
    from tests.simulated.device import low, placed

    wrapped = wrap(placed(net(groups - 1)))
    opt = optim.SGD(wrapped.parameters(), 0.1, foreach=True)
    for number in range(1, LAST + 1):
        if number == FIRST:
            low.synchronize()
            low.report(reset=True)
        loss_of(wrapped, words(rank, number).to(DEVICE)).backward()
        opt.step()
        opt.zero_grad()
    steps = LAST + 1 - FIRST
    report = low.report()
    return report.kernels / steps, report.launches / steps


def of_stage(rank, world, stage, groups):
    return launches(
        rank, world, by_block(fastsync.fully_shard) if stage == 3 else fast(zero=stage), groups
    )


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_launches_do_not_grow_with_ranks(stage):
    """A step has at most 6 own kernels and collectives per group."""
    groups = 4
    found = [run_simulated(of_stage, world, stage, groups)[0] for world in (2, 4)]
    assert found[0][0] == found[1][0]
    collectives = 3
    assert found[1][0] <= (6 - collectives) * groups
