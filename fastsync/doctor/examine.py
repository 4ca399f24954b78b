"""The examination: facts through the store, checks, then measurements or a drill.

Ranks other than 0 do as they are told, and get no report.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fastsync.doctor import rates
from fastsync.doctor.checks import Ranks, check_facts, check_shared, machines_of
from fastsync.doctor.drill import DRILL_TIMEOUT, hear, run_children, tell
from fastsync.doctor.drill_rank import Order
from fastsync.doctor.drilled import Drill, judge
from fastsync.doctor.facts import Facts, facts_of_this_rank
from fastsync.doctor.finding import Finding, Level, fail, ok, warn, worst
from fastsync.doctor.report import Measured, Report
from fastsync.doctor.skew import Skew, check_skew, find_skew, wall_lead
from fastsync.doctor.slow import check_compute, check_pairs, find_slow, suspects
from fastsync.doctor.team import Team, present
from fastsync.engine.memory import offer_memory
from fastsync.engine.watch import explained, open_watch
from fastsync.ranks.clocks import ClockOffset, align_clocks
from fastsync.ranks.stores import served_at
from fastsync.ranks.words import name_ranks
from fastsync.torch_private import PrefixStore, Store, TCPStore, default_group

__all__ = ["Asked", "examine", "examine_alone"]

_ALONE = 3  # ranks of a drill where there is no launcher
_BUILD = 600.0  # seconds for facts, which may have to compile the extension
_DRILL = 240.0  # seconds for a drill's outcome
_DOUBTFUL = 32  # pairs that get a second look
_SHARES = {"sweep": 0.45, "pairs": 0.45, "compute": 0.1}  # of the time for measuring


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Attributes:
        seconds: for measuring.
        timeout: seconds to wait for ranks.
        drill: a fault; empty: none.
        rank: that has it; None: the last.
    """

    backend: str
    seconds: float
    timeout: float
    drill: str = ""
    rank: int | None = None

    def victim(self, world: int) -> int:
        """The rank that has the fault.

        Raises:
            ValueError: there is no such rank, or no other that could notice.
        """
        if world < 2:
            raise ValueError("a drill needs two ranks or more, of which one notices the fault")
        rank = world - 1 if self.rank is None else self.rank
        if not 0 <= rank < world:
            raise ValueError(f"--rank {rank} is none of the {world} ranks")
        return rank


def examine_alone(asked: Asked) -> Report:
    """This process, without others."""
    ranks = {0: facts_of_this_rank(None, 0)}
    findings = check_facts(ranks, 1, asked.backend)
    drill = None
    if asked.drill and worst(findings) < Level.FAIL:
        victim = asked.victim(_ALONE)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _say(f"drill: {asked.drill} rank {victim} of {_ALONE}, half a minute at most")
        orders = [_order(asked, store, rank, _ALONE) for rank in range(_ALONE)]
        drill = hear(asked.drill, victim, [tell(run_children(orders))], [0])
        findings += judge(drill)
    return Report(1, asked.backend, ranks, findings, drill=drill)


def examine(team: Team, asked: Asked) -> Report | None:
    """All ranks; rank 0 gets the report. Every rank calls it.

    Raises:
        RuntimeError: ranks have gone meanwhile.
        ValueError: what was asked for makes no sense; on every rank.
    """
    victim = asked.victim(team.world) if asked.drill else 0
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    _say_first(team, "facts of all ranks")
    came = team.gather("roll call", "here")
    absent = {rank for rank, said in enumerate(came) if said is None}
    mine = facts_of_this_rank(team.store, local_rank)
    ranks = _parsed(team.gather("facts", mine.dump(), _BUILD, absent))
    findings = check_facts(ranks, team.world, asked.backend) if team.rank == 0 else []
    if team.tell("go on", worst(findings).name, _BUILD) == Level.FAIL.name:
        return _first(team, Report(team.world, asked.backend, ranks, findings))
    offsets, skews = _clocks(team)
    if asked.drill:
        drill = _drill(team, asked, victim, offsets, local_rank)
        findings += judge(drill) if drill else []
        return _first(team, Report(team.world, asked.backend, ranks, findings, skews, drill=drill))
    findings += check_skew(skews)
    measured, more = _measure(team, asked, _machine_of(team, ranks), local_rank)
    findings += more
    return _first(team, Report(team.world, asked.backend, ranks, findings, skews, measured))


def _first(team: Team, report: Report) -> Report | None:
    return report if team.rank == 0 else None


def _parsed(told: Sequence[str | None]) -> Ranks:
    return {rank: Facts.parse(text) for rank, text in present(told).items()}


def _say(text: str) -> None:
    print(f"fastsync doctor: {text}", file=sys.stderr, flush=True)


def _say_first(team: Team, text: str) -> None:
    if team.rank == 0:
        _say(text)


def _machine_of(team: Team, ranks: Ranks) -> list[int]:
    """By rank, the number of its machine; alike on all ranks."""
    numbers = [0] * team.world
    for number, its in enumerate(machines_of(ranks)):
        for rank in its:
            numbers[rank] = number
    return [int(number) for number in json.loads(team.tell("machines", json.dumps(numbers)))]


