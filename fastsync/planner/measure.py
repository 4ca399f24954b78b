"""Measures the ranks it runs on, in well under a minute, and writes a profile.

    torchrun --nproc-per-node 2 -m fastsync.plan --measure profile.json

All ranks measure at once, as they train. Rates and latency are those of averages of several sizes:
of links inside a machine, among the ranks of each one, all machines at a time; of links between
machines, among the ranks that have the same place on each. On a CPU these are buckets of FastDDP,
which travel through memory where ranks share it, and one of zero=1, whose collectives may reach
less. On a GPU they are bare all-reduces, since the host does not see when a bucket is there. Rates
of the device come from a matrix product, a pass over memory and an operator on next to nothing.
Last, steps of a small model with FastDDP, in few buckets and in many, tell how much computing slows
down while gradients travel, by bytes and by collectives: on a CPU both need the same cores.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastsync.ddp import FastDDP
from fastsync.plan.policy import BucketPolicy
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster
from fastsync.planner.profile import DeviceRates, LinkRates, Machine, Profile, Sample
from fastsync.planner.scenario import Scenario, cached_optimizer
from fastsync.planner.simulate import Job, simulate
from fastsync.planner.strategy import named
from fastsync.planner.tracing import trace_model, trace_optimizer
from fastsync.ranks.machines import network_space

__all__ = ["calibration_model", "measure", "measure_to"]

_SIZES = tuple(1 << power for power in range(12, 25, 2))  # 4 KiB to 16 MiB
_SHARED = 1 << 22  # bytes whose ranks share what they average
_SCATTERS = (0.2, 2.0)
_SECONDS = 0.6  # for each figure
_FEWEST = 5
_SHORTEST = 1e-6  # seconds that a difference of two figures counts for at least
_SIDE = 768
_BATCH, _WIDTH, _DEPTH = 64, 768, 6
_CAPS_MB = (None, 1.0)  # of buckets; a layer of the calibration model has 2.25


def measure_to(path: Path) -> None:
    """Measures these ranks; rank 0 writes the profile. Collective.

    Raises:
        ValueError: it does not run under torchrun, with at least two ranks.
    """
    if not dist.is_torchelastic_launched():
        raise ValueError(
            "--measure runs on the ranks that will train; start it with torchrun "
            f"--nproc-per-node N -m fastsync.plan --measure {path}"
        )
    logging.getLogger("fastsync").setLevel(logging.ERROR)  # not whom these models wait for
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
        profile = measure(device)
        if dist.get_rank() == 0:
            try:
                profile.dump(path)
            except OSError as error:
                raise ValueError(
                    f"--measure: {path} cannot be written: {error.strerror}"
                ) from error
            print(f"wrote {path}: {_words(profile)}")
    finally:
        dist.destroy_process_group()


def measure(device: torch.device) -> Profile:
    """Measures the ranks of the default group. Collective.

    Raises:
        ValueError: there is one rank alone.
    """
    world = dist.get_world_size()
    if world < 2:
        raise ValueError("--measure needs at least two ranks, between which something travels")
    places = _Places.found()
    inside, between = (places.rates(kind, device) for kind in (places.machine, places.seats))
    rates = _device_rates(device)
    backend = dist.get_backend()
    links = [each.link(backend) for each in (inside, between) if each is not None]
    cluster = Cluster(world, places.per_machine, links[0], links[-1], backend)
    if device.type == "cpu":
        sending, launching = _host_costs(device, rates, cluster)
        rates = replace(rates, sending=sending, launching=launching)
    return Profile(_machine(device), torch.__version__, world, backend, rates, inside, between)


def _machine(device: torch.device) -> Machine:
    """What this rank runs on."""
    names = (line.partition(":") for line in _lines(Path("/proc/cpuinfo")))
    models = (value.strip() for key, _, value in names if key.strip() == "model name")
    processor = next(models, platform.processor() or platform.machine())
    cores = os.cpu_count() or 1
    if device.type != "cuda":
        return Machine(processor, cores)
    gpu = torch.cuda.get_device_properties(device)
    return Machine(processor, cores, gpu.name, float(gpu.total_memory))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(profile: Profile) -> str:
    classes = {"inside a machine": profile.inside, "between machines": profile.between}
    links = (
        f"{each.rate / 1e9:.3g} GB/s and {each.latency * 1e6:.3g} us a hop {where}"
        for where, each in classes.items()
        if each is not None
    )
    device = profile.device
    return (
        f"{', '.join(links)}, {device.flops / 1e9:.3g} GFLOP/s, "
        f"{device.bandwidth / 1e9:.3g} GB/s of memory; {profile}"
    )


@dataclass(frozen=True)
class _Places:
    """Which ranks share a machine.

    Attributes:
        machine: the ranks of each; `seats`: those with the same place on every machine.
    """

    machine: tuple[tuple[int, ...], ...]

    @classmethod
    def found(cls) -> _Places:
        """Collective."""
        spaces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(spaces, _space())
        return cls.of(spaces)

    @classmethod
    def of(cls, spaces: Sequence[str]) -> _Places:
        """From what every rank says of its machine.

        Raises:
            ValueError: some machines have more ranks than others.
        """
        ranks = range(len(spaces))
        names = dict.fromkeys(spaces)
        machines = tuple(tuple(r for r in ranks if spaces[r] == name) for name in names)
        counts = [len(machine) for machine in machines]
        if len(set(counts)) > 1:
            raise ValueError(
                f"--measure: machines have {', '.join(map(str, counts))} ranks; start as many on "
                "each, as a plan's --per-node says"
            )
        return cls(machines)

    @property
    def per_machine(self) -> int:
        return len(self.machine[0])

    @property
    def seats(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self.machine, strict=True))

    def rates(self, groups: tuple[tuple[int, ...], ...], device: torch.device) -> LinkRates | None:
        """Of all-reduces in all of the groups at once; None: nobody has anybody to talk to."""
        ranks = len(groups[0])
        if ranks < 2:
            return None
        made = [dist.new_group(list(group)) for group in groups]
        mine = next(g for g, group in zip(made, groups, strict=True) if dist.get_rank() in group)
        one = _all_reduce if device.type == "cuda" else _bucket
        found = LinkRates.of([one(size, mine, device) for size in _SIZES], ranks)
        if device.type == "cpu":
            whole = _in_shares(_SHARED, mine, device)
            found = replace(found, scatter=_scatter(found, whole))
        dist.destroy_process_group(mine)
        return found


def _space() -> str:
    try:
        return network_space()
    except OSError:
        return socket.gethostname()


def _together(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `run` on the slowest rank."""
    return _in_turns([run], device)[0]


