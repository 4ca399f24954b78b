"""What the ranks of a drill have said, and whether that is what they should say: pure rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastsync.doctor.finding import Finding, fail, ok, warn
from fastsync.ranks.words import name_ranks

__all__ = ["EXIT_CODE", "FAULTS", "WHAT_HAPPENS", "Drill", "Outcome", "judge", "problems"]

EXIT_CODE = 3
# What a survivor's error may say, by fault; where the faulty rank was on another machine, nobody
# sees how its process ended.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "kill": ("was killed by SIGKILL", "ended without a word"),
    "stop": ("is stopped", "is late", "does not answer"),
    "raise": ("raised DrillError",),
    "exit": (f"exited with code {EXIT_CODE}", "ended without a word"),
}
FAULTS = tuple(_WORDS)
WHAT_HAPPENS: Mapping[str, str] = {
    "kill": "was killed by SIGKILL",
    "stop": "was stopped by SIGSTOP",
    "raise": "raised an exception",
    "exit": f"called os._exit({EXIT_CODE})",
}
_LATE = 5.0  # seconds after which a fault that can be known at once is known late
# What becomes of the faulty rank's process.
_ENDS: Mapping[str, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "raise": "exit code 1",
    "exit": f"exit code {EXIT_CODE}",
}
_RUN_AGAIN = "Nothing follows from this drill: run it again"
_REMEDY = "Look at docs/faults.md, and at what stands in the way of its connections: FASTSYNC_WATCH"


@dataclass(frozen=True)
class Outcome:
    """How a rank's training ended.

    Attributes:
        error: the class of what it raised; empty where it raised nothing.
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
    ended: str = ""


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


def problems(drill: Drill) -> list[str]:
    """By rank, what is wrong with how it ended; empty where it ended as it should."""
    return [
        _wrong_fault(drill, outcome) if rank == drill.rank else _wrong_error(drill, outcome)
        for rank, outcome in enumerate(drill.outcomes)
    ]


def _wrong_fault(drill: Drill, outcome: Outcome) -> str:
    if outcome.ended == _ENDS[drill.fault]:
        return ""
    return (
        f"should have had its fault, but ended otherwise: {outcome.ended}. {outcome.text}".strip()
    )


def _wrong_error(drill: Drill, outcome: Outcome) -> str:
    if outcome.ended == "hung":
        return "did not end by itself, and was killed"
    if not outcome.error:
        return f"did not notice the fault: {outcome.ended}. {outcome.text}".strip()
    if outcome.error != "SyncFault":
        return f"raised {outcome.error}, which does not name the rank: {outcome.text}"
    if list(outcome.ranks) != [drill.rank]:
        return f"blames ranks {list(outcome.ranks)}: {outcome.text}"
    if not any(word in outcome.text for word in _WORDS[drill.fault]):
        return f"does not say what happened: {outcome.text}"
    return ""


def judge(drill: Drill) -> list[Finding]:
    """One finding for all ranks that passed, and one for each that did not."""
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
