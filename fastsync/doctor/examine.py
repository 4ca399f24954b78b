"""The examination: facts through the store, checks, then measurements or a drill.

Ranks other than 0 do as rank 0 says, and get no report.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Container, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fastsync._torch import PrefixStore, Store, default_group
from fastsync.doctor import rates
from fastsync.doctor.checks import check_facts, check_shared, machines_of
from fastsync.doctor.drill import Outcome, judge, run_drill
from fastsync.doctor.facts import Facts, facts_of_this_rank
from fastsync.doctor.finding import Finding, Level, fail, ok, warn
from fastsync.doctor.report import Report
from fastsync.faults.clocks import Mailbox
from fastsync.faults.wording import name_ranks
from fastsync.reducer.monitor import explained, open_watch
from fastsync.reducer.shared_memory import offer_memory

_BUILD = 600.0  # seconds for facts, which may have to compile the extension
_DRILL = 240.0  # seconds for a drill's outcome
_SHARES = {"all-reduces": 0.3, "pairs": 0.6, "compute": 0.1}  # of the time for measuring


class Team:
    """The ranks and their rendezvous store: what they tell rank 0, and what it tells them.

    Rank 0 alone reads what all have written, so that the cost grows with the number of ranks and
    not with its square. Each exchange has a deadline: ranks that are gone cost the others that
    much.

    Attributes:
        rank, world: this one's number, and how many there are.
        store: shared by all ranks.
        timeout: seconds that an exchange waits for a rank.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.timeout = timeout

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
        return Mailbox(self.store, f"doctor/{topic}", timeout or self.timeout)

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
        mail = self.mail(topic, 2 * (timeout or self.timeout) + 5)
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
            print(f"fastsync doctor: {text}", file=sys.stderr, flush=True)


def examine(team: Team, backend: str, seconds: float, drill: str = "") -> Report | None:
    """Examine all ranks; rank 0 gets the report. Every rank calls it.

    Args:
        seconds: for measuring.
        drill: a fault that the last rank has, instead of measuring; empty: none.

    Raises:
        RuntimeError: ranks have gone meanwhile.
        ValueError: what was asked for makes no sense; on every rank.
    """
    if drill and team.world < 2:
        raise ValueError(
            "a drill needs two ranks or more, of which one notices the fault: start it with "
            "torchrun --nproc-per-node 3"
        )
    local_rank, first = dist.get_node_local_rank(fallback_rank=0), team.rank == 0
    team.say("facts of all ranks")
    came = team.gather("roll call", "here")
    absent = {rank for rank, answer in enumerate(came) if answer is None}
    mine = facts_of_this_rank(team.store if team.world > 1 else None, local_rank)
    reports = team.gather("facts", mine.dump(), _BUILD, absent)
    ranks = {rank: Facts.parse(text) for rank, text in enumerate(reports) if text is not None}
    findings = check_facts(ranks, team.world, backend) if first else []
    measured, failed = None, any(finding.level is Level.FAIL for finding in findings)
    if team.tell("go on", "no" if failed else "yes", _BUILD) == "yes":
        if drill:
            victim = team.world - 1
            team.say(f"drill: {drill} rank {victim}, half a minute at most")
            mine_has = drill if team.rank == victim else ""
            ends = team.gather("drill", run_drill(mine_has, backend), _DRILL)
            outcomes = [Outcome(**json.loads(text)) if text else Outcome() for text in ends]
            findings += judge(drill, victim, outcomes) if first else []
        elif team.world > 1:
            machines = machines_of(ranks)
            try:
                measured, more = _measure(team, backend, seconds, machines, local_rank)
                findings += more
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
    return Report(team.world, backend, ranks, findings, measured) if first else None


def _open_group(team: Team, backend: str, device: torch.device) -> list[Finding]:
    """Open the process group, or say on all ranks alike why there is none."""
    error = ""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=PrefixStore("doctor/group", team.store),
            rank=team.rank,
            world_size=team.world,
            timeout=timedelta(seconds=team.timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    # Rank 0 may only come here when another rank has been here for the timeout.
    reports = team.gather("group", error, 2 * team.timeout)
    failed = {rank: text for rank, text in enumerate(reports) if text != ""}
    if team.tell("group", "failed" if failed else "", 2 * team.timeout) == "":
        return []
    remedy = "Look at firewalls between the machines, and at GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    return [
        fail("process group", f"{name_ranks([r])}: {text or 'no answer'}", remedy)
        for r, text in failed.items()
    ] or [fail("process group", "it could not be made", remedy)]


def _measure(
    team: Team, backend: str, seconds: float, machines: Sequence[Sequence[int]], local_rank: int
) -> tuple[rates.Measured | None, list[Finding]]:
    """Measure all ranks.

    Args:
        machines: the ranks of each; on rank 0.
    """
    on_gpu = backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if failed := _open_group(team, backend, device):
        return None, failed
    findings = _services(backend)
    with explained(default_group(), "the doctor's measurements"):
        team.say(f"measuring, about {seconds:g} s: all-reduces")
        whole = rates.measure_all_reduce(device, _SHARES["all-reduces"] * seconds)
        team.say("pairs of ranks")
        pairs = rates.measure_pairs(device, _SHARES["pairs"] * seconds, whole.rate, team.say)
        team.say("computing")
        products = rates.compute_seconds(device, _SHARES["compute"] * seconds)
    slow = rates.find_slow(pairs.times, machines)
    findings += [*rates.check_pairs(slow, len(pairs.times)), *rates.check_compute(products)]
    return rates.Measured(whole, pairs, slow), findings


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
