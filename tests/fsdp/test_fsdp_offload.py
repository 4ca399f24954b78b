"""CPUOffloadPolicy: the bits of training without it, by copies that the host waits for.

Units compute on the CPU here, and stage their shares all the same: CopyAlways. What a GPU adds is
in tests/gpu/test_cuda_offload.py.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from fastsync import RankMismatchError, fully_shard
from fastsync._torch import local_of, set_local
from fastsync.fsdp import cpu_offload
from fastsync.fsdp.cpu_offload import CopyAlways, Offload, staging_of
from fastsync.fsdp.module_hooks import state_of
from fastsync.testing import RankError
from tests.fsdp.fsdp_models import OPTIMIZERS, apply, loss_of, mesh_of, net, train, whole, words
from tests.helpers.teams import run_ranks

LOWER = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
POLICIES = (None, CopyAlways(), CopyAlways(pin_memory=False))


def dtype_shards_of(model):
    return [
        dtype_shard for unit in state_of(model).context.units() for dtype_shard in unit.dtype_shards
    ]


def frozen():
    """Freeze half of the model, and add int8 codes that are not trained."""
    model = net()
    for block in model.blocks:
        block.up.requires_grad_(False)
        codes = torch.arange(7, dtype=torch.int8)
        block.codes = nn.Parameter(codes, requires_grad=False)
        block.register_forward_pre_hook(lambda b, args: (args[0] + b.codes.float().mean(),))
    return model


MODELS = {"": net, "frozen": frozen, "bf16": lambda: net().bfloat16()}
CODED = {"wire": "int8", "parameter_wire": "int8"}
# By the number of ranks, the model, the optimizer, the way of accumulation, rows, and options.
RUNS = {
    "momentum": (2, "", "sgd", "", None, {}),
    "adamw": (2, "", "adamw", "", None, {}),
    "three": (3, "", "adamw", "each", None, {}),
    "alone": (1, "", "adamw", "each", None, {}),
    "synced each time": (2, "", "sgd", "each", None, {}),
    "synced once": (2, "", "adamw", "once", None, {"mp_policy": LOWER}),
    "summed once": (4, "", "adamw", "summed", 2, {}),
    "frozen": (2, "frozen", "adamw", "each", None, {}),
    "lower": (2, "", "adamw", "each", None, {"mp_policy": LOWER}),
    "lower shares": (2, "bf16", "sgd", "each", None, {}),
    "replicas": (4, "", "adamw", "", 2, {}),
    "kept": (2, "", "adamw", "", None, {"reshard_after_forward": False}),
    "resharded": (2, "", "adamw", "", None, {"reshard_after_forward": True}),
    "kept by few": (4, "", "adamw", "", None, {"reshard_after_forward": 2}),
    "codes": (2, "", "adamw", "each", None, CODED),
}


def switch(model, how, last):
    if how == "once":
        model.set_requires_gradient_sync(last)
    elif how == "summed":
        model.set_requires_all_reduce(last)


def steps_of(model, rank, make, how):
    """Gradients of each step, the weights after it, and what the optimizer keeps."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = OPTIMIZERS[make](trained)
    found = []
    for step in range(3):
        batches = 3 if how else 1
        for micro in range(batches):
            switch(model, how, last=micro == batches - 1)
            loss_of(model, words(rank, 10 * step + micro)).backward()
        found += [local_of(p.grad).clone() for p in trained]
        found.append(local_of(nn.utils.clip_grad_norm_(trained, 0.5)).clone())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(model(words(rank, step)))
        model.train()
    kept = [v for state in optimizer.state.values() for v in state.values()]
    return [*found, *whole(model.parameters()), *(local_of(v) for v in kept if v.ndim)]


def with_each_policy(rank, world, model, make, how, rows, options):
    """Return whether shares are copied, whether that leaves memory behind, and what comes out of
    it.
    """
    results = []
    for policy in POLICIES:
        shared = {"mesh": mesh_of(world, rows), "offload_policy": policy, **options}
        made = apply(fully_shard, MODELS[model](), **shared)
        found = steps_of(made, rank, make, how)
        dtype_shards = dtype_shards_of(made)
        sources = [dtype_shard.staging.source for dtype_shard in dtype_shards]
        apart = [
            s.data_ptr() != t.shard.data_ptr() for s, t in zip(sources, dtype_shards, strict=True)
        ]
        left = sum(s.untyped_storage().nbytes() for s in sources if policy is not None)
        results.append((all(apart), left, found))
    return results