def _in_turns(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """That of each, in as many rounds as rank 0 has time for."""

    def once(run: Callable[[], object]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    for run in runs:
        once(run)
    until = time.perf_counter() + _SECONDS
    times = [[once(run) for run in runs]]
    while _agreed(len(times) < _FEWEST or time.perf_counter() < until, device):
        times.append([once(run) for run in runs])
    return [_slowest(median(column), device) for column in zip(*times, strict=True)]


def _agreed(goes_on: bool, device: torch.device) -> bool:
    """Rank 0's answer."""
    answer = torch.tensor([float(goes_on)], device=device)
    dist.broadcast(answer, 0)
    return bool(answer.item())


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _all_reduce(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Sample:
    buffer = torch.ones(nbytes // 4, device=device)
    return Sample(nbytes, _together(lambda: dist.all_reduce(buffer, group=group), device))


class _Bucket(nn.Module):
    """One parameter, whose gradient costs a pass over memory."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


def _bucket(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """What averaging adds to the step of such a model."""
    model = FastDDP(_Bucket(nbytes // 4), process_group=group, bucket_cap_mb=nbytes / (1 << 20))

    def step() -> None:
        model.zero_grad()
        model(2.0).backward()

    def local() -> None:
        with model.no_sync():
            step()

    whole, own = _in_turns((step, local), device)
    return Sample(nbytes, max(whole - own, _SHORTEST))


def _in_shares(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """What the same adds where ranks share it: a reduce-scatter, and an all-gather afterwards."""
    count = nbytes // 4
    model = FastDDP(_Bucket(count), process_group=group, zero=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = nn.Parameter(torch.zeros(count // group.size()))
    share.grad = torch.zeros_like(share)
    own = torch.optim.SGD([share], lr=0.1)

    def step() -> None:
        model.zero_grad()
        model(2.0).backward()
        optimizer.step()

    def local() -> None:
        with model.no_sync():
            model.zero_grad()
            model(2.0).backward()
        own.step()

    whole, alone = _in_turns((step, local), device)
    return Sample(nbytes, max(whole - alone, _SHORTEST))


def _scatter(ring: LinkRates, shared: Sample) -> float:
    """The share of the rate that is left where ranks share, once latencies are taken off."""
    hops = 2 * (ring.ranks - 1)
    travelling = max(shared.seconds - hops * ring.latency, _SHORTEST)
    expected = hops / ring.ranks * shared.nbytes / ring.rate
    least, most = _SCATTERS
    return min(most, max(least, expected / travelling))


def _device_rates(device: torch.device) -> DeviceRates:
    left, right = (torch.randn(_SIDE, _SIDE, device=device) for _ in range(2))
    product = _together(lambda: left @ right, device)
    source = torch.randn(1 << 22, device=device)
    target = torch.empty_like(source)
    passed = _together(lambda: torch.neg(source, out=target), device)
    tiny = torch.ones(4, device=device)
    many = 200

    def operators() -> None:
        for _ in range(many):
            torch.add(tiny, tiny)

    overhead = _together(operators, device) / many if device.type == "cpu" else 0.0
    return DeviceRates(2 * _SIDE**3 / product, 2 * source.nbytes / passed, overhead)


def calibration_model() -> nn.Module:
    """A stack of layers, with enough gradients for several buckets."""
    layers: list[nn.Module] = []
    for _ in range(_DEPTH):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _host_costs(device: torch.device, rates: DeviceRates, cluster: Cluster) -> tuple[float, float]:
    """Seconds of computing lost in a real step per byte that is sent beside it, and per collective.

    Two steps tell them apart: one in the default's buckets, one with a bucket for each layer.
    """
    batch = torch.randn(_BATCH, _WIDTH, device=device)
    alone = calibration_model().to(device)
    models = [FastDDP(calibration_model().to(device), bucket_cap_mb=cap) for cap in _CAPS_MB]

    def step(module: nn.Module) -> None:
        module.zero_grad()
        module(batch).pow(2).mean().backward()

    computing, *whole = _in_turns([partial(step, m) for m in (alone, *models)], device)
    jobs = [_job(rates, cluster, computing, cap) for cap in _CAPS_MB]
    few, many = (_lost(job, seconds) for job, seconds in zip(jobs, whole, strict=True))
    more = jobs[1].launched - jobs[0].launched
    launching = max(0.0, many - few) / more if more > 0 else 0.0
    return max(0.0, few - launching * jobs[0].launched) / jobs[0].sent, launching


def _lost(job: Job, measured: float) -> float:
    """Seconds of computing that communication cost in a step that took so long.

    They show in the share of communication that computing hides, and are no more than all of it.
    """
    time = simulate(job)
    hidden = time.communicating - time.exposed
    if hidden <= 0:
        return 0.0
    return min(1.0, max(0.0, (measured - time.mean) / hidden)) * time.communicating


def _job(rates: DeviceRates, cluster: Cluster, computing: float, cap: float | None) -> Job:
    """The step of the calibration model that computes so long.

    Args:
        cap: of its buckets, in MiB; None: the default.
    """
    kind = Device("cpu", rates.flops, rates.flops, rates.bandwidth, 1e12, 0.0, 1.0, 1.0)
    scenario = Scenario(
        trace=lambda samples, _: trace_model(calibration_model, (samples, _WIDTH)),
        samples=_BATCH,
        optimizer=cached_optimizer(lambda shapes: trace_optimizer("sgd", shapes, False)),
        device=kind,
        cluster=cluster,
        buckets=None if cap is None else BucketPolicy.from_mb(cap),
    )
    traced = scenario.compute
    scale = computing / (traced.forward + traced.backward)
    measured = replace(traced.scaled(scale), update=0.0)
    return replace(scenario, measured=measured).job(named("0", cluster.world, cluster.world))
