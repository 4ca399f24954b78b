"""The examination: facts through the store, checks, then measurements or a drill.

Ranks other than 0 do as rank 0 says, and get no report.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fastsync._torch import PrefixStore, Store, TCPStore, default_group
from fastsync.doctor import rates
from fastsync.doctor.checks import check_facts, check_shared, machines_of
from fastsync.doctor.drill import DRILL_TIMEOUT, collect, judge, run_drill
from fastsync.doctor.drill_rank import Order
from fastsync.doctor.facts import Facts, facts_of_this_rank
from fastsync.doctor.finding import Finding, Level, fail, ok, warn, worst
from fastsync.doctor.report import Report
from fastsync.faults.clocks import Mailbox, align_clocks
from fastsync.faults.stores import served_at
from fastsync.faults.wording import name_ranks
from fastsync.reducer.monitor import explained, open_watch
from fastsync.reducer.shared_memory import offer_memory

__all__ = ["Asked", "Team", "examine", "examine_alone"]

_ALONE = 3  # ranks of a drill where there is no launcher
_BUILD = 600.0  # seconds for facts, which may have to compile the extension
_DRILL = 240.0  # seconds for a drill's outcome
_SHARES = {"sweep": 0.45, "pairs": 0.45, "compute": 0.1}  # of the time for measuring


@dataclass(frozen=True)
class Asked:
    """Arguments of the command line.

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
        """Return the rank that has the fault.

        Raises:
            ValueError: there is no such rank, or no other that could notice.
        """
        if world < 2:
            raise ValueError("a drill needs two ranks or more, of which one notices the fault")
        rank = world - 1 if self.rank is None else self.rank
        if not 0 <= rank < world:
            raise ValueError(f"--rank {rank} is none of the {world} ranks")
        return rank


