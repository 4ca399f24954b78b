"""Rank 0 alone calls `optimizer.state_dict()`, as most public scripts do when they save."""

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fastsync
from fastsync.config.arguments import grouped
from fastsync.testing import RankError, run_ranks
from fastsync.zero.slices import whole_states
from fastsync.zero.state_fetch import StateShards
from tests.conformance.stages import STAGES, batch, check, full, loss_of, net

SHARED = ["zero1", "zero1-small", "zero2"]  # the stages that spread an optimizer's state
SAVED = ["zero0", *SHARED]
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "adamw-fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, 0.01),
}


def step_once(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model(batch(rank, step))).backward()
    optimizer.step()


def values_of(state):
    """Return copies of all values in a state, and of the learning rates, by name."""
    found = {
        f"{index}.{name}": torch.as_tensor(value).clone()
        for index, values in state["state"].items()
        for name, value in values.items()
    }
    rates = {f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(state["param_groups"])}
    return {**found, **rates}


def saves(wrap, rank, meanwhile, make="adamw", savers=(0,)):
    """Save on some ranks after a step, while the others do something else; then train on."""
    model = wrap(net())
    optimizer = OPTIMIZERS[make](model.parameters())
    for step in range(3):
        step_once(model, optimizer, rank, step)
    optimizer.param_groups[0]["lr"] = 0.02
    saved = {}
    if meanwhile == "accumulating":
        with model.no_sync():
            loss_of(model(batch(rank, 10))).backward()
    if rank in savers:
        time.sleep(0.1)  # the others are where they wait
        saved = values_of(optimizer.state_dict())
    elif meanwhile == "loading":
        time.sleep(0.3)
    if meanwhile == "barrier":
        dist.barrier()
    for step in range(3, 5):
        step_once(model, optimizer, rank, step)
    return {**full(model), **saved}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SAVED)
@pytest.mark.parametrize("meanwhile", ["barrier", "next step", "loading", "accumulating"])
def test_rank_0_saves_while_others(meanwhile, stage):
    check(partial(saves, meanwhile=meanwhile), stage)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SAVED)
@pytest.mark.parametrize("make", [name for name in OPTIMIZERS if name != "adamw"])
def test_rank_0_saves_the_state_of(make, stage):
    check(partial(saves, meanwhile="next step", make=make), stage)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SAVED)
