"""Measures the ranks it runs on, in well under a minute, and writes a profile.

    torchrun --nproc-per-node 2 -m fastsync.plan --measure profile.json

All ranks measure at once, as they train. Rates and latency are those of averages of several sizes:
of links inside a machine, among the ranks of each one, all machines at a time; of links between
machines, among the ranks that have the same place on each. On a CPU these are buckets of FastDDP,
which travel through memory where ranks share it, and one of zero=1, whose collectives may reach
less. On a GPU they are bare all-reduces, since the host does not see when a bucket is there. Rates
of the device come from a matrix product, a pass over memory, the code of a bucket and an operator
on next to nothing.
Last, steps of small models with FastDDP, in few buckets, in many, and with many tensors, tell how
much computing slows down while gradients travel, by bytes, by collectives and by tensors: on a CPU
both need the same cores.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastsync.ddp import FastDDP
from fastsync.planner.host import device_rates, host_costs
from fastsync.planner.links import Cluster
from fastsync.planner.own_step import Training, measure_step
from fastsync.planner.profile import LinkRates, Machine, Profile, Sample
from fastsync.planner.rounds import in_turns, together
from fastsync.ranks.machines import network_space

__all__ = ["measure", "measure_to"]

_SIZES = tuple(1 << power for power in range(12, 25, 2))  # 4 KiB to 16 MiB
_SHARED = 1 << 22  # bytes whose ranks share what they average
_FASTEST = 1e13  # bytes per second of a link that can be
_SCATTERS = (0.2, 2.0)
_SHORTEST = 1e-6  # seconds that a difference of two figures counts for at least


def measure_to(path: Path, training: Training | None = None) -> None:
    """Measures these ranks; rank 0 writes the profile. Collective.

    Args:
        training: whose step is measured, too.

    Raises:
        ValueError: it does not run under torchrun, with at least two ranks, or the model makes no
            step.
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
        if training is not None:
            profile = replace(profile, step=measure_step(training, device))
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
    rates = device_rates(device)
    backend = dist.get_backend()
    links = [each.link(backend) for each in (inside, between) if each is not None]
    cluster = Cluster(world, places.per_machine, links[0], links[-1], backend)
    if device.type == "cpu":
        rates = host_costs(device, rates, cluster)
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
    device, step = profile.device, profile.step
    known = [each.rate for each in classes.values() if each is not None]
    busy = max(known) >= _FASTEST
    again = "; large messages took no longer than small ones: measure on a quiet machine" * busy
    own = "" if step is None else f"{1e3 * (step.forward + step.backward):.3g} ms for {step}; "
    return (
        f"{', '.join(links)}, {device.flops / 1e9:.3g} GFLOP/s, "
        f"{device.bandwidth / 1e9:.3g} GB/s of memory, {device.coding / 1e9:.3g} GB/s of coding, "
        f"{1e6 * device.handling:.3g} us for a tensor; {own}{profile}{again}"
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


def _all_reduce(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Sample:
    buffer = torch.ones(nbytes // 4, device=device)
    return Sample(nbytes, together(lambda: dist.all_reduce(buffer, group=group), device))


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

    whole, own = in_turns((step, local), device)
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

    whole, alone = in_turns((step, local), device)
    return Sample(nbytes, max(whole - alone, _SHORTEST))


def _scatter(ring: LinkRates, shared: Sample) -> float:
    """The share of the rate that is left where ranks share, once latencies are taken off."""
    hops = 2 * (ring.ranks - 1)
    travelling = max(shared.seconds - hops * ring.latency, _SHORTEST)
    expected = hops / ring.ranks * shared.nbytes / ring.rate
    least, most = _SCATTERS
    return min(most, max(least, expected / travelling))
