"""Runs functions on several real ranks, and counts what torch dispatches.

first, second = fastsync.testing.run_ranks(function, 2)
"""

from fastsync.testing.ranks import RankError, count_dispatched_ops, run_ranks

__all__ = ["RankError", "count_dispatched_ops", "run_ranks"]