@pytest.mark.parametrize("savers", [(0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_several_ranks_save_at_once(savers, stage):
    check(partial(saves, meanwhile="next step", savers=savers), stage, world=3)


def all_save_before_a_change(wrap, rank, change):
    """Save on every rank where the next change needs no gradients of a rank that is late."""
    model = wrap(net())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(2):
        step_once(model, optimizer, rank, step)
    optimizer.zero_grad()
    loss_of(model(batch(rank, 2))).backward()
    if rank == 1:
        time.sleep(0.5)
    state = optimizer.state_dict()
    saved = values_of(state)
    if change == "load":
        optimizer.load_state_dict(state)
    optimizer.step()
    step_once(model, optimizer, rank, 3)
    return {**full(model), **saved}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SAVED)
@pytest.mark.parametrize("change", ["step", "load"])
def test_all_ranks_save_before(change, stage):
    """One that is ahead waits for those that still read its state."""
    check(partial(all_save_before_a_change, change=change), stage)


def saves_two(wrap, rank):
    """Two optimizers, and a parameter without gradient."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.unused = net(), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.inner(x)

    model = wrap(net(Unused), find_unused_parameters=True)
    params = list(model.parameters())
    optimizers = [torch.optim.AdamW(params[:4], 0.01), torch.optim.SGD(params[4:], 0.1, 0.9)]
    saved = {}
    for step in range(3):
        for each in optimizers:
            each.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        for each in optimizers:
            each.step()
        if rank == 0:
            for number, each in enumerate(optimizers):
                values = values_of(each.state_dict())
                saved.update({f"{number} {name}": value for name, value in values.items()})
    return {**full(model), **saved}


@pytest.mark.slow(but=("zero2",))
@pytest.mark.parametrize("stage", SHARED)
def test_rank_0_saves_two_optimizers(stage):
    for expected, found in run_ranks(two_ways, 2, stage):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


def two_ways(rank, world, stage):
    """DDP raises where a parameter has no gradient, unless it is told."""
    return [saves_two(STAGES[each], rank) for each in ("zero0", stage)]


class Tables(nn.Module):
    """Embeddings with sparse gradients: the momentum of each is sparse, too."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 3, sparse=True) for _ in range(4))

    def forward(self, x):
        return sum(i * table(x) for i, table in enumerate(self.tables, 1))


def saves_sparse(wrap, rank):
    model = wrap(net(Tables))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(torch.tensor([rank, step, 7]))).backward()
        optimizer.step()
    saved = optimizer.state_dict()["state"] if rank == 0 else {}
    dist.barrier()
    momentum = {str(i): values["momentum_buffer"].to_dense() for i, values in saved.items()}
    return {**full(model), **momentum}


@pytest.mark.slow(but=("zero1",))
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_rank_0_saves_sparse_momentum(stage):
    check(saves_sparse, stage, world=3)


def saves_by_name(wrap, rank):
    """torch's own function, on rank 0 alone."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(2):
        step_once(model, optimizer, rank, step)
    saved = {}
    if rank == 0:
        for name, values in get_optimizer_state_dict(model, optimizer)["state"].items():
            saved.update({f"{name} {key}": value.clone() for key, value in values.items()})
    dist.barrier()
    return saved


@pytest.mark.slow(but=("zero1-small",))
@pytest.mark.parametrize("stage", SAVED)
def test_rank_0_calls_get_optimizer_state_dict(stage):
    check(saves_by_name, stage)


def resumes_by_name(rank, world, stage, options):
    """Rank 0 alone saves `model.optimizer_state_dict()` in a file, from which all resume."""
    module = net()
    model = fastsync.FastDDP(module, **grouped({"zero": stage, **options}))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        step_once(model, optimizer, rank, step)
    for param in module.parameters():
        param.data = param.data.clamp(-1, 1)  # in other memory
    content = [None]
    if rank == 0:
        file = io.BytesIO()
        state = {"model": module.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
        torch.save(state, file)
        content = [file.getvalue()]
    for step in range(3, 5):
        step_once(model, optimizer, rank, step)
    wanted = full(model)
    dist.broadcast_object_list(content)
    saved = torch.load(io.BytesIO(content[0]), weights_only=True)
    other = net(seed=1)
    other.load_state_dict(saved["model"])
    model = fastsync.FastDDP(other, **grouped({"zero": stage, **options}))
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    model.load_optimizer_state_dict(optimizer, saved["optimizer"])
    for step in range(3, 5):
        step_once(model, optimizer, rank, step)
    shapes = {name: tuple(s["exp_avg"].shape) for name, s in saved["optimizer"]["state"].items()}
    return wanted, full(model), shapes


CODED = {"parameter_wire": "int8"}


@pytest.mark.slow(
    but=(
        "0-{}",
        "1-{'parameter_wire': 'int8'}",
    )
)
@pytest.mark.parametrize(
    ("stage", "options"), [(0, {}), (1, {}), (2, {}), (1, CODED), (2, CODED)], ids=str
)
def test_rank_0_saves_by_parameter_name(stage, options):
    for wanted, found, shapes in run_ranks(resumes_by_name, 2, stage, options):
        assert shapes["first.weight"] == (7, 5) and len(shapes) == 6
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Narrow(nn.Module):
    """Parameters of 16 bits, one of them channels-last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(20, 7)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x).flatten(1)))


def both_forms(rank, world, make, options):
    """The bytes of what rank 0 fetches alone, and of what an all-gather of all ranks collects."""
    torch.manual_seed(0)
    module = Narrow()
    model = fastsync.FastDDP(module, **grouped(options))
    optimizer = OPTIMIZERS[make](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step, 4, 3, 4, 4).bfloat16())).backward()
        optimizer.step()
    alone = io.BytesIO()
    if rank == 0:
        torch.save(optimizer.state_dict()["state"], alone)
    dist.barrier()
    sharded = model.reducer.sharded.known()[0][1]
    saved = partial(sharded.saved, optimizer)
    whole = whole_states(sharded.buffers, saved, model.process_group)
    numbers = {id(param): i for i, param in enumerate(module.parameters())}
    gathered = io.BytesIO()
    torch.save({numbers[id(param)]: state for param, state in whole.items()}, gathered)
    return alone.getvalue(), gathered.getvalue()


FORMS = {
    "masters": {"zero": 1, "master_weights": True},
    "coded": {"zero": 1, "parameter_wire": "int8"},
    "narrow": {"zero": 2},
    "tensorwise": {"zero": 1, "shard_by": "tensor"},
}


