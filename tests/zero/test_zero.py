"""zero=1 and 2: unchanged scripts, each rank with its share of the optimizer's state."""

import copy
import io

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel.distributed import _MixedPrecision

from fastsync import ChunkedTopK, FastDDP, Zero
from fastsync.config.arguments import grouped
from fastsync.testing import RankError
from tests.helpers.teams import run_ranks
from tests.zero.zero_loops import OPTIMIZERS, STEPS, Net, batch, close, net, train, trained


def beside_ddp(rank, world, make, early):
    wanted, whole = trained(rank, 0, make, early=early)
    found, own = trained(rank, 1, make, early=early)
    return wanted, found, own / max(1, whole)


@pytest.mark.slow(but=("2-adamw",))
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3])
def test_weights_are_those_of_the_whole_optimizer(make, world):
    ranks = run_ranks(beside_ddp, world, make, world == 2)
    for wanted, found, _ in ranks:
        assert close(found, wanted)
        for mine, first in zip(found, ranks[0][1], strict=True):
            assert torch.equal(mine, first), "ranks differ"
    shares = [share for _, _, share in ranks]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    if make != "adafactor":
        assert max(shares) < 1.3 / world


def muon_and_adamw(rank, zero):
    """Two optimizers over parts of one model, of which one needs whole matrices."""
    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5), nn.Linear(5, 3))
    model = FastDDP(module, zero=zero)
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() != 2]
    optimizers = [optim.Muon(matrices, 0.02), optim.AdamW(others, 0.02)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 9 + rank))
        ).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def muon_beside_ddp(rank, world):
    torch.manual_seed(5)
    wanted = muon_and_adamw(rank, 0)
    torch.manual_seed(5)
    return wanted, muon_and_adamw(rank, 1)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_two_optimizers_one_of_whole_matrices():
    for wanted, found in run_ranks(muon_beside_ddp, 2):
        assert close(found, wanted)


class Mine(optim.SGD):
    """An optimizer that fastsync has never heard of."""


def step_with_mine(rank, world, shard_by):
    module = net()
    model = FastDDP(module, zero=Zero(1, shard_by=shard_by), find_unused_parameters=True)
    optimizer = Mine(model.parameters(), 0.1)
    model(batch(rank, 0)).mean().backward()
    optimizer.step()


def test_an_unknown_optimizer_is_an_error_unless_it_is_explained():
    with pytest.raises(
        RankError, match=r"does not know how tests.zero.test_zero.Mine may be sharded"
    ):
        run_ranks(step_with_mine, 2, "auto")
    run_ranks(step_with_mine, 2, "element")
    run_ranks(step_with_mine, 2, "tensor")