def same(one, other):
    pairs = list(zip(one, other, strict=True))
    return len(pairs) > 10 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow(but=("adamw", "codes"))
@pytest.mark.parametrize("run", RUNS)
def test_bits_are_those_without_a_policy(run):
    world, *given = RUNS[run]
    for plain, *copied in run_ranks(with_each_policy, world, *given):
        assert not plain[0]
        for apart, left, found in copied:
            assert (apart, left) == (True, 0)
            assert same(found, plain[2])


def on_the_cpu(rank, world):
    model = apply(fully_shard, net(), offload_policy=CPUOffloadPolicy(pin_memory=True))
    train(model, rank, OPTIMIZERS["sgd"](model.parameters()), steps=1)
    return [dtype_shard.staging.copies for dtype_shard in dtype_shards_of(model)]


def test_nothing_is_copied_where_units_compute_on_the_cpu():
    assert run_ranks(on_the_cpu, 2) == [[False] * 4] * 2


# --- state dicts, and parameters without memory


def made(policy):
    model = apply(fully_shard, net(), offload_policy=policy)
    return model, OPTIMIZERS["adamw"](model.parameters())


def through_a_file(rank, world, folder):
    """Weights after two steps that follow what was saved, without a file and through one."""
    results = []
    for number, (writes, reads) in enumerate([POLICIES[:2], POLICIES[1::-1]]):
        place = f"{folder}/{number}"
        model, optimizer = made(writes)
        train(model, rank, optimizer, steps=2)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=place)
        results.append(train(model, rank, optimizer, steps=2)[0])
        model, optimizer = made(reads)
        weights, states = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": states}
        dcp.load(loaded, checkpoint_id=place)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"]
        )
        results.append(train(model, rank, optimizer, steps=2)[0])
    return results


def test_files_are_those_without_a_policy(tmp_path):
    for wanted, *others in run_ranks(through_a_file, 2, tmp_path):
        assert len(others) == 3 and all(same(found, wanted) for found in others)


def loaded(rank, world):
    """Whole weights, from state dicts of ours that are loaded between two steps."""
    results = []
    for policy in POLICIES[:2]:
        model, optimizer = made(policy)
        train(model, rank, optimizer, steps=1)
        doubled = {name: 2 * value for name, value in model.state_dict().items()}
        model.load_state_dict(doubled, assign=policy is not None)
        train(model, rank, OPTIMIZERS["sgd"](model.parameters()), steps=1)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        results.append(list(full.values()))
    return results


def test_loaded_shares_are_what_is_copied():
    for plain, copied in run_ranks(loaded, 2):
        assert same(copied, plain)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5)))

    def forward(self, x):
        return self.layers(x)


