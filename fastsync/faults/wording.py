"""How texts name ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    parts = ", ".join(_span(run) for run in _runs(ordered))
    return f"rank {parts}" if len(ordered) == 1 else f"ranks {parts}"


def _runs(ordered: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _span(run: Sequence[int]) -> str:
    if len(run) > 2:
        return f"{run[0]}-{run[-1]}"
    return ", ".join(map(str, run))
