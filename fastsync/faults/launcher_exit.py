"""End of ranks together with the launcher that started them, however it ends."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # of Linux's prctl()


def end_with_parent() -> None:
    """Let the system send this process a SIGTERM once its parent has ended.

    Only Linux does. Where a shell stands between the launcher and this process, that is the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
