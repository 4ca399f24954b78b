"""Has a rank of a small training fail, and takes down what the others say.

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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO

from fastsync.build.env import inherited
from fastsync.doctor.drill_rank import Order
from fastsync.doctor.drilled import Drill, Outcome

__all__ = ["DRILL_TIMEOUT", "Child", "hear", "run_children", "tell", "to_outcome"]

DRILL_TIMEOUT = 6.0  # seconds of the process group
_STALL_WARN = "1"  # seconds
_PATIENCE = 6.0  # seconds beyond that timeout until a stopped rank is killed
_LIMIT = 90.0  # seconds until ranks that have not ended are
_REAPING = 0.3  # seconds; torchrun too looks after its ranks now and then only
_POLL = 0.05
Line = Mapping[str, object]


class Child:
    """A rank that trains, as the process that started it sees it.

    Attributes:
        order: what it was told.
        ended: as `Outcome.ended`, once it has.
    """

    def __init__(self, order: Order) -> None:
        self.order, self.ended = order, ""
        self._lines: dict[str, Line] = {}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 it outlives this call
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastsync.doctor.drill_rank", order.dump()],
            env=inherited({"FASTSYNC_STALL_WARN": _STALL_WARN}),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with contextlib.suppress(ValueError):  # a library prints
                line = json.loads(text)
                self._lines[line["what"]] = line

    def line(self, what: str) -> Line:
        """What it has said; empty if nothing of the kind."""
        return self._lines.get(what, {})

    def errors(self) -> str:
        """What it has printed for people."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def is_over(self) -> bool:
        """Whether it has ended; it is not reaped, so that others can see how."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return bool(self.ended) or os.waitid(os.P_PID, self._process.pid, options) is not None

    def is_stopped(self) -> bool:
        """Whether its fault is to stop, and long enough ago."""
        at = self.line("fault").get("at")
        if self.order.fault != "stop" or not isinstance(at, int):
            return False
        return (time.monotonic_ns() - at) / 1e9 > DRILL_TIMEOUT + _PATIENCE

    def end(self) -> None:
        """Reaps it, and kills it before where it has not ended."""
        over = self.is_over()
        if not over:
            self._process.kill()
        code = self._process.wait()
        self._reader.join()
        if not self.ended:
            stopped = self.order.fault == "stop" and bool(self.line("fault"))
            self.ended = _in_words(code) if over else "SIGSTOP" if stopped else "hung"


def _in_words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def _started(orders: Sequence[Order]) -> Iterator[list[Child]]:
    children: list[Child] = []
    try:
        for order in orders:
            children.append(Child(order))
        yield children
    finally:
        for child in children:
            child.end()


def run_children(orders: Sequence[Order]) -> list[Child]:
    """Starts ranks, and returns when each has ended or been given up."""
    deadline = time.monotonic() + _LIMIT
    with _started(orders) as children:
        while time.monotonic() < deadline:
            if all(child.is_over() or child.is_stopped() for child in children):
                time.sleep(_REAPING)
                break
            time.sleep(_POLL)
    return children


def to_outcome(child: Child) -> Outcome:
    """What it said, without seconds."""
    error = child.line("error")
    printed = child.errors()
    found = Outcome(warned="has waited" in printed, ended=child.ended)
    if not error:
        return replace(found, text=printed.strip().rpartition("\n")[2])
    return replace(
        found,
        error=str(error["error"]),
        text=" ".join(str(error["text"]).split()),
        ranks=tuple(_whole(error.get("ranks"))),
        reason=str(error.get("reason", "")),
    )


def _whole(entries: object) -> list[int]:
    return [int(entry) for entry in entries] if isinstance(entries, list) else []


def tell(children: Sequence[Child]) -> str:
    """What a machine's ranks have said, for `hear`."""
    return json.dumps(
        {
            child.order.rank: {
                "outcome": asdict(to_outcome(child)),
                "fault": child.line("fault").get("at"),
                "error": child.line("error").get("at"),
            }
            for child in children
        }
    )


def hear(fault: str, rank: int, texts: Sequence[str | None], offsets: Sequence[int]) -> Drill:
    """The whole drill.

    Args:
        texts: what each process that started ranks has told; None where it said nothing.
        offsets: for each of them, nanoseconds from its steady clock to that of the first.
    """
    told: dict[int, tuple[Outcome, dict[str, int]]] = {}
    for text, offset in zip(texts, offsets, strict=True):
        for number, entry in json.loads(text or "{}").items():
            said = {**entry["outcome"], "ranks": tuple(entry["outcome"]["ranks"])}
            times = {k: entry[k] + offset for k in ("fault", "error") if entry[k] is not None}
            told[int(number)] = (Outcome(**said), times)
    begun = told.get(rank, (Outcome(), {}))[1].get("fault", 0)
    return Drill(fault, rank, DRILL_TIMEOUT, _timed(told, begun))


def _timed(told: Mapping[int, tuple[Outcome, Mapping[str, int]]], begun: int) -> list[Outcome]:
    """By rank; seconds from the fault on."""
    outcomes = []
    for rank in range(max(told, default=-1) + 1):
        outcome, times = told.get(rank, (Outcome(ended="nothing is known"), {}))
        seconds = (times["error"] - begun) / 1e9 if begun and "error" in times else 0.0
        outcomes.append(replace(outcome, seconds=seconds))
    return outcomes
