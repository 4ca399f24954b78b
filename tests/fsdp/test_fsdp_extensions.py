"""Tensor subclasses that take part in gathers (fsdp_pre_all_gather), beside torch's FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from fastsync import FastDDP, fully_shard
from fastsync._torch import local_of
from fastsync.faults.consensus import RankMismatchError
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import apply, farthest, loss_of, mesh_of, net, whole, words
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import by_shares


class Wrapped(torch.Tensor):
    """Another tensor, in a class of its own."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        bare = lambda t: t.data_inside  # noqa: E731
        args, kwargs = pytree.tree_map_only(cls, bare, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["data_inside"])


class Coded(Wrapped):
    """Gathered as codes of int8 and each rank's scale."""

    log: list

    def _codes(self):
        scale = self.data_inside.abs().max()
        codes = (self.data_inside / scale * 127).round().to(torch.int8)
        return (codes, scale), {"rank": dist.get_rank()}

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        owner = type(module).__name__, tuple(self.shape)
        self.log.append(("pre", tuple(outer_size), outer_stride, mp_policy, *owner))
        self.log.append((mesh.ndim, mesh.size()))
        return self._codes()

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        codes, scales = outputs
        kinds = [(t.dtype, tuple(t.shape)) for t in outputs]
        self.log.append(("post", kinds, metadata, dtype, None if out is None else out.dtype))
        values = codes.unflatten(0, (len(scales), -1)) * (scales / 127).view(-1, 1, 1)
        values = values.flatten(0, 1).to(dtype)
        if out is None:
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values)
        return None


class Old(Coded):
    """With the signature of former versions, which say nothing of sizes."""

    def fsdp_pre_all_gather(self, mesh):
        self.log.append(("pre", mesh.ndim, mesh.size()))
        return self._codes()


class Short(Wrapped):
    """Gathered as float16, in shares that may be uneven."""

    log: list

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        owner = type(module).__name__
        self.log.append(("pre", tuple(outer_size), outer_stride, owner, tuple(self.shape)))
        rows = -(-outer_size[0] // mesh.size())
        data = self.data_inside.new_zeros(rows, *outer_size[1:], dtype=torch.float16)
        data[: len(self)] = self.data_inside
        return (data,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        self.log.append(("post", [tuple(t.shape) for t in outputs], dtype, out is None))
        if out is None:
            values = outputs[0].to(dtype)
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0][: out.shape[0]])
        return None


