"""Exits that let threads finish before the interpreter does: Gloo's, and those of pipelines of
collectives.

A thread of Gloo that has ended a collective drops its work handle, and with it what Python lent it:
tensors that have a Python object, those of earlier collectives where the last one was a barrier.
For that it takes the GIL. Once Python finalises, it ends every other thread that asks for the GIL,
by unwinding its stack, through destructors that must not be unwound: the process aborts
("terminate called without an active exception") after all its work is done, torchrun reports a
failure, and the torchrun of another node waits five minutes for this one. It happens to about one
in ten short trainings on a busy machine, under any wrapper.

A pipeline that waits for a rank that has died hangs until the others end, which wakes it when torch
has freed what it needs: a segmentation fault. Such pipelines are left for good.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

from fastsync._build.extension import leave_pipelines

_TASKS = Path("/proc/self/task")
_GLOO_THREAD = "pt_gloo_runloo"  # the kernel keeps 15 characters of "pt_gloo_runloop"
_PAUSE = 0.001
_LONGEST = 2.0
_PIPELINES_LONGEST = 1.0


def guard_exit() -> None:
    """At exit, after functions registered later, leave pipelines, then `let_threads_finish`."""
    atexit.register(let_threads_finish)
    atexit.register(leave_pipelines, _PIPELINES_LONGEST)


def let_threads_finish() -> None:
    """Wait until no thread of Gloo runs or wants the GIL, or for two seconds.

    Waiting gives the GIL away, so a thread that wants it gets it. A thread that still sleeps has
    nothing to do, or is in a collective that does not end.
    """
    deadline, quiet = time.monotonic() + _LONGEST, 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        quiet = 0 if _runs() else quiet + 1


def _runs() -> bool:
    """Return whether one of Gloo's threads is running or ready to; never
    where there is no /proc.
    """
    for stat in _TASKS.glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(") ")
        except OSError:  # the thread has ended
            continue
        if name.startswith(_GLOO_THREAD) and rest.startswith("R"):
            return True
    return False
