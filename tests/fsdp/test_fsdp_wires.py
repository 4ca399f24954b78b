"""Units whose gradients and parameters travel as codes, beside a twin that codes by torch alone."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fastsync import FastDDP, RankMismatchError, TopK, Wire, Zero, fully_shard
from fastsync.config.arguments import PARAMETER_WIRES, grouped
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import (
    OPTIMIZERS,
    apply,
    farthest,
    loss_of,
    mesh_of,
    net,
    train,
    whole,
    words,
)
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import ROUND, Halves, by_shares
from tests.zero.parameter_losses import NUDGED, rows_of
from tests.zero.parameter_losses import loss_of as train_with

SIZES = ((1,), (7,), (64,), (5, 2), (3, 4, 2), (0, 3), (40, 30), (300,))
RATE = 0.25
INT8 = {"wire": "int8", "parameter_wire": "int8"}


class Weighed(nn.Module):
    """Sums of weights times numbers, which are the gradients; remembers the weights it saw."""

    def __init__(self, dtype=torch.float32, sizes=SIZES):
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(s).to(dtype) for s in sizes)

    def forward(self, numbers):
        self.seen = [weight.detach().clone() for weight in self.weights]
        pairs = zip(self.weights, numbers, strict=True)
        return sum((w * n.to(w.dtype)).sum() for w, n in pairs if n is not None)


def numbers_of(rank, step, sizes=SIZES):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=generator) * 10 ** (i - 3) for i, s in enumerate(sizes)]


def coded(tensor, wire, world, dim=0):
    return tensor.float() if wire is None else by_shares(tensor, wire, world, dim)


class Twin:
    """The same training in one process."""

    def __init__(self, world, wire, parameter_wire, dtype=torch.float32, compute=None, dim_of=None):
        self.world, self.wire, self.parameter_wire = world, wire, parameter_wire
        self.dtype, self.compute = dtype, compute or dtype
        self.dim_of = dim_of or (lambda sizes: 0)
        self.masters = [w.detach().clone() for w in Weighed(dtype).weights]

    def seen(self):
        return [
            coded(m, self.parameter_wire, self.world, self.dim_of(m.shape)).to(self.compute)
            for m in self.masters
        ]

    def averages(self, step):
        """Return averages of gradients that arrive in `compute`, in the dtype of the masters."""
        found = []
        for index, master in enumerate(self.masters):
            total = None
            for rank in range(self.world):
                number = numbers_of(rank, step)[index].to(self.compute).float()
                dim = self.dim_of(master.shape)
                term = coded(number * (1 / self.world), self.wire, self.world, dim)
                total = term if total is None else total + term
            found.append(total.to(self.dtype))
        return found

    def step(self, step):
        for master, average in zip(self.masters, self.averages(step), strict=True):
            master.sub_(average, alpha=RATE)


def same(found, wanted):
    return [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]


def beside(rank, world, wire, parameter_wire, options):
    """Return whether weights that are computed with, gradients and masters are the twin's, bit by
    bit.
    """
    os.environ["FASTSYNC_SHM"] = options.get("memory", "1")
    dtype, compute = options.get("dtype", torch.float32), options.get("compute")
    dim_of = options.get("dim_of")
    model = Weighed(dtype)
    fully_shard(
        model,
        wire=wire or "fp32",
        parameter_wire=parameter_wire,
        mp_policy=MixedPrecisionPolicy(compute, cast_forward_inputs=False),
        mesh=mesh_of(world, options.get("rows")),
        shard_placement_fn=dim_of and (lambda p: Shard(dim_of(p.shape))),
    )
    optimizer = optim.SGD(model.parameters(), RATE, foreach=False)
    twin = Twin(world, wire, parameter_wire, dtype, compute, dim_of)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(numbers_of(rank, step)).backward()
        found += same(model.seen, twin.seen())
        found += same(whole(p.grad for p in model.parameters()), twin.averages(step))
        optimizer.step()
        twin.step(step)
        found += same(whole(model.parameters()), twin.masters)
    return all(found)


BOTH = [(wire, other) for wire in PARAMETER_WIRES for other in (None, "bf16", "int8")]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("wire", "parameter_wire"), BOTH)
def test_weights_and_gradients_are_those_of_a_twin_bit_by_bit(world, wire, parameter_wire):
    assert run_ranks(beside, world, wire, parameter_wire, {}) == [True] * world


def last(sizes):
    """The last dimension that two and three ranks divide, if there is one."""
    return max((d for d in range(len(sizes)) if d == 0 or sizes[d] % 2 == 0), default=0)


KINDS = {
    "fp16": {},
    "fp8_e4m3": {},
    "16 bits": {"dtype": torch.bfloat16},
    "lower precision": {"compute": torch.bfloat16},
    "other dimensions": {"dim_of": last},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_of_another_kind(kind):
    wire = kind if kind in PARAMETER_WIRES else "int8"
    assert run_ranks(beside, 2, wire, wire, KINDS[kind]) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_twin_of_ranks_that_share_no_memory(world):
    assert run_ranks(beside, world, "int8", "int8", {"memory": "0"}) == [True] * world


@pytest.mark.slow
def test_parameters_alone_may_travel_as_codes():
    assert run_ranks(beside, 2, None, "int8", {}) == [True, True]


def with_replicas(rank, world):
    """Gradients of shares, whose rows of ranks add theirs up as they are; and bytes."""
    model = Weighed()
    fully_shard(model, mesh=mesh_of(world, 2), **INT8)
    twin = Twin(2, "int8", "int8")
    model(numbers_of(rank % 2, 0)).backward()  # both rows have the same batches
    exact = same(model.seen, twin.seen())
    pairs = zip(whole(p.grad for p in model.parameters()), twin.averages(0), strict=True)
    return all(exact) and all(torch.allclose(a, b, rtol=1e-6) for a, b in pairs)


@pytest.mark.slow
def test_replicas_add_up_what_was_coded_between_the_ranks_of_a_row():
    assert run_ranks(with_replicas, 4) == [True] * 4


def steps_with(rank, world, make, options):
    """Whole weights after a training, those of a checkpoint, and a loss by the former."""
    model = FastDDP(net(), **grouped({"zero": 3, "units": ["blocks.0", "blocks.2"], **options}))
    optimizer = OPTIMIZERS[make](model.parameters())
    train(model, rank, optimizer)
    saved = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))
    exact = net()
    exact.load_state_dict(saved)
    with torch.no_grad():
        losses = [loss_of(each, words(0, 99)).item() for each in (model, exact)]
    return whole(model.parameters()), [p.detach() for p in exact.parameters()], losses


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_training_in_int8_ends_near_that_in_fp32(make):
    (wanted, _, (loss, _)), *_ = run_ranks(steps_with, 3, make, {})
    ranks = run_ranks(steps_with, 3, make, INT8)
    for found, saved, (rounded, exact) in ranks:
        assert all(same(found, ranks[0][0])) and all(same(saved, found))
        assert 0 < farthest(found, wanted) <= (0.02 if make == "sgd" else 0.09)
        assert abs(rounded - loss) < 1e-3 and 0 < abs(rounded - exact) < 1e-3


@pytest.mark.slow
def test_losses_are_those_of_the_document():
    page = (Path(__file__).parents[2] / "docs/zero3.md").read_text()
    section = page.split("\n## Fewer bits\n")[1].split("\n## ")[0]
    rows = re.findall(r"\| `([^`]+)` \| (\d\.\d{4}) ", section)
    stated = {name: float(loss) for name, loss in rows}
    assert set(stated) == {"None", NUDGED, *rows_of(3)}
    assert all(abs(loss / stated["None"] - 1) < 0.003 for loss in stated.values())
    assert abs(train_with("gpt", "int8, int8", zero=3) / stated["int8, int8"] - 1) < 0.002


# How much is sent.


def bytes_of_steps(rank, world, options, wrap):
    module = net(4, 256)
    size = sum(p.nbytes for p in module.parameters())
    if wrap:
        units = ["blocks.0", "blocks.1", "blocks.2"]
        model = FastDDP(module, **grouped({"zero": 3, "units": units, **options}))
        module = model.module
    else:
        model = apply(fully_shard, module, **options)
    counted = []
    for step in range(3):
        loss_of(model, words(rank, step)).backward()
        stats = state_of(module).context.counters()
        counted.append(sum(s["gathered_bytes"] + s["reduced_bytes"] for s in stats))
    return (counted[2] - counted[1]) / (size * (world - 1) / world)


UNITS_SENT = {
    "int8 both ways": (INT8, 0.8),
    "fp8": ({"wire": "fp8_e5m2", "parameter_wire": "fp8_e4m3"}, 0.8),
    "parameters": ({"parameter_wire": "int8"}, 1.55),
    "gradients": ({"wire": "int8"}, 2.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", UNITS_SENT)
def test_a_step_sends_codes_alone(kind, world):
    options, most = UNITS_SENT[kind]
    gathered_twice = {"reshard_after_forward": True}
    for sent in run_ranks(bytes_of_steps, world, {**options, **gathered_twice}, False):
        assert 0.9 * most <= sent <= most
    for sent in run_ranks(bytes_of_steps, world, options, True):  # the root's gathered once
        assert sent <= most


# What codes must not hide.


def partly_used(rank, world):
    """Use one weight on all ranks, one on rank 1 alone, and one on none."""
    model = Weighed(sizes=((40, 3), (40, 3), (40, 3)))
    fully_shard(model, **INT8)
    number = torch.full((40, 3), 2.0)
    model([number, number if rank == 1 else None, None]).backward()
    return [p.grad if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.slow
def test_used_flags_travel_with_codes():
    for used, once, never in run_ranks(partly_used, 2):
        assert torch.allclose(used, torch.full((40, 3), 2.0), rtol=1e-2)
        assert torch.allclose(once, torch.full((40, 3), 1.0), rtol=1e-2)
        assert never is None


def with_a_fault(rank, world, wire, fault):
    """By rank: which elements of its share are not finite, and the norm of all."""
    model = Weighed(sizes=((600, 2), (9,)))
    fully_shard(model, wire=wire)
    numbers = [torch.ones(600, 2), torch.ones(9)]
    if rank == 0:
        numbers[0][500, 1] = fault  # which the last rank owns
    model(numbers).backward()
    grads = [p.grad for p in model.parameters()]
    off = [int((~torch.isfinite(g.to_local())).sum()) for g in grads]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))  # which begins its work
    optimizer = optim.SGD(model.parameters(), RATE)
    before = whole(model.parameters())
    scaler.step(optimizer)
    skipped = all(same(whole(model.parameters()), before))
    return off, bool(torch.isfinite(norm)), skipped


@pytest.mark.slow
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wire", ["bf16", "int8", "fp8_e4m3", "fp16"])
@pytest.mark.parametrize("world", [2, 3])
def test_nan_and_infinity_reach_the_rank_that_keeps_the_share(world, wire, fault):
    found = run_ranks(with_a_fault, world, wire, fault)
    for rank, (off, finite, skipped) in enumerate(found):
        assert off[1] == 0 and (off[0] > 0) == (rank == world - 1)
        assert off[0] <= 256 and not finite and skipped


def with_a_broken_weight(rank, world, parameter_wire):
    model = Weighed(sizes=((600, 2), (9,)))
    fully_shard(model, parameter_wire=parameter_wire)
    if rank == 1:
        with torch.no_grad():
            model.weights[0].to_local()[250, 0] = float("nan")
    model(numbers_of(rank, 0, ((600, 2), (9,))))
    off = [~torch.isfinite(seen) for seen in model.seen]
    return [int(o.sum()) for o in off], bool(off[0][550, 0])


@pytest.mark.slow
@pytest.mark.parametrize("parameter_wire", PARAMETER_WIRES)
def test_a_broken_weight_is_broken_on_every_rank(parameter_wire):
    first, second = run_ranks(with_a_broken_weight, 2, parameter_wire)
    assert first == second
    assert 0 < first[0][0] <= 256 and first[0][1] == 0 and first[1]


class TwoDTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.wide = nn.Parameter(torch.randn(30, 4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(30, 4, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.arange(12, dtype=torch.int32), requires_grad=False)

    def forward(self, x):
        self.seen = [p.detach().clone() for p in (self.wide, self.narrow, self.fixed)]
        return (self.wide * x).sum() + (self.narrow * x.bfloat16()).sum()


def beside_codes(rank, world):
    model = TwoDTypes()
    wanted = whole(model.parameters())
    fully_shard(model, wire="bf16", parameter_wire="bf16")
    x = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    model(x).backward()
    return same(model.seen, wanted), model.wide.grad.full_tensor()


@pytest.mark.slow
def test_what_codes_do_not_make_smaller_stays_exact():
    rank_of = [torch.Generator().manual_seed(r) for r in range(2)]
    average = sum(torch.randn(30, 4, dtype=torch.float64, generator=g) for g in rank_of) / 2
    for exact, found in run_ranks(beside_codes, 2):
        assert exact == [True] * 3 and torch.allclose(found, average, rtol=1e-14)


def frozen_base(rank, world):
    """A frozen weight travels as codes too, and stays exact where it is kept."""
    model = Weighed(sizes=((40, 30), (30,)))
    model.weights[0].requires_grad_(False)
    exact = model.weights[0].detach().clone()
    fully_shard(model, **INT8)
    optimizer = optim.SGD(model.parameters(), RATE)
    for step in range(2):
        optimizer.zero_grad()
        model(numbers_of(rank, step, ((40, 30), (30,)))).backward()
        optimizer.step()
    (kept, _), (seen, _) = whole(model.parameters()), model.seen
    return torch.equal(kept, exact), torch.equal(seen, coded(exact, "int8", world))


def test_a_frozen_weight_is_rounded_on_its_way_alone():
    assert run_ranks(frozen_base, 2) == [(True, True)] * 2


def stochastic(rank, world):
    model = Weighed(sizes=((64, 60),))
    fully_shard(model, wire=Wire("int8", stochastic=True))
    found = []
    number = torch.linspace(-1, 1, 64 * 60).view(64, 60)
    for _ in range(40):
        model.zero_grad()
        model([number]).backward()
        found.append(model.weights[0].grad.full_tensor())
    return torch.stack(found), number


@pytest.mark.slow
def test_stochastic_rounding_is_right_on_average_and_other_each_step():
    for found, number in run_ranks(stochastic, 2):
        assert not torch.equal(found[0], found[1])
        assert float((found - number).abs().max()) <= 1 / 126
        nearest = (ROUND["int8"](number.flatten()).view_as(number) - number).abs().mean()
        assert float((found.mean(0) - number).abs().mean()) < 0.6 * float(nearest)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Weighed(sizes=((64, 60),)) for _ in range(2))

    def forward(self, numbers):
        return sum(part(numbers) for part in self.parts)


def of_its_own(rank, world):
    """Averages of the same gradients on both ranks, of two units; codes are whole numbers."""
    model = Two()
    for part in model.parts:
        fully_shard(part, wire=Wire("int8", stochastic=True))
    fully_shard(model)
    number = torch.linspace(-254, 254, 64 * 60)
    number[::64] = 254.0  # in each block
    model([number.view(64, 60)]).backward()
    return whole(p.grad for p in model.parameters())


def test_stochastic_rounding_differs_by_rank_and_by_unit():
    for first, second in run_ranks(of_its_own, 2):
        assert bool((first % 2 == 1).any()), "one rank has rounded up and the other down"
        assert not torch.equal(first, second)


def user_s(rank, world):
    model = Weighed()
    fully_shard(model, wire=Wire(Halves(), error_feedback=False))
    numbers = [n.clamp(-100, 100) for n in numbers_of(0, 0)]
    model(numbers).backward()
    return whole(p.grad for p in model.parameters()), numbers


@pytest.mark.slow
def test_gradients_may_travel_in_a_codec_of_the_user_s():
    for found, numbers in run_ranks(user_s, 2):
        wanted = [2 * (n / 2).half().float() for n in numbers]
        assert all(same(found, wanted))


def alone(rank, world):
    model = Weighed()
    fully_shard(model, **INT8)
    model(numbers_of(0, 0)).backward()
    grads = whole(p.grad for p in model.parameters())
    return all(same(model.seen, whole(model.parameters())) + same(grads, numbers_of(0, 0)))


@pytest.mark.slow
def test_one_rank_codes_nothing():
    assert run_ranks(alone, 1) == [True]


# --- Wires that units cannot have, and ranks that mean different ones: errors everywhere


REFUSED = {
    "topk": (TopK(0.1), "whole gradients"),
    "int4": ("int4", "error feedback"),
    "feedback": (Wire("int8", error_feedback=True), "error feedback"),
    "overrides": (Wire("int8", overrides={"*norm*": "fp32"}), "know no overrides"),
    "warm-up": (Wire("int8", warmup_steps=3), "know no warmup_steps"),
    "native": (Wire("bf16", form="native"), "know no form"),
    "hierarchical": (Wire("int8", form="hierarchical"), "know no form"),
    "nothing": ("int7", "int7"),
}


def refuse(rank, world):
    found = []
    for wire, text in REFUSED.values():
        for wrap in (
            fully_shard,
            lambda module, **options: FastDDP(module, **grouped({"zero": 3, **options})),
        ):
            with pytest.raises(ValueError, match=text) as error:
                wrap(net(), wire=wire)
            found.append(str(error.value))
    for wrap in (
        fully_shard,
        lambda module, **options: FastDDP(module, **grouped({"zero": 3, **options})),
    ):
        with pytest.raises(ValueError, match="too much of a weight"):
            wrap(net(), parameter_wire="int4")
    with pytest.raises(ValueError, match="makes none of the parameters smaller"):
        FastDDP(net().double(), zero=Zero(3, parameter_wire="int8"))
    return found


def test_what_units_cannot_send_is_an_error_on_every_rank():
    first, second = run_ranks(refuse, 2)
    assert first == second


WIRES = ({"wire": "int8"}, {"parameter_wire": "int8"}, {"wire": Wire("int8", seed=1)}, {})


def differ(rank, world, rows, one, other, wrap):
    options = WIRES[other] if rank == world - 1 else WIRES[one]
    try:
        if wrap:
            FastDDP(net(), **grouped({"zero": 3, **options}))
        else:
            model = apply(fully_shard, net(), mesh=mesh_of(world, rows), **options)
            model(words(rank, 0))
    except RankMismatchError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 3), (3, 1), (0, 2)])
@pytest.mark.parametrize(("world", "rows"), [(2, None), (3, None), (4, 2)])
def test_ranks_that_mean_different_wires(world, rows, one, other):
    for text in run_ranks(differ, world, rows, one, other, False):
        assert text is not None and "what travels of unit" in text
    if rows is None:
        assert None not in run_ranks(differ, world, rows, one, other, True)