def wrapped(model, kind):
    """Matrices of `model` become `kind`: all of them, or those that are cut evenly."""
    kind.log = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and (kind is Short or module.out_features == 52):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def steps(model, rank, count=3, kept=False):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(count):
        if kept:
            model.set_requires_gradient_sync(False)
            loss_of(model, words(rank + 7, step)).backward()
            model.set_requires_gradient_sync(True)
        loss_of(model, words(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


LOWER = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
RUNS = {
    "resharded": (2, Coded, {"reshard_after_forward": True}, {}),
    "kept": (2, Coded, {"reshard_after_forward": False}, {}),
    "uneven": (3, Short, {}, {}),
    "lower": (2, Coded, {"mp_policy": LOWER}, {}),
    "replicas": (4, Short, {}, {"rows": 2}),
    "accumulated": (2, Short, {"mp_policy": LOWER}, {"kept": True}),
    "former signature": (2, Old, {}, {}),
}


def both(rank, world, kind, options, rows=None, kept=False):
    found = []
    for shard in (fully_shard, torchs):
        model = apply(shard, wrapped(net(), kind), mesh=mesh_of(world, rows), **options)
        weights = steps(model, rank, kept=kept)
        types = {type(local_of(p)) for n, p in model.named_parameters() if "up.weight" in n}
        found.append((weights, kind.log, types))
    (ours, log, types), (theirs, their_log, their_types) = found
    return farthest(ours, theirs), log == their_log, len(log), types == their_types == {kind}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_weights_and_calls_are_those_of_fsdp2(run):
    world, kind, options, more = RUNS[run]
    found = run_ranks(both, world, kind, options, more.get("rows"), more.get("kept", False))
    for apart, same_calls, calls, same_types in found:
        assert apart <= 2e-6
        assert same_types
        assert calls > 0
        assert same_calls


def to_half(self, mesh, outer_size, outer_stride, module, mp_policy):
    return (self.to(torch.float16),), None


def from_half(self, outputs, metadata, dtype, *, out=None):
    (values,) = outputs
    if out is None:
        made = values.to(dtype)
        return made, (made,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        into = local_of(out) if isinstance(out, DTensor) else out
        into.copy_(values.view(into.shape))  # where FSDP2 cuts columns, it shows them as more rows
    return None


def install(model, pre=to_half, post=from_half, name="up.weight"):
    """Give extensions to local tensors that are plain."""
    for each, param in model.named_parameters():
        if name in each:
            local = local_of(param)
            local.fsdp_pre_all_gather = pre.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)
    return model


def patched(rank, world, meta, dim):
    found = []
    for shard in (fully_shard, torchs):
        with torch.device("meta" if meta else "cpu"):
            model = net(width=18 if dim else 17)
        cut = lambda p: Shard(dim) if p.ndim == 2 and len(p) > 40 else None  # noqa: E731
        apply(shard, model, shard_placement_fn=cut)
        if meta:
            model.to_empty(device="cpu")
            for param in model.parameters():
                torch.manual_seed(param.numel())
                nn.init.trunc_normal_(param, std=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        install(model)
        for step in range(3):
            loss_of(model, words(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model.parameters()))
        if shard is fully_shard:
            units = state_of(model).context.units()
            kinds = [sorted(type(s).__name__ for s in unit.dtype_shards) for unit in units]
    half = found[0][1] - found[0][1].half()
    return farthest(*found), kinds, float(half.abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_extension_may_come_after_fully_shard(meta, dim):
    for apart, kinds, is_exact in run_ranks(patched, 2, meta, dim):
        assert apart <= 2e-6
        assert kinds == [["DtypeShard"], *[["DtypeShard", "ExtensionShard"]] * 3]
        assert is_exact, "optimizers step on what was not rounded"


def memory(rank, world):
    """Measure whole members: what lies in storages that the extension named."""
    model = apply(fully_shard, wrapped(net(), Coded))
    sizes = []

    def look(*unused):
        units = state_of(model).context.units()
        dtype_shards = [
            s for unit in units for s in unit.dtype_shards if type(s).__name__[0] == "E"
        ]
        wholes = [m.unsharded for s in dtype_shards for m in s.params if m.unsharded is not None]
        sizes.append([w.untyped_storage().nbytes() > 0 for w in wholes])

    for step in range(2):
        if step == 1:
            model.blocks[2].down.register_forward_hook(look)
        loss = loss_of(model, words(rank, step))
        look()
        loss.backward()
        look()
    return sizes


@pytest.mark.slow
def test_what_was_gathered_by_an_extension_goes():
    for sizes in run_ranks(memory, 2):
        first, after, inside, second, last = sizes
        assert first == after == second == last == [False] * 3
        assert inside == [False, False, True], "while its module computes alone"


def without(rank, world):
    """A wrapper without an extension is gathered as what it holds, and stays a wrapper."""
    ours = apply(fully_shard, wrapped(net(), type("Bare", (Wrapped,), {})))
    plain = apply(fully_shard, net())
    found = [steps(model, rank) for model in (ours, plain)]
    kind = type(local_of(ours.blocks[0].up.weight)).__name__
    return kind, farthest(*found)


@pytest.mark.slow
def test_a_wrapper_without_an_extension():
    assert run_ranks(without, 2) == [("Bare", 0.0)] * 2


def loaded(rank, world):
    model, other = (apply(fully_shard, wrapped(net(), Coded)) for _ in range(2))
    before = steps(model, rank)
    steps(other, rank, 1)
    other.load_state_dict(model.state_dict())
    same = farthest(whole(other.parameters()), before)
    with torch.no_grad():
        outputs = [each(words(rank, 9)) for each in (model, other)]
    return same, farthest(outputs[:1], outputs[1:])


@pytest.mark.slow
def test_state_dicts_with_extensions():
    assert run_ranks(loaded, 2) == [(0.0, 0.0)] * 2


def frozen(rank, world):
    model = wrapped(net(), Coded)
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    apply(fully_shard, model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, 0.1)
    loss_of(model, words(rank, 0)).backward()
    none = all(block.up.weight.grad is None for block in model.blocks)
    optimizer.step()
    return none, whole(model.parameters()), all(p.grad is not None for p in params)


def test_frozen_members_with_extensions():
    (none, weights, others), (_, theirs, _) = run_ranks(frozen, 2)
    assert none
    assert others
    assert farthest(weights, theirs) == 0


def beside_tensor_parallelism(rank, world):
    found = []
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shard in (fully_shard, torchs):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["tp"], [Shard(0)]))
        install(shard(layer, mesh=mesh["dp"]), name="weight")
        optimizer = torch.optim.AdamW(layer.parameters(), 0.01)
        for step in range(3):
            inp = distribute_tensor(torch.full((2, 8), 1.0 + step), mesh["tp"], [Replicate()])
            layer(inp).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([layer.weight.full_tensor().detach()])
    return farthest(*found)


@pytest.mark.slow
def test_extensions_beside_tensor_parallelism():
    assert max(run_ranks(beside_tensor_parallelism, 4)) <= 2e-6


def by_fast_ddp(rank, world):
    model, plain = wrapped(net(), Coded), wrapped(net(), Coded)
    found = [
        steps(FastDDP(model, zero=3), rank),
        steps(apply(torchs, plain, mesh=mesh_of(world)), rank),
    ]
    return farthest(*found)


@pytest.mark.slow
def test_zero3_with_extensions():
    assert max(run_ranks(by_fast_ddp, 2)) <= 2e-6


def unused_by_one(rank, world):
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(4, 52), nn.Linear(52, 4)), Coded)
    fully_shard(model)
    out = model[0](torch.ones(1, 4)) if rank == 9 else None
    del out
    model.forward = lambda x: model[0](x).sum() if rank == 0 else (x * 0 + 1).sum().requires_grad_()
    model(torch.ones(1, 4)).backward()
    return model[0].weight.grad.full_tensor(), model[1].weight.grad is None


