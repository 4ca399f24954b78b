"""Positions in a user's code at which it called torch or fastsync."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["caller", "caller_level"]

_INSIDE = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")


def _is_inside(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_INSIDE, "<frozen "))


def _first_outside() -> tuple[FrameType, int]:
    frame, level = sys._getframe(2), 1
    while _is_inside(frame) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return frame, level


def caller() -> str:
    """File and line of the innermost frame outside torch and fastsync."""
    frame, _ = _first_outside()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def caller_level() -> int:
    """The `stacklevel` with which a warning of the calling function names that frame."""
    return _first_outside()[1]
