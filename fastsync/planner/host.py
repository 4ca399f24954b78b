"""What a rank computes, and what sending costs it: measured on all ranks at once.

Rates come from a matrix product, a pass over memory, an operator on next to nothing, and the code
of a bucket. On a CPU, computing and sending need the same cores, and three steps with FastDDP tell
what that costs: of one model in few buckets and in many, and of one with many small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fastsync.ddp import FastDDP
from fastsync.engine import core
from fastsync.plan.layout import ALIGNMENT, align_up, slot_layout
from fastsync.plan.policy import BucketPolicy
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster
from fastsync.planner.profile import DeviceRates
from fastsync.planner.rounds import in_turns, together
from fastsync.planner.scenario import Scenario, cached_optimizer
from fastsync.planner.simulate import Job, simulate
from fastsync.planner.strategy import named
from fastsync.planner.tracing import trace_model, trace_optimizer
from fastsync.wire.formats import FORMATS

__all__ = ["STACKS", "Timed", "costs_of", "device_rates", "host_costs"]

_SIDE = 768
_NUMEL = 1 << 22  # of what is read, or coded
_OPERATORS = 200
_CODE = FORMATS["int8"]
_ROUNDS = 4  # in which the costs of collectives and of tensors are found in turns


@dataclass(frozen=True)
class _Stack:
    """Layers that train in buckets of at most `cap` MiB; None: the default's.

    Attributes:
        width: of each layer; `batch`: rows.
    """

    width: int
    depth: int
    batch: int
    cap: float | None = None

    def module(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers)

    def steps(self, device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
        """One that talks to nobody, and one that averages. Collective."""
        batch = torch.randn(self.batch, self.width, device=device)

        def step_of(module: nn.Module) -> Callable[[], None]:
            def step() -> None:
                module.zero_grad()
                module(batch).pow(2).mean().backward()

            return step

        wrapped = FastDDP(self.module().to(device), bucket_cap_mb=self.cap)
        return step_of(self.module().to(device)), step_of(wrapped)

    def job(self, rates: DeviceRates, cluster: Cluster, computing: float) -> Job:
        """The step that computes so long, as planned where sending costs the processor nothing."""
        scenario = Scenario(
            trace=lambda samples, _: trace_model(self.module, (samples, self.width)),
            samples=self.batch,
            optimizer=cached_optimizer(lambda shapes: trace_optimizer("sgd", shapes, False)),
            device=Device("cpu", rates.flops, rates.flops, rates.bandwidth, 1e12, 0.0, 1.0, 1.0),
            cluster=cluster,
            buckets=None if self.cap is None else BucketPolicy.from_mb(self.cap),
        )
        traced = scenario.compute
        scale = computing / (traced.forward + traced.backward)
        measured = replace(traced.scaled(scale), update=0.0)
        return replace(scenario, measured=measured).job(named("0", cluster.world, cluster.world))


_FEW = _Stack(768, 6, 64)
# In few buckets, in many (a layer has 2.25 MiB), and with many tensors.
STACKS = (_FEW, replace(_FEW, cap=1.0), _Stack(32, 100, 16))
Timed = tuple[Job, float]  # a step as planned, and the seconds that it took


def device_rates(device: torch.device) -> DeviceRates:
    """Of every rank while all others compute the same. Collective."""
    left, right = (torch.randn(_SIDE, _SIDE, device=device) for _ in range(2))
    product = together(lambda: left @ right, device)
    source = torch.randn(_NUMEL, device=device)
    target = torch.empty_like(source)
    passed = together(lambda: torch.neg(source, out=target), device)
    tiny = torch.ones(4, device=device)

    def operators() -> None:
        for _ in range(_OPERATORS):
            torch.add(tiny, tiny)

    overhead = together(operators, device) / _OPERATORS if device.type == "cpu" else 0.0
    rates = DeviceRates(2 * _SIDE**3 / product, 2 * source.nbytes / passed, overhead)
    return replace(rates, coding=_coding(source, target))


def _coding(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes of gradients per second of one pass: writing a code, or reading it."""
    numel = slot_layout([source.numel()], _CODE.block).numel
    size = align_up(_CODE.coded_bytes(numel), ALIGNMENT)
    code, plan = source.new_zeros(size, dtype=torch.uint8), (_CODE.name, numel)

    def there_and_back() -> None:
        core.encode([source], [0], code, plan)
        core.decode([target], [0], code, plan)

    return 2 * source.nbytes / together(there_and_back, source.device)


def host_costs(device: torch.device, rates: DeviceRates, cluster: Cluster) -> DeviceRates:
    """The same with seconds of computing lost per byte sent, per collective and per tensor.

    Collective.
    """
    timed = []
    for stack in STACKS:
        computing, whole = in_turns(stack.steps(device), device)
        timed.append((stack.job(rates, cluster, computing), whole))
    return costs_of(rates, timed)


def costs_of(rates: DeviceRates, timed: Sequence[Timed]) -> DeviceRates:
    """From the steps of `STACKS`.

    Collectives cost what communication that computing hides takes from it; tensors, what they take
    to be packed, whatever is hidden. Each is found with what is known of the other.
    """
    few, many, small = timed
    for _ in range(_ROUNDS):
        sending, launching = _collectives(few, many, rates.handling)
        rates = replace(rates, sending=sending, launching=launching)
        rates = replace(rates, handling=_tensors(*small, rates))
    return rates


def _collectives(few: Timed, many: Timed, handling: float) -> tuple[float, float]:
    """Per byte and per collective, from two steps that send the same."""
    losses = [_lost(job, seconds - handling * job.handled) for job, seconds in (few, many)]
    more = many[0].launched - few[0].launched
    launching = max(0.0, losses[1] - losses[0]) / more if more > 0 else 0.0
    return max(0.0, losses[0] - launching * few[0].launched) / few[0].sent, launching


def _tensors(job: Job, seconds: float, rates: DeviceRates) -> float:
    """Per tensor that is packed or unpacked."""
    host = rates.sending * job.sent + rates.launching * job.launched
    return max(0.0, seconds - simulate(replace(job, host=host)).mean) / job.handled


def _lost(job: Job, measured: float) -> float:
    """Seconds of computing that communication cost in a step that took so long.

    They show in the share of communication that computing hides, and are no more than all of it.
    """
    time = simulate(job)
    hidden = time.communicating - time.exposed
    if hidden <= 0:
        return 0.0
    return min(1.0, max(0.0, (measured - time.mean) / hidden)) * time.communicating
