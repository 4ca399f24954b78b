"""Let a rank of a small training fail, and judge what the others say.

The ranks that train are processes of their own: the one that runs this, which torchrun watches,
only starts one and looks on. So the fault is real, and the job that tells of it ends cleanly.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from fastsync._build.env import inherited
from fastsync.doctor.drill_rank import EXIT_CODE, Order
from fastsync.doctor.finding import Finding, fail, ok, warn
from fastsync.faults.wording import name_ranks

__all__ = [
    "DRILL_TIMEOUT",
    "FAULTS",
    "Drill",
    "Outcome",
    "collect",
    "judge",
    "problems",
    "run_drill",
]

DRILL_TIMEOUT = 6.0  # seconds of the process group
_STALL_WARN = "1"  # seconds
_PATIENCE = 6.0  # seconds beyond that timeout until a stopped rank is killed
_LIMIT = 90.0  # seconds until ranks that have not ended are
_REAPING = 0.3  # seconds; torchrun too looks after its ranks now and then only
_POLL = 0.05
_LATE = 5.0  # seconds after which a fault that can be known at once is known late
_RUN_AGAIN = "Nothing follows from this drill: run it again"
_REMEDY = "Look at docs/faults.md, and at what stands in the way of its connections: FASTSYNC_WATCH"


@dataclass(frozen=True)
class Fault:
    """A way to fail.

    Attributes:
        happens: in words.
        ends: what becomes of the process.
        named: what a survivor's error may say. Between machines no rank sees how
            a process ended.
    """

    happens: str
    ends: str
    named: tuple[str, ...]


FAULTS: Mapping[str, Fault] = {
    "kill": Fault(
        "was killed by SIGKILL", "SIGKILL", ("was killed by SIGKILL", "ended without a word")
    ),
    "stop": Fault(
        "was stopped by SIGSTOP", "SIGSTOP", ("is stopped", "is late", "does not answer")
    ),
    "raise": Fault("raised an exception", "exit code 1", ("raised DrillError",)),
    "exit": Fault(
        f"called os._exit({EXIT_CODE})",
        f"exit code {EXIT_CODE}",
        (f"exited with code {EXIT_CODE}", "ended without a word"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How a rank's training ended.

    Attributes:
        error: the class of what it raised; empty if it raised nothing.
        ranks, reason, text: of a SyncFault; the text of others too.
        seconds: from the fault to the error.
        warned: whether it warned of a stall before.
        ended: what became of the process: "exit code 0", "SIGKILL", "hung".
    """

    error: str = ""
    ranks: tuple[int, ...] = ()
    reason: str = ""
    text: str = ""
    seconds: float = 0.0
    warned: bool = False
    ended: str = "nothing is known"


@dataclass(frozen=True)
class Drill:
    """A fault that one rank had, and how each rank ended.

    Attributes:
        timeout: seconds that the process group waits for a rank that is stopped.
        outcomes: by rank.
    """

    fault: str
    rank: int
    timeout: float
    outcomes: Sequence[Outcome]


# ---- ranks that train -------------------------------------------------------------------------