def save_and_resume(rank, world, stages):
    """All steps; half of them, a checkpoint, and the other half by another model."""
    whole = net()
    model = FastDDP(whole, zero=0, find_unused_parameters=True)
    optimizer = optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(STEPS))

    first = net()
    model = FastDDP(first, zero=stages[0], find_unused_parameters=True)
    optimizer = optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(STEPS // 2))
    state = copy.deepcopy([first.state_dict(), optimizer.state_dict()])
    for values in state[1]["state"].values():  # as a format without strides returns them
        values.update({name: value.contiguous() for name, value in values.items()})

    second = Net()
    second.load_state_dict(state[0])
    model = FastDDP(second, zero=stages[1], find_unused_parameters=True)
    optimizer = optim.AdamW(model.parameters(), 0.5)
    if stages == (1, 1):  # into one that has made a step already
        train(model, optimizer, rank, [77])
        second.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    train(model, optimizer, rank, range(STEPS // 2, STEPS))
    again = optimizer.state_dict()
    return [[p.detach() for p in m.parameters()] for m in (whole, second)], state[1], again


@pytest.mark.slow(but=("stages0",))
@pytest.mark.parametrize("stages", [(1, 0), (0, 1), (1, 1)])
def test_state_dicts_are_those_of_the_whole_optimizer(stages):
    ranks = run_ranks(save_and_resume, 3, stages)
    for (wanted, found), saved, again in ranks:
        assert close(found, wanted)
        assert saved["state"].keys() == again["state"].keys()
        shapes = {i: s["exp_avg"].shape for i, s in saved["state"].items()}
        assert shapes[0] == () and shapes[3] == (5, 3, 3, 3) and shapes[5] == (7, 20)
        assert again["state"][0]["step"] == STEPS


def save_differently(rank, world):
    model = FastDDP(net(), zero=1, find_unused_parameters=True)
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, rank, [0])
    if rank == 0:
        return [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
    state = torch.load(dumped(model.optimizer_state_dict(optimizer)), weights_only=True)
    return [s["exp_avg"] for s in state["state"].values()]


def dumped(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_ranks_may_save_in_different_forms():
    first, second = run_ranks(save_differently, 2)
    assert len(first) > 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Sized(optim.SGD):
    """Keeps something of each tensor that it steps on, which is not of its elements."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["size"] = torch.tensor([param.numel(), 0])


def save_sized(rank, world, shard_by):
    model = FastDDP(net(), zero=Zero(1, shard_by=shard_by), find_unused_parameters=True)
    optimizer = Sized(model.parameters(), 0.1)
    train(model, optimizer, rank, [0])
    if shard_by == "tensor":
        return len(optimizer.state_dict()["state"]) > 0
    with pytest.raises(ValueError, match="'size' in the optimizer's state differs between parts"):
        optimizer.state_dict()
    return True


@pytest.mark.slow("element")
@pytest.mark.parametrize("shard_by", ["element", "tensor"])
def test_state_of_a_part_that_is_none_of_its_elements_is_an_error(shard_by):
    assert run_ranks(save_sized, 3, shard_by) == [True] * 3


def grow(rank, world):
    """A group that is added later, a frozen half, a learning rate that changes."""
    results = []
    for zero in (0, 1):
        module = net()
        model = FastDDP(module, zero=zero, find_unused_parameters=True)
        optimizer = optim.Adam([{"params": module.conv.parameters(), "lr": 0.01}], 0.02)
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group({"params": [module.line.weight, module.scale]})
            if step == 3:
                module.conv.bias.requires_grad_(False)
            if step == 5:
                module.conv.bias.requires_grad_(True)
            optimizer.param_groups[0]["lr"] *= 0.9
            with model.no_sync():
                model(batch(rank, 50 + step)).mean().backward()
            train_once(model, optimizer, rank, step)
        results.append([p.detach() for p in module.parameters()])
    return results


def train_once(model, optimizer, rank, step):
    model(batch(rank, step)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_groups_added_later_frozen_parameters_and_accumulation():
    for wanted, found in run_ranks(grow, 2):
        assert close(found, wanted)


def scaled(rank, world):
    """A step whose gradients overflow on one rank is left out by all."""
    results = []
    for zero in (0, 1):
        module = net()
        model = FastDDP(module, zero=zero, find_unused_parameters=True)
        optimizer = optim.AdamW(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 and rank == 1 else 1.0
            scaler.scale(model(batch(rank, step)).mean() * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append(
            [torch.tensor(scaler.get_scale()), *(p.detach() for p in module.parameters())]
        )
    return results


def test_gradient_scalers_skip_steps_on_all_ranks():
    for wanted, found in run_ranks(scaled, 2):
        assert wanted[0] == 512
        assert close(found, wanted)


def moved(rank, world):
    """A step that raised, another wrapper, a model that was converted in between."""
    module = net()
    model = FastDDP(module, zero=1, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    train(model, optimizer, rank, [0, 1])
    optimizer.param_groups[0]["momentum"] = "broken"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    model = FastDDP(module, zero=1, find_unused_parameters=True)
    train(model, optimizer, rank, [2, 3])
    for param in module.parameters():
        param.data = param.data.clone()
    train(model, optimizer, rank, [4])
    momenta = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
    return [p.detach() for p in module.parameters()], momenta


def plainly(rank, world):
    module = net()
    model = FastDDP(module, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    train(model, optimizer, rank, range(5))
    momenta = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
    return [p.detach() for p in module.parameters()], momenta


def test_after_an_error_another_wrapper_and_moved_parameters():
    for found, wanted in zip(run_ranks(moved, 2), run_ranks(plainly, 2), strict=True):
        assert close(found[0], wanted[0])
        assert close(found[1], wanted[1])


def refuse(rank, world, what):
    model = FastDDP(net(), zero=1 if what != "stages" else rank, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), 0.1)
    if what == "join":
        with model.join():
            pass
    if what == "Join":  # as Accelerate's join_uneven_inputs does
        with Join([model]):
            model(batch(rank, 0))
    if what == "backward":
        hook = model.module.scale.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(batch(rank, 0)).mean().backward()
        hook.remove()
    if what == "lbfgs":
        optim.LBFGS(model.parameters()).step(lambda: torch.tensor(0.0))


@pytest.mark.slow(but=("join-makes no optimizer steps, which all ranks make",))
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("stages", "zero"),
        ("join", "makes no optimizer steps, which all ranks make"),
        ("Join", "makes no optimizer steps, which all ranks make"),
        ("backward", "cannot step inside a backward"),
        ("lbfgs", "cannot shard LBFGS"),
    ],
)
def test_what_cannot_be_is_refused(what, text):
    with pytest.raises(RankError, match=text):
        run_ranks(refuse, 2, what)


@pytest.mark.slow(but=("arguments2",))
@pytest.mark.parametrize("arguments", [{"zero": 4}, {"zero": "1"}, {"zero": 1, "shard_by": "row"}])
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(RankError, match=r"zero must be 0|shard_by must be one of"):
        run_ranks(wrap_with, 1, arguments)


def wrap_with(rank, world, arguments):
    FastDDP(net(), **grouped(arguments))


FEATURES = {
    "chunked topk": {"wire": ChunkedTopK(0.1)},
    "mixed": {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32, None)},
    "copies": {"gradient_as_bucket_view": False},
    "static": {"static_graph": True},
    "hook": {},
}


def with_feature(rank, world, name):
    results = []
    for zero in (0, 1):
        module = net()
        options = {"find_unused_parameters": True, **FEATURES[name]}
        model = FastDDP(module, **grouped({"zero": zero, **options}))
        if name == "hook":
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
        train(model, optimizer, rank, range(STEPS))
        results.append([p.detach() for p in module.parameters()])
    return results


@pytest.mark.slow(but=("static",))
@pytest.mark.parametrize("name", FEATURES)
def test_beside_other_features(name):
    for wanted, found in run_ranks(with_feature, 2, name):
        assert close(found, wanted)


def older_graph(rank, world, zero):
    """A backward through weights that a step has changed since, as torch refuses it."""
    layers = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.Linear(40, 2))
    model = FastDDP(layers, zero=zero)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return True


@pytest.mark.slow("0", "1")
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_graph_that_is_older_than_a_step_is_an_error(zero):
    assert run_ranks(older_graph, 2, zero) == [True, True]
