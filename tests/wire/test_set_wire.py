"""Wires that change between two steps, on all ranks or none."""

import pytest
import torch

from fastsync import RankMismatchError, Wire
from tests.helpers.teams import run_ranks
from tests.wire.test_error_feedback import mass, residual_of, train, wrap


def switched(rank, world):
    wrapped, optimizer = wrap("int4")
    train(wrapped, optimizer, range(3), rank)
    owed = mass(wrapped)
    wrapped.set_wire(Wire("int8", error_feedback=True))
    moved = torch.equal(mass(wrapped), owed)
    held = wrapped.sync_stats()["residual_bytes"]
    wrapped.set_wire("int8")
    train(wrapped, optimizer, range(3, 5), rank)
    freed = wrapped.sync_stats()["residual_bytes"], residual_of(wrapped)
    gone = all(r is None for r in wrapped._engine.core.residuals())
    wrapped.set_wire("fp32")
    train(wrapped, optimizer, range(5, 7), rank)
    formats = {bucket.coded for bucket in wrapped._engine.plan.buckets}
    wrapped.set_wire("int4")
    train(wrapped, optimizer, range(7, 9), rank)
    again = wrapped.sync_stats()["residual_bytes"] > 0
    return moved, bool(owed.any()), held > 0, freed == (0, {}), gone, formats == {None}, again


def test_a_wire_without_feedback_frees_residuals_and_one_with_it_keeps_them():
    assert run_ranks(switched, 2) == [(True,) * 7] * 2


def switch_differently(rank, world, wires):
    wrapped, optimizer = wrap("int4")
    train(wrapped, optimizer, range(2), rank)
    try:
        wrapped.set_wire(wires[rank])
    except (ValueError, RankMismatchError) as error:
        text = f"{error} {error.__cause__ or ''}"
        train(wrapped, optimizer, range(2, 4), rank)  # goes on as before
        return text
    return ""


def test_a_wire_changes_on_all_ranks_or_none():
    for text in run_ranks(switch_differently, 2, ["int8", "bf16"]):
        assert "rank 1 differs from rank 0: wire is bf16 there but int8" in text
    for text in run_ranks(switch_differently, 2, ["int8", "int9"]):
        assert "rank 1: unknown wire format 'int9'" in text


def hooked(rank, world):
    wrapped, _ = wrap("fp32")
    wrapped.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ValueError, match="communication hook"):
        wrapped.set_wire("int8")


def test_no_wire_beside_a_hook():
    run_ranks(hooked, 2)