class _Child:
    """A rank that trains, as the process that started it sees it."""

    def __init__(self, order: Order) -> None:
        self.order, self.ended = order, ""
        self._said, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastsync.doctor.drill_rank", json.dumps(asdict(order))],
            env=inherited({"FASTSYNC_STALL_WARN": _STALL_WARN}),
            stdout=self._said,
            stderr=self._errors,
        )

    def line(self, what: str) -> Mapping[str, object]:
        """Return what it has said; empty if nothing of the kind."""
        found: Mapping[str, object] = {}
        for text in os.pread(self._said.fileno(), 1 << 20, 0).splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a library prints
                line = json.loads(text)
                found = line if line["what"] == what else found
        return found

    def is_over(self) -> bool:
        """Return whether it has ended; it is not reaped, so that others can see how."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return bool(self.ended) or os.waitid(os.P_PID, self._process.pid, options) is not None

    def is_stopped(self) -> bool:
        """Return whether its fault is to stop, and long enough ago."""
        at = self.line("fault").get("at") if self.order.fault == "stop" else None
        if not isinstance(at, int):
            return False
        return (time.monotonic_ns() - at) / 1e9 > DRILL_TIMEOUT + _PATIENCE

    def end(self) -> None:
        """Reap it, and kill it before if it has not ended."""
        over = self.is_over()
        if not over:
            self._process.kill()
        code = self._process.wait()
        if not over:
            stopped = self.order.fault == "stop" and self.line("fault")
            self.ended = "SIGSTOP" if stopped else "hung"
        else:
            self.ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def told(self) -> dict[str, object]:
        """Return how it ended, and the time of its fault or error, by this machine's steady
        clock."""
        error = self.line("error")
        printed = os.pread(self._errors.fileno(), 1 << 24, 0).decode(errors="replace")
        text = error["text"] if error else printed.strip().rpartition("\n")[2]
        outcome = {
            "error": error.get("error", ""),
            "ranks": error.get("ranks", []),
            "reason": error.get("reason", ""),
            "text": " ".join(str(text).split()),
            "warned": "has waited" in printed,
            "ended": self.ended,
        }
        return {"outcome": outcome, "fault": self.line("fault").get("at"), "at": error.get("at")}


@contextlib.contextmanager
def _started(orders: Sequence[Order]) -> Iterator[list[_Child]]:
    children: list[_Child] = []
    try:
        for order in orders:
            children.append(_Child(order))
        yield children
    finally:
        for child in children:
            child.end()


def run_drill(orders: Sequence[Order]) -> str:
    """Start ranks, and tell for `collect` how each has ended or been given up."""
    deadline = time.monotonic() + _LIMIT
    with _started(orders) as children:
        while time.monotonic() < deadline:
            if all(child.is_over() or child.is_stopped() for child in children):
                time.sleep(_REAPING)
                break
            time.sleep(_POLL)
    return json.dumps({child.order.rank: child.told() for child in children})


def collect(fault: str, rank: int, texts: Sequence[str | None], offsets: Sequence[int]) -> Drill:
    """Return the whole drill.

    Args:
        texts: what each process that started ranks has told; None: it said nothing.
        offsets: for each of them, nanoseconds from its steady clock to that of the first.
    """
    outcomes: dict[int, Outcome] = {}
    errors: dict[int, int] = {}
    begun = 0
    for text, offset in zip(texts, offsets, strict=True):
        for number, entry in json.loads(text or "{}").items():
            said = entry["outcome"]
            outcomes[int(number)] = Outcome(**{**said, "ranks": tuple(said["ranks"])})
            if entry["at"] is not None:
                errors[int(number)] = entry["at"] + offset
            if int(number) == rank and entry["fault"] is not None:
                begun = entry["fault"] + offset
    every = [outcomes.get(number, Outcome()) for number in range(max(outcomes, default=-1) + 1)]
    if begun:
        for number, at in errors.items():
            every[number] = replace(every[number], seconds=(at - begun) / 1e9)
    return Drill(fault, rank, DRILL_TIMEOUT, every)


# ---- what they should say ---------------------------------------------------------------------


def problems(drill: Drill) -> list[str]:
    """By rank, what is wrong with how it ended; empty where it ended as it should."""
    return [_wrong(drill, rank, outcome) for rank, outcome in enumerate(drill.outcomes)]


def _wrong(drill: Drill, rank: int, outcome: Outcome) -> str:
    ended = f"{outcome.ended}. {outcome.text}".strip()
    fault = FAULTS[drill.fault]
    if rank == drill.rank:
        if outcome.ended == fault.ends:
            return ""
        return f"should have had its fault, but ended otherwise: {ended}"
    if outcome.ended == "hung":
        return "did not end by itself, and was killed"
    if not outcome.error:
        return f"did not notice the fault: {ended}"
    if outcome.error != "SyncFault":
        return f"raised {outcome.error}, which does not name the rank: {outcome.text}"
    if list(outcome.ranks) != [drill.rank]:
        return f"blames ranks {list(outcome.ranks)}: {outcome.text}"
    if not any(word in outcome.text for word in fault.named):
        return f"does not say what happened: {outcome.text}"
    return ""


def judge(drill: Drill) -> list[Finding]:
    """Return one finding for all ranks that passed, and one for each that did not."""
    wrong = problems(drill)
    found = [
        fail("drill", f"rank {rank} {text}", _RUN_AGAIN if rank == drill.rank else _REMEDY)
        for rank, text in enumerate(wrong)
        if text
    ]
    passed = [r for r, text in enumerate(wrong) if not text and r != drill.rank]
    if not passed:
        return found
    longest = max(drill.outcomes[rank].seconds for rank in passed)
    text = f"{name_ranks(passed)} said within {longest:.2f} s that rank {drill.rank}"
    text += f" {'raised ' * (drill.fault == 'raise')}{drill.outcomes[passed[0]].reason}"
    if drill.fault == "stop":
        text += f"; the timeout was {drill.timeout:g} s"
    elif longest > _LATE:
        return [warn("drill", text, "Less than a second is usual: look at the network"), *found]
    return [ok("drill", text), *found]