def _clocks(team: Team) -> tuple[list[ClockOffset | None], list[Skew | None]]:
    _say_first(team, "clocks")
    offsets = align_clocks(team.mail("clocks"), team.rank, team.world)
    leads = team.gather("time of day", str(wall_lead()))
    known = [None if lead is None else int(lead) for lead in leads]
    return offsets, find_skew(known, offsets[: len(known)])


def _order(asked: Asked, store: Store, rank: int, world: int, local_rank: int = 0) -> Order:
    place = served_at(store)
    if place is None:
        raise ValueError("a drill needs a rendezvous store that is a server, as torchrun has it")
    fault = asked.drill if rank == asked.victim(world) else ""
    host, port = place
    return Order(
        fault, rank, world, local_rank, asked.backend, host, port, "doctor/drill", DRILL_TIMEOUT
    )


def _drill(
    team: Team, asked: Asked, victim: int, offsets: Sequence[ClockOffset | None], local_rank: int
) -> Drill | None:
    _say_first(team, f"drill: {asked.drill} rank {victim}, half a minute at most")
    order = _order(asked, team.store, team.rank, team.world, local_rank)
    told = team.gather("drill", tell(run_children([order])), _DRILL)
    nanoseconds = [0 if it is None else it.offset_ns for it in offsets]
    return hear(asked.drill, victim, told, nanoseconds) if team.rank == 0 else None


def _open_group(team: Team, asked: Asked, local_rank: int) -> list[Finding]:
    """The process group, or on all ranks alike the reason why there is none."""
    error = ""
    try:
        if asked.backend == "nccl":
            torch.cuda.set_device(local_rank)
        dist.init_process_group(
            asked.backend,
            store=PrefixStore("doctor/group", team.store),
            rank=team.rank,
            world_size=team.world,
            timeout=timedelta(seconds=asked.timeout),
            device_id=torch.device("cuda", local_rank) if asked.backend == "nccl" else None,
        )
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    # Rank 0 may only come here when another rank has been here for the timeout.
    told = team.gather("group", error, 2 * asked.timeout)
    failed = {rank: text for rank, text in enumerate(told) if text != ""}
    if team.tell("group", "failed" if failed else "", 2 * asked.timeout) == "":
        return []
    remedy = "Look at firewalls between the machines, and at GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    return [
        fail("process group", f"{name_ranks([r])}: {text or 'no answer'}", remedy)
        for r, text in failed.items()
    ] or [fail("process group", "it could not be made", remedy)]


@contextlib.contextmanager
def _closed_at_end() -> Iterator[None]:
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure(
    team: Team, asked: Asked, machine_of: Sequence[int], local_rank: int
) -> tuple[Measured | None, list[Finding]]:
    if team.world == 1:
        return None, []
    with _closed_at_end():
        failed = _open_group(team, asked, local_rank)
        if failed:
            return None, failed
        findings = _services(asked.backend)
        with explained(default_group(), "the doctor's measurements"):
            measured, more = _rates(team, asked, machine_of, local_rank)
            return measured, findings + more


def _services(backend: str) -> list[Finding]:
    """Whether ranks look out for each other, and average in memory where they can."""
    findings = []
    why = open_watch(default_group())
    if why:
        remedy = "A rank that dies will not be named: see docs/faults.md"
        findings.append(warn("faults", f"nobody looks out for them: {why}", remedy))
    else:
        findings.append(ok("faults", "the ranks look out for each other"))
    if backend == "gloo":
        memory, why = offer_memory(default_group(), 1 << 20)
        del memory
        findings += check_shared(why)
    return findings


def _looked_twice(
    pairs: rates.Pairs, machine_of: Sequence[int], device: torch.device
) -> rates.Pairs:
    """Pairs that seem slow are measured again, as all ranks know alike which."""
    doubtful = suspects(pairs.times, find_slow(pairs.times, machine_of))
    return rates.look_again(pairs, doubtful[:_DOUBTFUL], device)


def _rates(
    team: Team, asked: Asked, machine_of: Sequence[int], local_rank: int
) -> tuple[Measured, list[Finding]]:
    on_gpu = asked.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    _say_first(team, f"measuring, about {asked.seconds:g} s: all-reduces")
    sizes = rates.sweep(device, _SHARES["sweep"] * asked.seconds)
    _say_first(team, "pairs of ranks")
    rate = max(it.rate for it in sizes)
    pairs = rates.measure_pairs(
        device, _SHARES["pairs"] * asked.seconds, rate, lambda text: _say_first(team, text)
    )
    pairs = _looked_twice(pairs, machine_of, device)
    _say_first(team, "computing")
    seconds = rates.compute_seconds(device, _SHARES["compute"] * asked.seconds)
    slow = find_slow(pairs.times, machine_of)
    measured = Measured(sizes, pairs, slow, [rates.compute_flops(s, device) for s in seconds])
    return measured, [*check_pairs(slow, len(pairs.times)), *check_compute(seconds)]