def from_meta(rank, world):
    results = []
    for policy in POLICIES[:2]:
        with torch.device("meta"):
            model = Narrow()
        for layer in model.layers:
            fully_shard(layer, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        model.to_empty(device="cpu")
        torch.manual_seed(rank)
        for layer in model.layers:
            layer.reset_parameters()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for step in range(3):
            model(torch.full((2, 9), float(step + rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*whole(model.parameters()), *map(local_of, model.parameters())])
    return results


def test_parameters_that_get_their_memory_late():
    for plain, copied in run_ranks(from_meta, 2):
        assert same(copied, plain)


# --- a device that is late: what the host may read, and write to, at what time


class Lane:
    """A stream: the copies in it that are late, tensors that it may be reading, and its waits."""

    def __init__(self, device=None):
        self.late, self.read, self.waits = [], [], []

    def wait_stream(self, other):
        self.waits.append(other)

    def wait_event(self, event):
        self.waits.append(event.stream)


class Event:
    """Event that completes what comes before it in its stream once the host has waited."""

    stream = None

    def record(self, stream):
        self.stream, self.before = stream, len(stream.read)

    def synchronize(self):
        if self.stream is not None:
            for to, values in self.stream.late:
                to.copy_(values)
            self.stream.late = []
            del self.stream.read[: self.before]


class Copies(TorchDispatchMode):
    """Copies of a stream; `late`: they are NaN until a wait."""

    def __init__(self, stream, late):
        super().__init__()
        self.stream, self.late = stream, late

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.stream.read.append(args[1])
            if self.late:
                self.stream.late.append(args[:2])
                return args[0].fill_(torch.nan)
        return func(*args, **(kwargs or {}))


class Device:
    """In the place of torch.cpu."""

    Event, Stream = Event, Lane

    def __init__(self):
        self.main, self.out, self.back = Lane(), Lane(), Lane()

    def current_stream(self, device):
        return self.main

    def stream(self, stream):
        return Copies(stream, late=stream is self.back)


@contextmanager
def late_device():
    device = Device()
    streams = cpu_offload._Streams(torch.device("cpu"), device, device.out, device.back)
    with mock.patch.object(cpu_offload, "_streams_of", lambda _: streams):
        yield device


def seen_by_hooks(model):
    seen = []
    for param in model.blocks[1].parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(local_of(p.grad).clone()))
    return seen


def on_a_late_device(rank, world, how, rows):
    """Return results with and without it, and tensors still read where they may be written."""
    results, read = [], []
    for policy in POLICIES[:2]:
        with late_device() as device:
            model = apply(fully_shard, net(), mesh=mesh_of(world, rows), offload_policy=policy)
            seen = seen_by_hooks(model)
            model.register_forward_hook(lambda *_, d=device: read.append(len(d.out.read)))
            found = steps_of(model, rank, "adamw", how)
            read.append(len(device.out.read))
            copies = len(device.main.waits)
        results.append((copies, [*found, *seen]))
    return results, read


@pytest.mark.slow(but=("each-None",))
@pytest.mark.parametrize(("how", "rows"), [("", None), ("each", None), ("once", None), ("", 2)])
def test_the_host_waits_before_it_reads(how, rows):
    for ((_, plain), (copies, copied)), _ in run_ranks(on_a_late_device, 2, how, rows):
        assert copies > 0
        assert same(copied, plain)


def order_of_hooks(rank, world):
    """Return what runs in a backward, one after the other."""
    model = apply(fully_shard, net(), offload_policy=CopyAlways())
    order = []
    model.blocks[2].gain.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    model.blocks[0].register_full_backward_hook(lambda *_: order.append("block"))
    loss_of(model, words(rank, 0)).backward()
    return order


def test_hooks_get_gradients_while_backward_goes_on():
    assert run_ranks(order_of_hooks, 2) == [["gradient", "block"]] * 2


def test_nobody_reads_shares_that_may_be_written_to():
    for _, read in run_ranks(on_a_late_device, 2, "", None):
        assert len(read) > 10 and set(read) == {0}


def read_by_one_unit(rank, world):
    """Return whether its shares are read where they may be written, and in between."""
    with late_device() as device:
        model = fully_shard(net(), offload_policy=CopyAlways())
        loss = loss_of(model, words(rank, 0))
        read = [len(device.out.read)]
        loss.backward()
        read.append(len(device.out.read))
        handle = model.unshard(async_op=True)
        between = len(device.out.read)
        handle.wait()
        read.append(len(device.out.read))
        model.reshard()
        model.unshard(async_op=True)
        model.reshard()
        return [*read, len(device.out.read)], between


def test_one_unit_is_not_read_between_steps():
    assert run_ranks(read_by_one_unit, 2) == [([0, 0, 0, 0], 1)] * 2


def test_streams_wait_for_each_other():
    with late_device() as device:
        shard = torch.arange(6.0)
        stage = staging_of(shard, torch.device("cpu"), Offload(pinned=False))
        with stage.sending():
            assert device.out.waits == [device.main]
            assert torch.equal(stage.source, shard) and not device.main.waits
        with stage.sending():  # it is under way
            assert device.out.waits == [device.main]
        stage.arrived()
        assert device.main.waits == [device.out]
        stage.bring(shard)
        assert device.back.waits == [device.main]


# --- errors


def moved(rank, world):
    """Shares on another device than the CPU, which only pretends to exist."""
    model = apply(fully_shard, net(), offload_policy=CopyAlways())
    loss_of(model, words(rank, 0))
    dtype_shard = dtype_shards_of(model)[1]
    with torch._subclasses.FakeTensorMode():
        set_local(dtype_shard.params[0].sharded, torch.empty(3, device="cuda"))
    model.reshard()
    dtype_shard.check_memory()


def test_parameters_that_were_moved_are_named():
    with pytest.raises(RankError, match=r"materialized on CPU.*\['blocks\.0\.norm\.weight'\]"):
        run_ranks(moved, 2)


def different(rank, world):
    policy = CopyAlways() if rank else None
    loss_of(apply(fully_shard, net(), offload_policy=policy), words(rank, 0))


def test_ranks_that_differ():
    with pytest.raises((RankError, RankMismatchError), match="offload_policy of unit 0"):
        run_ranks(different, 2)
