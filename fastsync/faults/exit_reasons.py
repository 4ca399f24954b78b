"""Messages to the other ranks that say why this one ends, before it does.

An uncaught exception reaches `sys.excepthook`, the end of a script the functions of `atexit`. Both
call the objects that were given to `before_leaving`.
"""

from __future__ import annotations

import atexit
import os
import signal
import site
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from fastsync.faults.sync_fault import SyncFault

# Where the frame of an exception is not the script's: its line says what broke, not why.
_WITHOUT_FILE = ("<frozen ", "<__array_function__")  # modules of Python's, code of older numpy's
_TORCH, _FASTSYNC = Path(torch.__file__).parent, Path(__file__).parents[1]
_NEAREST = (*_WITHOUT_FILE, f"{_TORCH}{os.sep}", f"{_FASTSYNC}{os.sep}")
_PLACES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_PLACES |= {str(Path(os.__file__).parent), *site.getsitepackages(), site.getusersitepackages()}
_LIBRARIES = (*_NEAREST, *(f"{place}{os.sep}" for place in sorted(_PLACES)))
_UNTIL_ALL = 0.3  # seconds in which Ctrl-C reaches all ranks: each ends by it, not by another's end
_PEER_EXIT_SECONDS = 3.0  # seconds that the end of a process takes at most, on a busy machine
_LONGEST = 500  # characters of an exception's text


class ExitingRank(Protocol):
    """Object that tells the other ranks."""

    def leave(self, how: str, why: str) -> None:
        """Tell them `how` this rank ends and `why`. `how` is "ends", "raises" or "gives up", the
        last because of other ranks.
        """

    def wait_for_peer_exit(self, seconds: float) -> None:
        """Wait until the ranks that caused this one to give up have ended, but for at most
        `seconds`.

        Launchers take the process that is first to fail for the cause.
        """

    def close(self) -> None:
        """Wait until everything that has been told is on its way; nothing more will be."""

    def abandon(self) -> None:
        """Forget the ranks: this process was forked from the one that the object belongs to."""


def before_leaving(rank: ExitingRank) -> None:
    """Let `rank` tell how this process ends, as long as it lives."""
    _exiting_ranks().add(rank)


@cache
def _exiting_ranks() -> weakref.WeakSet[ExitingRank]:
    """Return the ranks of this process. The first call installs hooks wherever it can end."""
    exiting: weakref.WeakSet[ExitingRank] = weakref.WeakSet()
    atexit.register(_at_end, exiting)
    os.register_at_fork(after_in_child=lambda: _in_child(exiting))
    others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt) and len(exiting) > 0
        if interrupted:
            print(f"fastsync: {in_words(error)}", file=sys.stderr, flush=True)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends this process at once
            time.sleep(_UNTIL_ALL)
        for rank in list(exiting):
            how = "gives up" if isinstance(error, SyncFault) else "raises"
            rank.leave(how, in_words(error))
        if not interrupted:
            others(kind, error, trace)
        if isinstance(error, SyncFault):
            for rank in list(exiting):
                rank.wait_for_peer_exit(_PEER_EXIT_SECONDS)

    sys.excepthook = hook
    return exiting


def _at_end(exiting: weakref.WeakSet[ExitingRank]) -> None:
    for rank in list(exiting):
        rank.leave("ends", "")
    for rank in list(exiting):  # which may wait for others
        rank.close()


def _in_child(exiting: weakref.WeakSet[ExitingRank]) -> None:
    for rank in list(exiting):
        rank.abandon()


def in_words(error: BaseException) -> str:
    """An exception and where the script met it: "ValueError: bad batch (train.py:88 in step)"."""
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    at = _frame_of_script(traceback.extract_tb(error.__traceback__))
    return text if at is None else f"{text} ({Path(at.filename).name}:{at.lineno} in {at.name})"


def _frame_of_script(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the last frame outside of libraries. A script that is itself installed has none."""
    for libraries in (_LIBRARIES, _NEAREST, ()):
        own = [frame for frame in frames if not frame.filename.startswith(libraries)]
        if own:
            return own[-1]
    return None
