"""Let a rank of a small training fail, and judge what the others say.

The ranks that train are processes of their own: the one that runs this, which torchrun watches,
only starts one and looks on. So the fault is real, and the job that tells of it ends cleanly.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from signal import Signals
from typing import Any

from fastsync._build.env import inherited
from fastsync.doctor.drill_rank import DRILL_TIMEOUT, EXIT_CODE
from fastsync.doctor.finding import Finding, fail, ok, warn
from fastsync.faults.wording import name_ranks

_PATIENCE = 6.0  # seconds beyond the timeout until a stopped rank is killed
_LIMIT = 90.0  # seconds until a rank that has not ended is
_REAPING = 0.3  # seconds; torchrun too looks after its ranks now and then only
_POLL = 0.05
_LATE = 5.0  # seconds after which a fault that can be known at once is known late
_RUN_AGAIN = "Nothing follows from this drill: run it again"
_REMEDY = "Look at docs/faults.md, and at what stands in the way of its connections: FASTSYNC_WATCH"
# A rank finds the launcher's store, which another process of rank 0 may serve.
_AS_CLIENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


@dataclass(frozen=True)
class Fault:
    """A way to fail.

    Attributes:
        ends: what becomes of the process.
        named: what a survivor's error may say. Between machines no rank sees how
            a process ended.
    """

    ends: str
    named: tuple[str, ...]


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", ("was killed by SIGKILL", "ended without a word")),
    "stop": Fault("SIGSTOP", ("is stopped", "is late", "does not answer")),
    "raise": Fault("exit code 1", ("raised DrillError",)),
    "exit": Fault(
        f"exit code {EXIT_CODE}", (f"exited with code {EXIT_CODE}", "ended without a word")
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How a rank's training ended.

    Attributes:
        error: the class of what it raised; empty if it raised nothing.
        ranks, reason, text: of a SyncFault; the text of others too.
        seconds: from the fault to the error.
        ended: what became of the process: "exit code 0", "SIGKILL", "hung".
    """

    error: str = ""
    ranks: Sequence[int] = ()
    reason: str = ""
    text: str = ""
    seconds: float = 0.0
    ended: str = "nothing is known"


def run_drill(fault: str, backend: str) -> str:
    """Train as this rank in a process of its own; return its `Outcome` as JSON.

    Args:
        fault: that it has; empty: none.
    """
    command = [sys.executable, "-m", "fastsync.doctor.drill_rank", fault, backend]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=inherited(_AS_CLIENT), stdout=output, stderr=errors)
        try:
            ended = _watch(process.pid)
        finally:
            process.kill()
            code = process.wait()
        ended = ended or (Signals(-code).name if code < 0 else f"exit code {code}")
        printed = os.pread(errors.fileno(), 1 << 24, 0).decode(errors="replace")
        facts: dict[str, Any] = {"text": printed.strip().rpartition("\n")[2]}
        for line in os.pread(output.fileno(), 1 << 20, 0).splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a library prints
                facts |= json.loads(line)
    facts["text"] = " ".join(facts["text"].split())
    return json.dumps(asdict(Outcome(**facts, ended=ended)))


def _watch(pid: int) -> str:
    """Wait for the end of a rank, which is not reaped, so that others can see how it ended.

    Returns:
        What it is given up for: "SIGSTOP" or "hung"; empty: it has ended.
    """
    begun, stopped = time.monotonic(), None
    while (now := time.monotonic()) - begun < _LIMIT:
        options = os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        state = os.waitid(os.P_PID, pid, options)
        if state is not None and state.si_code != os.CLD_STOPPED:
            time.sleep(_REAPING)
            return ""
        if state is not None:
            stopped = stopped or now
            if now - stopped > DRILL_TIMEOUT + _PATIENCE:
                return "SIGSTOP"
        time.sleep(_POLL)
    return "hung"


def _wrong(fault: str, victim: int, rank: int, outcome: Outcome) -> str:
    """Return what is wrong with how a rank ended; empty where it ended as it should."""
    ended = f"{outcome.ended}. {outcome.text}".strip()
    if rank == victim:
        if outcome.ended == FAULTS[fault].ends:
            return ""
        return f"should have had its fault, but ended otherwise: {ended}"
    if outcome.ended == "hung":
        return "did not end by itself, and was killed"
    if not outcome.error:
        return f"did not notice the fault: {ended}"
    if outcome.error != "SyncFault":
        return f"raised {outcome.error}, which does not name the rank: {outcome.text}"
    if list(outcome.ranks) != [victim]:
        return f"blames ranks {list(outcome.ranks)}: {outcome.text}"
    if not any(word in outcome.text for word in FAULTS[fault].named):
        return f"does not say what happened: {outcome.text}"
    return ""


def judge(fault: str, victim: int, outcomes: Sequence[Outcome]) -> list[Finding]:
    """Return one finding for all ranks that passed, and one for each that did not."""
    wrong = [_wrong(fault, victim, rank, outcome) for rank, outcome in enumerate(outcomes)]
    found = [
        fail("drill", f"rank {rank} {text}", _RUN_AGAIN if rank == victim else _REMEDY)
        for rank, text in enumerate(wrong)
        if text
    ]
    passed = [r for r, text in enumerate(wrong) if not text and r != victim]
    if not passed:
        return found
    longest = max(outcomes[rank].seconds for rank in passed)
    text = f"{name_ranks(passed)} said within {longest:.2f} s that rank {victim}"
    text += f" {'raised ' * (fault == 'raise')}{outcomes[passed[0]].reason}"
    if fault == "stop":
        text += f"; the timeout was {DRILL_TIMEOUT:g} s"
    elif longest > _LATE:
        return [warn("drill", text, "Less than a second is usual: look at the network"), *found]
    return [ok("drill", text), *found]