@pytest.mark.slow(
    but=(
        "adamw-coded",
        "adafactor-narrow",
    )
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", ["adamw", "adafactor"])
def test_the_bytes_are_those_of_an_all_gather(make, form):
    alone, gathered = run_ranks(both_forms, 3, make, FORMS[form])[0]
    assert len(alone) > 3000
    assert alone == gathered


def makes_a_step(optimizer):
    """Make a step for which a rank needs no gradients of the others."""
    optimizer.step()


def resets_the_state(optimizer):
    for values in optimizer.state.values():
        values["momentum_buffer"].zero_()


def goes_on(rank, world, change):
    """Rank 1 changes the state before rank 0 asks for it."""
    model = STAGES["zero1"](net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step_once(model, optimizer, rank, 0)
    text = ""
    if rank == 0:
        time.sleep(0.5)
        with pytest.raises(RuntimeError) as error:
            optimizer.state_dict()
        text = str(error.value)
    change(optimizer)
    return text, len(optimizer.state_dict()["state"])


@pytest.mark.parametrize("change", [makes_a_step, resets_the_state])
def test_a_rank_that_has_gone_on_is_named(change):
    (text, count), _ = run_ranks(goes_on, 2, change)
    assert "rank 0 asks rank 1 for its share of an optimizer's state, but it has gone on" in text
    assert "torch.distributed.barrier()" in text and count == 6


def loads_alone(rank, world):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "1"
    model = STAGES["zero1"](net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step_once(model, optimizer, rank, 0)
    text = ""
    state = optimizer.state_dict()
    if rank == 0:
        optimizer.load_state_dict(state)
        with pytest.raises(RuntimeError) as error:
            optimizer.state_dict()
        text = str(error.value)
    dist.barrier()
    return text


def test_a_rank_that_loads_alone_is_named():
    text, _ = run_ranks(loads_alone, 2)
    assert "rank 1 for its share" in text and "Call step() and load_state_dict() on" in text


def is_late_for_a_change(rank, world, late, folder):
    """Return what this rank prints while one rank is late for the change that follows a save."""
    os.environ["FASTSYNC_STALL_WARN"] = "0.3"
    model = STAGES["zero1"](net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step_once(model, optimizer, rank, 0)
    printed = Path(folder, str(rank))
    with printed.open("w") as file:
        os.dup2(file.fileno(), 2)
    optimizer.state_dict()
    if rank == late:
        time.sleep(3.0)
    optimizer.step()
    dist.barrier()
    return printed.read_text()


@pytest.mark.slow(but=("1-2",))
@pytest.mark.parametrize(("late", "world"), [(0, 2), (1, 2), (1, 3)])
def test_the_rank_that_a_change_waits_for_is_named(late, world, tmp_path):
    for rank, text in enumerate(run_ranks(is_late_for_a_change, world, late, str(tmp_path))):
        said = re.findall(r"fastsync: rank (\d) has waited .* which rank (\d) has not rea", text)
        assert said == ([] if rank == late else [(str(rank), str(late))]), text


def dies_while_serving(rank, world, folder):
    torch.manual_seed(0)
    model = fastsync.FastDDP(nn.Linear(1000, 1000), zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loss_of(model(torch.ones(2, 1000))).backward()
    optimizer.step()
    if rank == 1:
        StateShards.parts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if rank == 0:
        try:
            optimizer.state_dict()
        except Exception as error:
            Path(folder, "error").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)  # nobody is left to leave together with
    time.sleep(5)


def test_a_rank_that_is_killed_while_it_serves_is_named(tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(dies_while_serving, 2, str(tmp_path), grace=8.0)
    text = (tmp_path / "error").read_text()
    # Its launcher may have taken its status before the other rank could read it.
    assert re.search(r"SyncFault: .*rank 1 (was killed by SIGKILL|ended without a word)", text), (
        text
    )


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import fastsync
{imports}

def train(rank):
    torch.manual_seed(0)
    model = fastsync.FastDDP(torch.nn.Linear(300, 300), zero=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 300), 1.0 + rank)).square().mean().backward()
        optimizer.step()
    return model, optimizer

def save(rank, optimizer):
    if rank == 0:
        time.sleep(1.5)  # evaluates
        torch.save(optimizer.state_dict(), sys.argv[1])
        print("saved", flush=True)

def main(rank=int(os.environ.get("RANK", 0))):
    dist.init_process_group("gloo")
    model, optimizer = train(rank)
    save(rank, optimizer)
    {end}

{run}
"""

ENDS = {
    "main": dict(imports="", end="", run="if __name__ == '__main__': main()"),
    "destroys-the-group": dict(
        imports="", end="dist.destroy_process_group()", run="if __name__ == '__main__': main()"
    ),
    "module-level": dict(
        imports="",
        end="",
        run="rank = int(os.environ['RANK'])\ndist.init_process_group('gloo')\n"
        "model, optimizer = train(rank)\nsave(rank, optimizer)",
    ),
    "recorded": dict(
        imports="from torch.distributed.elastic.multiprocessing.errors import record",
        end="",
        run="if __name__ == '__main__': record(main)()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_rank_0_saves_while_the_others_come_to_the_end_of_the_script(end, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(**ENDS[end]))
    file = tmp_path / "file"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script), str(file)]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "saved" in done.stdout, done.stderr
    saved = torch.load(file, weights_only=True)
    assert saved["state"][0]["exp_avg"].shape == (300, 300) and len(saved["state"]) == 2
    assert time.monotonic() - begun < 90
