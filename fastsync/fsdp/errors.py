"""Errors of fully_shard()."""

from __future__ import annotations

__all__ = ["RefusedError"]


class RefusedError(ValueError, AssertionError):
    """Bad input that FSDP2 refuses with an AssertionError: scripts may catch it as that."""
