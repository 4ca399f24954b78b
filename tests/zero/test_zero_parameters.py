"""zero=1 and 2 where updated parameters travel as codes, and their owners keep the exact ones."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim

from fastsync import FastDDP, TopK, Zero
from fastsync.config.arguments import PARAMETER_WIRES, grouped
from fastsync.testing import RankError
from fastsync.wire.formats import FORMATS
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import ROUND
from tests.zero.parameter_losses import loss_of
from tests.zero.zero_loops import STEPS, batch, net, train

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05),
    "momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "adamw fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "adafactor": lambda p: optim.Adafactor([q for q in p if q.numel()], 0.01),
}


def wrapped(wire, make="adamw", zero=1, module=None, **options):
    module = module or net()
    options = {"find_unused_parameters": True, **options}
    model = FastDDP(module, **grouped({"zero": zero, "parameter_wire": wire, **options}))
    return model, OPTIMIZERS[make](model.parameters())


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def masters(model, optimizer):
    """Exact weights, of parameters that were stepped on. Collective."""
    state = optimizer.state_dict()["state"]
    order = [p for group in optimizer.param_groups for p in group["params"]]
    exact = {id(p): state[i].get("master") for i, p in enumerate(order) if i in state}
    return [exact.get(id(p)) if p.numel() else None for p in model.parameters()]


def equal(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


# Against a twin that has no ranks.


def averaged(module, world, step):
    """Gradients of every rank's batch, as they arrive."""
    sums = [None] * len(list(module.parameters()))
    for rank in range(world):
        module.zero_grad()
        module(batch(rank, step)).mean().backward()
        for i, param in enumerate(module.parameters()):
            if param.grad is not None:
                part = param.grad / world
                sums[i] = part if sums[i] is None else sums[i] + part
    module.zero_grad()
    return sums


def twin(world, wire, make):
    """Exact weights, and what they are rounded to after each step, in one process."""
    module = net()
    exact = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    optimizer = OPTIMIZERS[make](exact)
    for step in range(STEPS):
        for master, grad in zip(exact, averaged(module, world, step), strict=True):
            master.grad = grad
        optimizer.step()
        for param, master in zip(module.parameters(), exact, strict=True):
            if master.grad is not None:
                param.data.copy_(ROUND[wire](master))
    stepped = [m.detach() if m.grad is not None and m.numel() else None for m in exact]
    return [p.detach().clone() for p in module.parameters()], stepped


def beside_twin(rank, world, wire, make, zero, shared):
    model, optimizer = wrapped(wire, make, zero, shared_memory=shared)
    train(model, optimizer, rank, range(STEPS))
    wanted, exact = twin(world, wire, make)
    return equal(weights(model), wanted), equal(masters(model, optimizer), exact)


@pytest.mark.slow(
    but=(
        "1-True-int8",
        "2-False-fp8_e4m3",
    )
)
@pytest.mark.parametrize("wire", PARAMETER_WIRES)
@pytest.mark.parametrize(("zero", "shared"), [(1, True), (1, False), (2, False)])
def test_weights_are_those_of_a_twin_that_rounds_by_the_reference(wire, zero, shared):
    assert run_ranks(beside_twin, 2, wire, "adamw", zero, shared) == [(True, True)] * 2