class Team:
    """The ranks and their rendezvous store: what they tell rank 0, and what it tells them.

    Rank 0 alone reads what all have written, so that the cost grows with the number of ranks and
    not with its square. Each exchange has a deadline: ranks that are gone cost the others that
    much.

    Attributes:
        rank, world: this one's number, and how many there are.
        store: shared by all ranks.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._timeout = timeout

    @staticmethod
    def meet(timeout: float) -> Team:
        """Find the store that the launcher's variables name.

        Args:
            timeout: seconds for this, and for each exchange.

        Raises:
            RuntimeError, ValueError: there is none, or not all ranks came.
        """
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return Team(store, rank, world, timeout)

    def mail(self, topic: str, timeout: float | None = None) -> Mailbox:
        """Return a mailbox for one exchange, alike on all ranks."""
        return Mailbox(self.store, f"doctor/{topic}", timeout or self._timeout)

    def gather(
        self, topic: str, text: str, timeout: float | None = None, absent: Container[int] = ()
    ) -> list[str | None]:
        """Return what every rank says, on rank 0; None for ranks that did not come in time.

        Args:
            absent: ranks that are not waited for.

        Returns:
            On the other ranks, nothing.
        """
        mail = self.mail(topic, timeout)
        mail.put(str(self.rank), text)
        found: list[str | None] = []
        for rank in range(self.world if self.rank == 0 else 0):
            found.append(None)
            if rank not in absent:
                with contextlib.suppress(RuntimeError):
                    found[rank] = mail.take(str(rank)).decode()
        return found

    def tell(self, topic: str, text: str, timeout: float | None = None) -> str:
        """Return what rank 0 says, on every rank.

        Rank 0 may have waited for ranks that are gone before it speaks, so the others wait longer.

        Raises:
            RuntimeError: it did not say anything in time.
        """
        mail = self.mail(topic, 2 * (timeout or self._timeout) + 5)
        if self.rank == 0:
            mail.put("said", text)
            return text
        return mail.read("said").decode()

    def part(self) -> None:
        """Let rank 0, which may serve the store, leave last."""
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self.gather("parting", "")

    def say(self, text: str) -> None:
        """Tell the user how far it is, once."""
        if self.rank == 0:
            _say(text)


def _say(text: str) -> None:
    print(f"fastsync doctor: {text}", file=sys.stderr, flush=True)


def examine_alone(asked: Asked) -> Report:
    """Examine this process, without others."""
    ranks = {0: facts_of_this_rank(None, 0)}
    findings = check_facts(ranks, 1, asked.backend)
    drill = None
    if asked.drill and worst(findings) < Level.FAIL:
        victim = asked.victim(_ALONE)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _say(f"drill: {asked.drill} rank {victim} of {_ALONE}, half a minute at most")
        orders = [_order(asked, store, rank, _ALONE) for rank in range(_ALONE)]
        drill = collect(asked.drill, victim, [run_drill(orders)], [0])
        findings += judge(drill)
    return Report(1, asked.backend, ranks, findings, drill=drill)


def examine(team: Team, asked: Asked) -> Report | None:
    """Examine all ranks; rank 0 gets the report. Every rank calls it.

    Raises:
        RuntimeError: ranks have gone meanwhile.
        ValueError: what was asked for makes no sense; on every rank.
    """
    victim = asked.victim(team.world) if asked.drill else 0
    local_rank, first = dist.get_node_local_rank(fallback_rank=0), team.rank == 0
    team.say("facts of all ranks")
    came = team.gather("roll call", "here")
    absent = {rank for rank, said in enumerate(came) if said is None}
    mine = facts_of_this_rank(team.store, local_rank)
    told = team.gather("facts", mine.dump(), _BUILD, absent)
    ranks = {rank: Facts.parse(text) for rank, text in enumerate(told) if text is not None}
    findings = check_facts(ranks, team.world, asked.backend) if first else []
    measured = drill = None
    if team.tell("go on", worst(findings).name, _BUILD) != Level.FAIL.name:
        if asked.drill:
            offsets = align_clocks(team.mail("clocks"), team.rank, team.world)
            team.say(f"drill: {asked.drill} rank {victim}, half a minute at most")
            order = _order(asked, team.store, team.rank, team.world, local_rank)
            outcomes = team.gather("drill", run_drill([order]), _DRILL)
            if first:
                nanoseconds = [0 if it is None else it.offset_ns for it in offsets]
                drill = collect(asked.drill, victim, outcomes, nanoseconds)
                findings += judge(drill)
        elif team.world > 1:
            machine_of = [0] * team.world
            for number, its in enumerate(machines_of(ranks)):
                for rank in its:
                    machine_of[rank] = number
            measured, more = _measure(team, asked, machine_of, local_rank)
            findings += more
    return Report(team.world, asked.backend, ranks, findings, measured, drill) if first else None


def _order(asked: Asked, store: Store, rank: int, world: int, local_rank: int = 0) -> Order:
    place = served_at(store)
    if place is None:
        raise ValueError("a drill needs a rendezvous store that is a server, as torchrun has it")
    fault = asked.drill if rank == asked.victim(world) else ""
    host, port = place
    return Order(
        fault, rank, world, local_rank, asked.backend, host, port, "doctor/drill", DRILL_TIMEOUT
    )


# ---- measurements -----------------------------------------------------------------------------


def _open_group(team: Team, asked: Asked, local_rank: int) -> list[Finding]:
    """Open the process group, or say on all ranks alike why there is none."""
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
    team: Team, asked: Asked, machine_of: list[int], local_rank: int
) -> tuple[rates.Measured | None, list[Finding]]:
    """Measure all ranks.

    Args:
        machine_of: by rank, the number of its machine; on rank 0.
    """
    on_gpu, share = asked.backend == "nccl", asked.seconds
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    with _closed_at_end():
        failed = _open_group(team, asked, local_rank)
        if failed:
            return None, failed
        findings = _services(asked.backend)
        with explained(default_group(), "the doctor's measurements"):
            team.say(f"measuring, about {asked.seconds:g} s: all-reduces")
            sizes = rates.sweep(device, _SHARES["sweep"] * share)
            team.say("pairs of ranks")
            rate = max(it.rate for it in sizes)
            pairs = rates.measure_pairs(device, _SHARES["pairs"] * share, rate, team.say)
            team.say("computing")
            seconds = rates.compute_seconds(device, _SHARES["compute"] * share)
    slow = rates.find_slow(pairs.times, machine_of)
    findings += [*rates.check_pairs(slow, len(pairs.times)), *rates.check_compute(seconds)]
    compute = [rates.compute_flops(each, device) for each in seconds]
    return rates.Measured(sizes, pairs, slow, compute), findings


def _services(backend: str) -> list[Finding]:
    """Check that ranks watch each other, and average in memory if they can."""
    why = open_watch(default_group())
    if why:
        remedy = "A rank that dies will not be named: see docs/faults.md"
        findings = [warn("faults", f"nobody looks out for them: {why}", remedy)]
    else:
        findings = [ok("faults", "the ranks look out for each other")]
    if backend == "gloo":
        memory, why = offer_memory(default_group(), 1 << 20)
        del memory
        findings += check_shared(why)
    return findings
