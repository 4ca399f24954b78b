"""Coded buckets in every kind of step that native ones know, with a code that loses nothing."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from fastsync import Codec, FastDDP, RankMismatchError, TopK, Wire
from tests.helpers.models import many
from tests.helpers.teams import run_ranks
from tests.wire.test_error_feedback import mass, residual_of, train, wrap

EXACT = (
    Wire("fp32", form="two_shot"),
    Wire("fp32", form="two_shot", piece_bytes=500),
    Wire("fp32", form="gather"),
    Wire(TopK(1.0), error_feedback=False),
)


def wrapped(wire, **options):
    torch.manual_seed(0)
    return FastDDP(many(3, 16), wire=wire, bucket_cap_mb=0.001, **options)


def inputs(rank, step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


def uneven(rank, world, wire):
    model = wrapped(wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(inputs(rank, step)).square().sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def static(rank, world, wire):
    model = wrapped(wire, static_graph=True)
    for step in range(3):
        model.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
    return grads(model)


def kept(rank, world, wire):
    """Gradients are never zeroed, and grow."""
    model = wrapped(wire)
    for step in range(3):
        model(inputs(rank, step)).square().sum().backward()
    return grads(model)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = many(3, 16)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True)


def recomputed(rank, world, wire):
    torch.manual_seed(0)
    model = FastDDP(Recomputed(), wire=wire, bucket_cap_mb=0.001)
    for step in range(3):
        model.zero_grad()
        model(inputs(rank, step).requires_grad_()).square().sum().backward()
    return grads(model)


def in_a_subgroup(rank, world, wire):
    """Every rank takes part in making groups; two of them train."""
    group = dist.new_group([0, world - 1])
    if rank not in (0, world - 1):
        return []
    model = wrapped(wire, process_group=group)
    for step in range(2):
        model.zero_grad()
        model(inputs(rank // (world - 1), step)).square().sum().backward()
    return grads(model)


@pytest.mark.slow(but=("kept-2-wire3",))
@pytest.mark.parametrize("wire", EXACT)
@pytest.mark.parametrize(
    ("train", "world"),
    [
        (uneven, 2),
        (static, 2),
        (kept, 2),
        (recomputed, 2),
        (in_a_subgroup, 3),
    ],
)
def test_a_lossless_code_changes_no_bit(train, world, wire):
    found = run_ranks(train, world, wire)
    wanted = run_ranks(train, world, Wire())
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def used_by(rank, world, wire):
    """Rank 0 leaves out one layer, all ranks another."""
    torch.manual_seed(0)
    parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            for index, part in enumerate(self.parts):
                if index != 2 and (index != 1 or rank != 0):
                    x = part(x)
            return x

    model = FastDDP(Some(), wire=wire, find_unused_parameters=True, bucket_cap_mb=0.001)
    for step in range(2):
        model.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
    unused = [p.grad is None for p in parts[2].parameters()]
    return unused, model.reducer._get_local_used_map().tolist()


@pytest.mark.slow(but=("wire4",))
@pytest.mark.parametrize("wire", ["int8", *EXACT])
def test_used_flags_travel_exactly(wire):
    for unused, counts in run_ranks(used_by, 3, wire):
        assert unused == [True, True]
        assert counts == [3, 3, 2, 2, 0, 0, 3, 3]


# --- Wires that change between two steps, on all ranks or none


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


# --- Error feedback of parameters that are unused in some steps


STEPS = 7


class Half(Codec):
    """Half of each element, in fp32: what is kept always has a code."""

    name = "half"

    def coded_bytes(self, numel):
        return 4 * numel

    def encode(self, values, wire):
        wire.view(torch.float32).copy_(values / 2)

    def decode(self, wire, values):
        values.copy_(wire.view(torch.float32))


WIRES = {
    "int4": Wire("int4", form="two_shot"),
    "int4, gathered": Wire("int4", form="gather"),
    "topk": Wire(TopK(0.6)),  # more than one layer
    "a codec": Wire(Half(), form="gather"),
}


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, use):
        return self.sometimes(self.always(x)) if use else self.always(x)


def own_gradients(module, x, use):
    """This rank's, without synchronisation, fp64; zeros where there is none."""
    plain = copy.deepcopy(module).double()
    plain.zero_grad()
    plain(x.double(), use).square().mean().backward()
    return flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in plain.parameters())


def flat(tensors):
    return torch.cat([t.double().flatten() for t in tensors])


def balance(rank, world, wire):
    """Gradients so far less averages so far, and the sum of residuals, after every step."""
    wrapped = FastDDP(Sometimes(), wire=wire, find_unused_parameters=True)
    params = list(wrapped.module.parameters())
    owed, found = 0, []
    for step in range(STEPS):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        use = step % 3 == 0 or (step % 3 == 1 and rank == 0)  # all, one, none
        wrapped.zero_grad()
        wrapped(x, use).square().mean().backward()
        average = own_gradients(wrapped.module, x, use) / world
        dist.all_reduce(average)
        arrived = flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in params)
        owed = owed + average - arrived
        mass = flat(wrapped.sync_state_dict()["residuals"].values())
        dist.all_reduce(mass)
        found.append((((mass - owed).norm() / owed.norm()).item(), owed.norm().item()))
    return found


@pytest.mark.slow(but=("int4, gathered",))
@pytest.mark.parametrize("name", WIRES)
def test_what_nobody_receives_is_kept(name):
    for steps in run_ranks(balance, 2, WIRES[name]):
        assert max(off for off, _ in steps) < 1e-4
        assert min(owed for _, owed in steps) > 0