@pytest.mark.slow
def test_members_that_one_rank_does_not_use():
    for grad, none in run_ranks(unused_by_one, 2):
        assert torch.equal(grad, torch.full((52, 4), 0.5))
        assert none


class Half(Wrapped):
    def fsdp_pre_all_gather(self, mesh):
        return (self.data_inside,), None


class Many(Half):
    def fsdp_pre_all_gather(self, mesh, size):
        return (self.data_inside,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


class Unpadded(Many):
    def fsdp_pre_all_gather(self, mesh):
        return (self.data_inside,), None


class Failing(Many):
    def fsdp_pre_all_gather(self, mesh):
        if dist.get_rank() == 1:
            raise KeyError("no scale")
        return (self.data_inside,), None


class Forgetful(Many):
    def fsdp_pre_all_gather(self, mesh):
        return (self.data_inside,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return None


class Changing(Unpadded):
    asked = 0

    def fsdp_pre_all_gather(self, mesh):
        type(self).asked += 1
        kind = torch.float32 if self.asked == 1 else torch.float16
        return (self.data_inside.to(kind),), None


def one(kind, rows=4):
    layer = nn.Linear(2, rows, bias=False)
    layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return layer


def refused(rank, world):
    inp = torch.ones(1, 2)
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
        fully_shard(one(Half))
    with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather of parameter 'weight'"):
        fully_shard(one(Many))(inp)
    with pytest.raises(RankMismatchError, match=r"rank 1 differs .*has to pad them to \(3, 2\)"):
        fully_shard(one(Unpadded, 5))(inp)
    kind, text = (
        (RankMismatchError, "rank 1: KeyError: 'no scale'") if rank == 0 else (KeyError, "")
    )
    with pytest.raises(kind, match=text):
        fully_shard(one(Failing))(inp)
    with pytest.raises(AssertionError, match=r"fsdp_post_all_gather\(\) of parameter 'weight'"):
        fully_shard(one(Forgetful))(inp)
    changing = fully_shard(one(Changing))
    changing(inp)
    changing.reshard()
    with pytest.raises(RuntimeError, match=r"gave torch.float32 of sizes \(2, 2\) .*torch.float16"):
        changing(inp)
    for plain in (nn.Linear(2, 4), one(Wrapped)):
        late = fully_shard(plain)
        late(inp)
        late.reshard()
        install(late, name="weight")
        with pytest.raises(RuntimeError, match=r"'weight'.*first"):
            late(inp)


@pytest.mark.slow
def test_what_is_wrong_with_extensions():
    run_ranks(refused, 2)


# --- Members with extensions beside coded wires: what of them travels as a code, and what does not


class Pair(nn.Module):
    """A matrix with an extension beside one without; remembers the weights it computes with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(17, 52, bias=False), nn.Linear(52, 18, bias=False)

    def forward(self, x):
        self.seen = [w.detach().clone() for w in (self.up.weight, self.down.weight)]
        return self.down(self.up(x).relu()).square().sum()


def beside_wires(rank, world, options, kind=Coded):
    """Whole weights that were computed with, gradients, and the exact ones before the step.

    Args:
        kind: of the first one; None: it gets an extension after fully_shard(), as fp16.
    """
    model = Pair() if kind is None else wrapped(Pair(), kind)
    exact = whole(Pair().parameters())
    fully_shard(model, mesh=mesh_of(world), **options)
    if kind is None:
        install(model)
    model(torch.ones(2, 17) * (rank + 1)).backward()
    kept = whole(p.data for p in model.parameters())
    return model.seen, whole(p.grad for p in model.parameters()), farthest(kept, exact)


@pytest.mark.parametrize("kind", [Coded, None])
def test_an_extension_says_what_travels_whatever_the_wires(kind):
    exact = whole(Pair().parameters())
    plain = run_ranks(beside_wires, 2, {}, kind)
    coded = run_ranks(beside_wires, 2, {"parameter_wire": "int8"}, kind)
    for (seen, _, _), (ours, _, kept) in zip(plain, coded, strict=True):
        assert torch.equal(ours[0], seen[0]), "as the extension says"
        assert not torch.equal(ours[0], exact[0])
        assert torch.equal(seen[1], exact[1])
        assert torch.equal(ours[1], by_shares(exact[1], "int8", 2))
        assert kept == 0


@pytest.mark.parametrize(("kind", "world"), [(Coded, 2), (Short, 3), (None, 2)])
def test_gradients_of_extended_members_travel_as_codes(kind, world):
    found = {}
    for wire in ("fp32", "int8"):
        found[wire] = run_ranks(beside_wires, world, {"wire": wire}, kind)
    for (_, exact, _), (_, coded, _) in zip(found["fp32"], found["int8"], strict=True):
        for ours, wanted in zip(coded, exact, strict=True):
            apart = (ours - wanted).abs().max() / wanted.abs().max()
            assert 0 < apart < 0.02


class Column(nn.Module):
    """One matrix whose gradient is this rank's input: what is sent is known."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 6, bias=False)

    def forward(self, x):
        return self.layer(x).sum()


def known_gradients(rank, world):
    model = wrapped(Column(), Short)
    fully_shard(model, mesh=mesh_of(world), wire="int8")
    model(row(rank)).backward()
    return whole(p.grad for p in model.parameters())[0]


def row(rank):
    return torch.randn(1, 40, generator=torch.Generator().manual_seed(rank))


def test_each_rank_codes_its_own_gradient_for_each_share():
    """Scaled first, then rounded block by block, and added up in the order of the ranks."""
    sent = [by_shares(row(rank).repeat(6, 1) / 2, "int8", 2) for rank in range(2)]
    for found in run_ranks(known_gradients, 2):
        assert torch.equal(found, sent[0] + sent[1])
