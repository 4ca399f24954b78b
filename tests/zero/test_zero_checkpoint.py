"""Checkpoints of sharded optimizers: written with any number of ranks and stage, read with any."""

import copy
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from fastsync import FastDDP
from fastsync.zero.dcp_chunks import Chunks
from tests.helpers.teams import run_ranks
from tests.zero.zero_checkpoints import OPTIMIZERS, STAGES, load, made, net, same, save, train
from tests.zero.zero_loops import close


def write_all(rank, world, kind, folder):
    for stage in STAGES:
        _, model, optimizer = made(kind, stage)
        train(model, optimizer, range(3), rank, world)
        save(model, optimizer, f"{folder}/{world}-{stage}")
        whole = optimizer.state_dict()
        if rank == 0:
            torch.save(whole, f"{folder}/{world}-{stage}/whole.pt")


def read_all(rank, world, kind, folder):
    """By both ways, into optimizers that have made no step and into those that have."""
    for number, path in enumerate(sorted(Path(folder).iterdir())):
        wanted = torch.load(path / "whole.pt", weights_only=True)
        assert len(wanted["state"]) > 1
        for stage in STAGES:
            _, model, optimizer = made(kind, stage)
            optimizer.param_groups[0]["lr"] = 9.0
            if stage == number % 3:
                train(model, optimizer, [7], rank, world)
            load(model, optimizer, path)
            same(optimizer.state_dict(), wanted)
        _, model, optimizer = made(kind, number % 2 + 1)
        optimizer.load_state_dict(copy.deepcopy(wanted))
        same(optimizer.state_dict(), wanted)
        if number == 1:
            save(model, optimizer, f"{folder}-again-{world}")
            _, model, optimizer = made(kind, 0)
            load(model, optimizer, f"{folder}-again-{world}")
            same(optimizer.state_dict(), wanted)


@pytest.mark.slow(but=("few-muon",))
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("writers", "readers"), [((2,), (3,)), ((1, 2, 3, 4), (1, 2, 3, 4))], ids=["few", "all"]
)
def test_written_with_any_ranks_and_stage_and_read_with_any(writers, readers, kind, tmp_path):
    folder = str(tmp_path / "saved")
    for world in writers:
        run_ranks(write_all, world, kind, folder)
    assert len(list(Path(folder).iterdir())) == len(writers) * len(STAGES)
    for world in readers:
        run_ranks(read_all, world, kind, folder)


def alone(rank, world, kind, steps):
    """The training without a wrapper."""
    module, model, optimizer = made(kind, None)
    train(model, optimizer, range(steps))
    return [p.detach() for p in module.parameters()], optimizer.state_dict()


def resumed(rank, world, kind, stage, steps, places):
    """Some steps of a training, from one checkpoint to the next."""
    module, model, optimizer = made(kind, stage)
    source, target = places
    if source:
        saved = {"model": module.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
        dcp.load(saved, checkpoint_id=source)
        module.load_state_dict(saved["model"])
        model.load_optimizer_state_dict(optimizer, saved["optimizer"])
    train(model, optimizer, steps, rank, world)
    state = {"model": module.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=target)
    return [p.detach() for p in module.parameters()], optimizer.state_dict()


def chain(tmp_path, kind, links):
    """Two steps in each link, a pair of ranks and stage."""
    places = ["", *(str(tmp_path / str(number)) for number in range(len(links)))]
    for number, (world, stage) in enumerate(links):
        steps = range(2 * number, 2 * number + 2)
        pair = places[number : number + 2]
        found = run_ranks(resumed, world, kind, stage, steps, pair)[0]
    return found


CHAIN = [(2, 1), (4, 2), (1, 1), (3, 0), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_half_and_twice_the_ranks_continue_as_one_rank_does(kind, tmp_path):
    (wanted,) = run_ranks(alone, 1, kind, 2 * len(CHAIN))
    found = chain(tmp_path, kind, CHAIN)
    assert close(found[0], wanted[0])
    assert found[1]["state"].keys() == wanted[1]["state"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_where_sums_commute_other_stages_continue_with_the_same_bits(kind, tmp_path):
    (tmp_path / "whole").mkdir()
    wanted = chain(tmp_path / "whole", kind, [(2, 0)] * 3)
    found = chain(tmp_path, kind, [(2, 1), (2, 0), (2, 2)])
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    same(found[1], wanted[1])


def shares(rank, world, folder):
    """Return how many elements this rank has in its hands, and those of the whole state."""
    _, model, optimizer = made("adamw", 1)
    train(model, optimizer, [0], rank, world)
    state = model.optimizer_state_dict(optimizer)
    values = [value for values in state["state"].values() for value in values.values()]
    parts = [value.part if isinstance(value, Chunks) else value for value in values]
    save(model, optimizer, folder)
    whole = optimizer.state_dict()["state"].values()
    total = sum(value.numel() for values in whole for value in values.values() if value.dim())
    return sum(part.numel() for part in parts if part.dim()), total


def test_no_rank_holds_more_than_its_share(tmp_path):
    found = run_ranks(shares, 3, str(tmp_path))
    assert sum(own for own, _ in found) == found[0][1]
    assert max(own for own, _ in found) < 0.4 * found[0][1]
    metadata = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    chunks = [len(metadata[f"optimizer.state.{n}.weight.exp_avg"].chunks) for n in ("line", "last")]
    assert max(chunks) > 1
    assert len(list(tmp_path.glob("*.distcp"))) == 3


def with_torch(rank, world, stage, path, ours):
    """Train and save; then load the file, by our function or torch's, under another stage."""
    saves = not Path(path).exists()  # asked before a rank can have begun to save
    module = net()
    model = DistributedDataParallel(module) if stage is None else FastDDP(module, zero=stage)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.AdamW(params, 0.01, amsgrad=True)
    if saves:
        train(model, optimizer, range(2), rank, world)
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in params]

    def capture():
        if ours:
            return model.optimizer_state_dict(optimizer)
        return get_optimizer_state_dict(model, optimizer)

    state = {"optimizer": capture()}
    dist.barrier()
    if saves:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
        if ours:
            model.load_optimizer_state_dict(optimizer, state["optimizer"])
        else:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(params, weights, strict=True))
    whole = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4), rank, world)
    return whole, [p.detach() for p in params]