@pytest.mark.slow(
    but=(
        "sgd",
        "adafactor",
    )
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_kind_of_optimizer_steps_on_masters(make):
    assert run_ranks(beside_twin, 2, "int8", make, 1, True) == [(True, True)] * 2


def of_ranks(rank, world, wire, shared):
    model, optimizer = wrapped(wire, shared_memory=shared)
    train(model, optimizer, rank, range(STEPS))
    exact = masters(model, optimizer)
    rounded = [None if m is None else ROUND[wire](m) for m in exact]
    kept = [w if m is not None else None for w, m in zip(weights(model), exact, strict=True)]
    return weights(model), equal(kept, rounded)


@pytest.mark.slow("True-fp8_e4m3", "False-int8")
@pytest.mark.parametrize("wire", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("shared", [True, False])
def test_three_ranks_hold_the_same_rounded_masters(wire, shared):
    ranks = run_ranks(of_ranks, 3, wire, shared)
    assert all(as_masters and equal(found, ranks[0][0]) for found, as_masters in ranks)


# Against exact parameters.


@pytest.mark.slow
def test_a_training_ends_where_one_without_codes_does():
    assert abs(loss_of("gpt", "int8") / loss_of("gpt", "None") - 1) < 0.002


# What travels.


def bytes_of_a_step(rank, world, wire):
    module = nn.Linear(512, 256, bias=False)
    model, optimizer = wrapped(wire, "sgd", module=module, shared_memory=False)
    for _ in range(3):
        model(torch.randn(2, 512)).sum().backward()
        before = model.sync_stats().sent_bytes
        optimizer.step()
    return model.sync_stats().sent_bytes - before


@pytest.mark.slow(but=("int8",))
@pytest.mark.parametrize("wire", PARAMETER_WIRES)
def test_bytes_of_a_step_are_those_of_the_codes(wire):
    region = 512 * 256 // 2
    flags = 16  # a byte for each piece, filled up
    assert run_ranks(bytes_of_a_step, 2, None) == [4 * region] * 2
    assert run_ranks(bytes_of_a_step, 2, wire) == [FORMATS[wire].coded_bytes(region) + flags] * 2
    assert FORMATS["int8"].coded_bytes(region) < 0.26 * 4 * region


# What is not coded.


class Kinds(nn.Module):
    """Parameters of several dtypes, one frozen and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.coded = nn.Linear(40, 33)
        self.narrow = nn.Parameter(torch.randn(300, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(170, dtype=torch.float64))
        self.complex = nn.Parameter(torch.randn(30, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(333), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(333))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x):
        rest = self.narrow.float().square().mean() + self.wide.square().mean()
        rest = rest + self.complex.abs().square().mean() + self.empty.sum()
        return self.coded(x).square().mean() + rest


def of_kinds(rank, world, wire):
    model, optimizer = wrapped(wire, "sgd", module=Kinds())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 40, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    names = [name for name, _ in model.module.named_parameters()]
    exact = dict(zip(names, masters(model, optimizer), strict=True))
    return dict(zip(names, weights(model), strict=True)), exact


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_what_no_step_changes_and_what_is_no_smaller_stays_as_it_is(wire):
    before = dict(Kinds().named_parameters())
    plain, _ = run_ranks(of_kinds, 2, None)[0]
    first, _ = run_ranks(of_kinds, 2, wire)[0]
    for found, exact in run_ranks(of_kinds, 2, wire):
        assert equal(found.values(), first.values())
        for name in ("frozen", "unused"):
            assert torch.equal(found[name], before[name]) and exact[name] is None
        for name in ("wide", "complex"):
            assert torch.equal(found[name], plain[name]) and exact[name] is None
        assert torch.equal(found["coded.weight"], ROUND[wire](exact["coded.weight"]))
        if wire == "bf16":
            assert torch.equal(found["narrow"], plain["narrow"]) and exact["narrow"] is None
        else:
            assert torch.equal(found["narrow"], ROUND[wire](exact["narrow"]).bfloat16())


# Between steps.


def written(rank, world):
    """A script writes to some elements, swaps all of them out and in, and steps on."""
    model, optimizer = wrapped("int8", "sgd")
    train(model, optimizer, rank, range(2))
    exact, line = masters(model, optimizer), model.module.line.weight
    with torch.no_grad():
        kept = line.clone()
        line.fill_(9.0)
        line.copy_(kept)
        line[3, 5:8] = 4.0
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, rank, range(2, 3))
    index = [id(p) for p in model.parameters()].index(id(line))
    wanted = exact[index].clone()
    wanted[3, 5:8] = 4.0
    found = masters(model, optimizer)[index]
    return torch.equal(found, wanted), torch.equal(line, ROUND["int8"](wanted))


def test_masters_follow_what_is_written_and_keep_the_rest():
    assert run_ranks(written, 2) == [(True, True)] * 2


def adds_a_group(rank, world):
    """A group that is added later has the optimizer taken over anew."""
    module = net()
    model = FastDDP(module, zero=Zero(1, parameter_wire="int8"), find_unused_parameters=True)
    late = {id(p) for p in module.conv.parameters()}
    optimizer = optim.SGD([p for p in module.parameters() if id(p) not in late], 0.05)
    train(model, optimizer, rank, range(2))
    before = masters(model, optimizer)
    optimizer.add_param_group({"params": list(module.conv.parameters()), "lr": 0.0})
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, rank, range(2, 3))
    after = masters(model, optimizer)
    return equal(
        [a for a, b in zip(after, before, strict=True) if b is not None],
        [b for b in before if b is not None],
    )


def test_masters_stay_when_a_group_is_added():
    assert run_ranks(adds_a_group, 2) == [True, True]


# Checkpoints.


def loaded(way, to, folder, module_first):
    """Load what `saved_by` wrote into a new model, and an optimizer that has made no step."""
    model, optimizer = to
    if module_first:
        model.module.load_state_dict(torch.load(folder / "module", weights_only=True))
    if way == "whole":
        state = torch.load(folder / "whole", weights_only=True)
        optimizer.load_state_dict(state)
    else:
        state = {"optimizer": model.optimizer_state_dict(optimizer)}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=folder / "dcp", planner=planner)
        model.load_optimizer_state_dict(optimizer, state["optimizer"])
    if not module_first:
        model.module.load_state_dict(torch.load(folder / "module", weights_only=True))


def saved_by(rank, world, wire, folder):
    """A checkpoint after some steps; the exact weights."""
    model, optimizer = wrapped(wire)
    train(model, optimizer, rank, range(3))
    whole = optimizer.state_dict()
    dcp.save({"optimizer": model.optimizer_state_dict(optimizer)}, checkpoint_id=folder / "dcp")
    if rank == 0:
        torch.save(whole, folder / "whole")
        torch.save(model.module.state_dict(), folder / "module")
    exact = masters(model, optimizer)
    return [p if m is None else m for p, m in zip(weights(model), exact, strict=True)]


def resumed(rank, world, wire, way, folder, module_first):
    """The exact weights after a step that changes nothing."""
    model, optimizer = wrapped(wire)
    loaded(way, (model, optimizer), folder, module_first)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, rank, range(3, 4))
    if wire is None or world == 1:
        return weights(model)
    exact = masters(model, optimizer)
    return [p if m is None else m for p, m in zip(weights(model), exact, strict=True)]


@pytest.mark.slow(
    but=(
        "int8-int8-3-pieces-True",
        "int8-bf16-2-whole-False",
        "fp8_e4m3-int8-3-whole-True",
    )
)
@pytest.mark.parametrize("module_first", [True, False])
@pytest.mark.parametrize("way", ["whole", "pieces"])
@pytest.mark.parametrize(
    ("written", "read", "world"),
    [("int8", "int8", 3), ("int8", "bf16", 2), (None, "int8", 2), ("fp8_e4m3", "int8", 3)],
)
def test_masters_come_back_exactly(written, read, world, way, module_first, tmp_path):
    exact = run_ranks(saved_by, 2, written, tmp_path)[0]
    for found in run_ranks(resumed, world, read, way, tmp_path, module_first):
        assert equal(found, exact)


@pytest.mark.parametrize("world", [1, 2])
def test_a_training_without_codes_resumes_from_the_masters(world, tmp_path):
    exact = run_ranks(saved_by, 2, "int8", tmp_path)[0]
    for found in run_ranks(resumed, world, None, "whole", tmp_path, True):
        assert equal(found, exact)


def passed_on(rank, world, folder):
    """Loaded without codes and saved again, with no step in between: nothing is lost."""
    model, optimizer = wrapped(None)
    model.module.load_state_dict(torch.load(folder / "module", weights_only=True))
    state = torch.load(folder / "whole", weights_only=True)
    model.load_optimizer_state_dict(optimizer, copy.deepcopy(state))
    again = optimizer.state_dict()["state"]
    dist.barrier()  # a rank whose optimizer is gone has nothing to give
    return all(torch.equal(again[i]["master"], s["master"]) for i, s in state["state"].items())


def test_a_checkpoint_that_is_passed_on_keeps_its_masters(tmp_path):
    run_ranks(saved_by, 2, "int8", tmp_path)
    assert run_ranks(passed_on, 2, tmp_path) == [True, True]


def continued(rank, world, way, folder):
    """The second half of a training by way of a checkpoint, and the whole."""
    model, optimizer = wrapped("int8", zero=2)
    loaded(way, (model, optimizer), folder, True)
    train(model, optimizer, rank, range(3, STEPS))
    whole, other = wrapped("int8")
    train(whole, other, rank, range(STEPS))
    return equal(weights(model), weights(whole))


@pytest.mark.parametrize("way", ["whole", "pieces"])
def test_a_resumed_training_has_the_same_bits(way, tmp_path):
    run_ranks(saved_by, 2, "int8", tmp_path)
    assert run_ranks(continued, 2, way, tmp_path) == [True, True]


# What is refused.


def refused(rank, world, options, message, dtype=torch.float32):
    with pytest.raises(ValueError, match=message):
        FastDDP(nn.Linear(3, 3, dtype=dtype), **grouped(options))
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 0, "parameter_wire": "int8"}, "zero=0 does not"),
        ({"zero": 1, "parameter_wire": "int4"}, "one of 'bf16', .* but is 'int4'"),
        ({"zero": 1, "parameter_wire": "topk"}, "but is 'topk'"),
        ({"zero": 2, "parameter_wire": TopK(0.1)}, "but is TopK"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    assert run_ranks(refused, 2, options, message) == [True, True]


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.bfloat16, "bf16"), (torch.float64, "int8"), (torch.complex64, "int8")],
)
def test_models_that_no_code_makes_smaller_are_refused(dtype, wire):
    options = {"zero": 1, "parameter_wire": wire}
    assert run_ranks(refused, 2, options, "none of the parameters smaller", dtype) == [True] * 2


def disagreeing(rank, world):
    FastDDP(nn.Linear(3, 3), zero=Zero(1, parameter_wire=("int8", "bf16")[rank]))


def test_ranks_that_differ_are_told():
    with pytest.raises(RankError, match="parameter_wire='int8'") as error:
        run_ranks(disagreeing, 2)
    assert "RankMismatchError" in str(error.value)
