"""Settings that all ranks must agree on before training: a difference is named on every rank.

Each rank contributes a description of its model and settings, or the error that keeps it from
building one. Only digests travel unless they differ, so agreement costs one tiny collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fastsync._torch import gather_objects

# Name, shape, dtype, requires_grad.
Param = tuple[str, tuple[int, ...], str, bool]


class RankMismatchError(RuntimeError):
    """The ranks were given different models or settings; the text names rank, thing and remedy."""


@dataclass(frozen=True)
class Statement:
    """One rank's statement of its model and settings.

    Attributes:
        settings: name and value of each setting that must be equal.
        params: what identifies each parameter, in order.
        error: why this rank cannot go on; empty if it can.
    """

    settings: Mapping[str, str]
    params: Sequence[Param]
    error: str = ""

    def digest(self) -> bytes:
        """32 bytes that are equal exactly where statements are."""
        text = json.dumps([dict(self.settings), list(self.params), self.error])
        return hashlib.sha256(text.encode()).digest()


# Runs a collective, which the function that it is given starts.
Run = Callable[[Callable[[], dist.Work]], None]


def _run_alone(start: Callable[[], dist.Work]) -> None:
    start().wait()


def agree(
    statement: Statement,
    group: dist.ProcessGroup,
    device: torch.device,
    failure: str = "FastDDP cannot be built on every rank;",
    run: Run = _run_alone,
) -> None:
    """Wait until every rank is known to have made the same, error-free statement.

    Collective: every rank of `group` must call it, with its own error if it has one.

    Args:
        failure: how the report of errors begins.
        run: waits for the other ranks.

    Raises:
        RankMismatchError: on every rank, where statements differ or another rank has an error.
    """
    if group.size() == 1:
        return
    mine = torch.tensor(list(statement.digest()), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(mine) for _ in range(group.size())]
    run(partial(dist.all_gather, digests, mine, group=group, async_op=True))
    all_equal = bool((torch.stack(digests).cpu() == mine.cpu()).all())
    if all_equal and not statement.error:
        return
    raise RankMismatchError(_report(gather_objects(statement, group), failure))


@contextmanager
def together(
    group: dist.ProcessGroup, device: torch.device, failure: str, run: Run
) -> Iterator[dict[str, str]]:
    """Make what is done within fail on every rank if it fails on one. Collective.

    Args:
        failure: how the report of errors begins.
        run: runs a collective, and waits for the other ranks in it.

    Yields:
        A dictionary for settings, which must be equal on all ranks at the end.

    Raises:
        ValueError, TypeError: where they were raised within.
        RankMismatchError: on the other ranks; on all where settings differ.
    """
    settings: dict[str, str] = {}
    try:
        yield settings
    except (ValueError, TypeError) as error:
        try:
            agree(Statement({}, (), str(error)), group, device, failure, run)
        except RankMismatchError as report:
            raise error from report
        raise
    agree(Statement(settings, ()), group, device, failure, run)


def _report(statements: Sequence[Statement], failure: str) -> str:
    failed = [f"rank {r}: {s.error}" for r, s in enumerate(statements) if s.error]
    if failed:
        return f"{failure} " + "; ".join(failed)
    for rank, other in enumerate(statements[1:], start=1):
        difference = find_difference(statements[0], other)
        if difference:
            return f"rank {rank} differs from rank 0: {difference}"
    return "the ranks differ in a way that their statements do not show"


def find_difference(first: Statement, other: Statement) -> str:
    """The first difference, in words that end with the remedy; empty where there is none."""
    for name in {**first.settings, **other.settings}:
        ours, theirs = first.settings.get(name), other.settings.get(name)
        if ours != theirs:
            return f"{name} is {theirs} there but {ours} on rank 0. Pass the same value everywhere"
    pairs = zip(first.params, other.params, strict=False)
    for index, (ours_param, theirs_param) in enumerate(pairs):
        if ours_param != theirs_param:
            return _describe_pair(index, ours_param, theirs_param)
    if len(first.params) != len(other.params):
        return _describe_count(first, other)
    return ""


_REMEDY = "Build the same model on every rank, parameters in the same order, before wrapping it"


def _describe_pair(index: int, ours: Param, theirs: Param) -> str:
    labels = ("name", "shape", "dtype", "requires_grad")
    rows = zip(labels, ours, theirs, strict=True)
    label, here, there = next(row for row in rows if row[1] != row[2])
    return (
        f"parameter {index} ({ours[0]!r}) has {label} {there!r} there but {here!r} on rank 0. "
        f"{_REMEDY}"
    )


def _describe_count(first: Statement, other: Statement) -> str:
    few, many = sorted((first, other), key=lambda s: len(s.params))
    extra = many.params[len(few.params)][0]
    where = "on rank 0" if many is first else "there"
    return (
        f"it has {len(other.params)} parameters but rank 0 has {len(first.params)}; "
        f"{extra!r} exists only {where}. {_REMEDY}"
    )