WAYS = [(None, False), (0, True), (1, True), (1, False), (2, False)]


@pytest.mark.slow
@pytest.mark.parametrize("first", WAYS)
def test_files_and_functions_are_those_of_torch(first, tmp_path):
    path = str(tmp_path / "saved")
    wanted, _ = run_ranks(with_torch, 2, first[0], path, first[1])[0]
    assert float(wanted["state"][0]["step"]) == 2
    weights = None
    for world, (stage, ours) in zip((3, 2, 3, 2, 4), WAYS, strict=True):
        for found, continued in run_ranks(with_torch, world, stage, path, ours):
            same(found, wanted)
            weights = weights or continued
            assert close(continued, weights)


class Outer(optim.Optimizer):
    """An optimizer around another, as libraries have."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def names_in_files(rank, world):
    """Return the names for a compiled module's optimizer, which a library wraps, and which gets a
    group later.
    """
    module = net()
    model = FastDDP(torch.compile(module, backend="eager"), zero=1)
    optimizer = optim.AdamW([module.line.weight, module.scale], 0.01)
    train(model, optimizer, [0], rank, world)
    optimizer.add_param_group({"params": [module.last.weight]})
    ours = model.optimizer_state_dict(Outer(optimizer))
    theirs = get_optimizer_state_dict(model, optimizer)
    assert ours["param_groups"] == theirs["param_groups"]
    model.load_optimizer_state_dict(Outer(optimizer), ours)
    same(get_optimizer_state_dict(model, optimizer), theirs)
    return set(ours["state"]), set(theirs["state"])


def test_names_are_those_of_the_module_itself():
    found = run_ranks(names_in_files, 2)
    assert set().union(*(ours for ours, _ in found)) == {"line.weight", "scale"}
    assert all(theirs == {"line.weight", "scale"} for _, theirs in found)


def few_elements(rank, world, path):
    """Torch's functions where some ranks own nothing, before a step and between two."""
    torch.manual_seed(0)
    model = FastDDP(nn.Linear(3, 2), zero=1)
    optimizer = optim.AdamW(model.parameters())
    results = []
    for _ in range(2):
        _, state = get_state_dict(model, optimizer)
        results.append(float(state["state"]["weight"]["step"]))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    _, state = get_state_dict(model, optimizer, options=options)
    names = sorted(state.get("state", ()))
    save(model, optimizer, path)
    model = FastDDP(nn.Linear(3, 2), zero=1)
    optimizer = optim.AdamW(model.parameters())
    load(model, optimizer, path)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    results.append(float(state["weight"]["step"]))
    return results, len(optimizer.state), names


def test_torch_asks_ranks_that_own_nothing(tmp_path):
    """A rank whose optimizer looks new would make a step, alone, and wait for the others."""
    found = run_ranks(few_elements, 3, str(tmp_path))
    assert [results for results, *_ in found] == [[1.0, 2.0, 3.0]] * 3
    assert [names for *_, names in found] == [["bias", "weight"], [], []]
    assert [size for _, size, _ in found] == [2, 2, 2]  # by parameter, wherever its elements are


def flattened(rank, world):
    _, model, optimizer = made("adamw", 1)
    train(model, optimizer, [0], rank, world)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.line.weight.exp_avg" in state
    before = copy.deepcopy(optimizer.state_dict())
    for values in optimizer.state.values():
        values["exp_avg"].zero_()
    set_optimizer_state_dict(model, optimizer, state, options=options)
    same(optimizer.state_dict(), before)
    return True


def test_torchs_flattened_form_is_loaded():
    """Torch looks up in `optimizer.state` what there is of whole parameters."""
    assert run_ranks(flattened, 2) == [True, True]


def written(rank, world, write):
    _, model, optimizer = made("adamw", 1)
    train(model, optimizer, [0], rank, world)
    found = []
    for wait in (0, 1):  # one rank is ahead, then the other
        for state in optimizer.state.values():
            state["exp_avg"].fill_(wait + 1.0)
        if rank == wait:
            time.sleep(0.5)
        states = copy.deepcopy(optimizer.state_dict())["state"].values()
        found.append({float(v) for state in states for v in state["exp_avg"].flatten()})
        write(optimizer)
    assert found == [{1.0}, {2.0}]
    train(model, optimizer, [1], rank, world)
    return True


def fills(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].fill_(7.0)


def fills_at_once(optimizer):
    torch._foreach_add_([state["exp_avg"] for state in optimizer.state.values()], 1.0)


def assigns(optimizer):
    for param, state in optimizer.state.items():
        state["exp_avg"] = torch.full_like(param, 7.0)


def copies(optimizer):
    for param, state in optimizer.state.items():
        state["exp_avg"].copy_(torch.full_like(param, 7.0))


def removes(optimizer):
    for param, state in list(optimizer.state.items()):
        values = dict(state)
        del optimizer.state[param]
        optimizer.state[param] = values


@pytest.mark.slow(
    but=(
        "copies",
        "assigns",
    )
)
@pytest.mark.parametrize("write", [fills, fills_at_once, assigns, copies, removes])
def test_what_is_written_after_a_save_is_not_in_that_of_a_later_rank(write):
    assert run_ranks(written, 2, write) == [True, True]
