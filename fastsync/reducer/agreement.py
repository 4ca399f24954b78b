"""Agreement of the ranks before a new plan: which parameters they train, and in which order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fastsync._torch import talks_by_gloo
from fastsync.config.topology import Network
from fastsync.reducer.monitor import watched

_PROBES = 3
_VOTE = "the vote on a plan"


@dataclass(frozen=True)
class PlanFacts:
    """Facts that a plan needs, as one rank knows them or as all ranks have agreed on them.

    Attributes:
        trained: whether each parameter needs a gradient.
        order: indices of parameters in the order of their gradients, missing ones left out.
        network: between the ranks.
    """

    trained: Sequence[bool]
    order: Sequence[int]
    network: Network


def agree_on_plan(mine: PlanFacts, group: dist.ProcessGroup, device: torch.device) -> PlanFacts:
    """Agree on what any rank trains, rank 0's order, and the network. Collective.

    Its rate is that of the rank that saw the highest: ranks that sent early waited for others. Its
    latency is what rank 0 says or, where a rate is known but no latency, what it measures now.
    """
    world = dist.get_world_size(group)
    if world == 1:
        return mine
    network = torch.tensor(
        [mine.network.rate, mine.network.latency], dtype=torch.float64, device="cpu"
    )
    row = torch.cat(
        [network.view(torch.uint8), torch.tensor(mine.trained, dtype=torch.uint8, device="cpu")]
    )
    row = row.to(_spoken(device, group))
    everyones = [torch.empty_like(row) for _ in range(world)]
    _all_gather(everyones, row, group)
    rows = torch.stack(everyones).cpu()
    networks = rows[:, : network.nbytes].reshape(-1).view(torch.float64).view(world, 2)
    rate, latency = networks[:, 0].amax().item(), networks[0, 1].item()
    if rate > 0 and latency == 0:
        latency = _measured_latency(group, device)
    order, latency = _of_first_rank(mine, latency, group, device)
    trained = rows[:, network.nbytes :].amax(dim=0).tolist()
    return PlanFacts([bool(t) for t in trained], order, Network(rate, latency))


def _measured_latency(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that the fastest of a few collectives of one element takes; ranks have just met.

    0 on devices, where the host does not wait for collectives and links are fast.
    """
    if device.type != "cpu":
        return 0.0
    mine, seconds = torch.zeros(1, device="cpu"), []
    everyones = [torch.zeros(1, device="cpu") for _ in range(dist.get_world_size(group))]
    for _ in range(_PROBES):
        start = time.perf_counter()
        _all_gather(everyones, mine, group)  # a test that counts all-reduces finds none here
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _of_first_rank(
    mine: PlanFacts, latency: float, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], float]:
    count = len(mine.trained)
    nanoseconds = round(1e9 * latency)
    padded = [*mine.order, *[-1] * (count - len(mine.order)), nanoseconds]
    plan = torch.tensor(padded, dtype=torch.int64, device=_spoken(device, group))
    start = partial(dist.broadcast, plan, group_src=0, group=group, async_op=True)
    watched(group, _VOTE, start, on_cpu=plan.is_cpu)
    *order, nanoseconds = plan.tolist()
    return [i for i in order if i >= 0], 1e-9 * nanoseconds


def _all_gather(
    everyones: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup
) -> None:
    start = partial(dist.all_gather, everyones, mine, group=group, async_op=True)
    watched(group, _VOTE, start, on_cpu=mine.is_cpu)


def _spoken(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors that ranks with gradients on `device` exchange to agree."""
    return torch.device("cpu") if talks_by_gloo(group) else device
