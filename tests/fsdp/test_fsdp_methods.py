"""FSDPModule's methods, groups, other cuts and dtypes, and what fully_shard() refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fastsync import FSDPModule, fully_shard, register_fsdp_forward_method
from fastsync.fsdp.module_hooks import state_of
from fastsync.testing import count_dispatched_ops
from tests.fsdp.fsdp_models import (
    OPTIMIZERS,
    Block,
    apply,
    farthest,
    loss_of,
    mesh_of,
    net,
    train_alone,
    whole,
    words,
)
from tests.helpers.teams import run_ranks


def seen(rank, world):
    model = apply(fully_shard, net())
    with CommDebugMode() as mode:
        loss_of(model, words(rank, 0)).backward()
    return mode.get_total_counts()


def test_what_counts_collectives_does_not_see_ranks_connect():
    """Gathers and reductions do not pass the dispatcher, where it looks."""
    assert run_ranks(seen, 2) == [0, 0]


def divided(rank, world):
    model = apply(fully_shard, net())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    seen = []
    model.set_all_reduce_hook(lambda sums: seen.append(sums.numel()))
    loss_of(model, words(rank, 0)).backward()
    return [p.grad.full_tensor() for p in model.parameters()], seen


def test_another_divisor_and_a_hook():
    model = net()
    for rank in range(2):
        loss_of(model, words(rank, 0)).backward()
    for found, seen in run_ranks(divided, 2):
        assert farthest(found, [p.grad for p in model.parameters()]) <= 1e-6
        assert len(seen) == 1


class Twofold(nn.Module):
    """A head by itself, called by chunks, and a method besides forward."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = Block(), nn.LayerNorm(17), nn.Linear(17, 3)

    def forward(self, x):
        return self.norm(self.body(x))

    def scores(self, x):
        return self.head(self(x))


def by_group(rank, world, kind):
    torch.manual_seed(0)
    model = Twofold()
    if kind != "alone":
        fully_shard(model.body)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        register_fsdp_forward_method(model, "scores")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    ranks = range(2) if kind == "alone" else [rank]
    for step in range(3):
        for each in ranks:
            x = torch.randn(6, 17, generator=torch.Generator().manual_seed(9 * step + each))
            if kind == "chunks":
                hidden = model(x)
                loss = sum(model.head(chunk).square().sum() for chunk in hidden.chunk(3))
            else:
                loss = model.scores(x).square().sum()
            (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["method", "chunks"])
def test_groups_of_modules(kind):
    wanted = by_group(0, 1, "alone")
    for found in run_ranks(by_group, 2, kind):
        assert farthest(found, wanted) <= 1e-5


def of_two_dtypes(rank, world):
    torch.manual_seed(0)
    model = net()
    model.blocks[0].norm.to(torch.float64)
    model.blocks[0].norm.forward = lambda x, n=model.blocks[0].norm: nn.functional.layer_norm(
        x.double(), (17,), n.weight, n.bias
    ).float()
    fully_shard(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        scaler.scale(loss_of(model, words(rank, step))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return whole(model.parameters())


@pytest.mark.slow
def test_two_dtypes_in_a_unit_and_a_scaler():
    wanted = train_alone(2, "sgd", steps=2, clip=None)
    for found in run_ranks(of_two_dtypes, 2):
        assert {p.dtype for p in found} == {torch.float32, torch.float64}
        assert farthest([p.float() for p in found], wanted) <= 1e-5


def fail_while_accumulating(rank, world, says_so):
    """Return the gradients of a step after a micro-batch failed, and those that are wanted."""
    model = apply(fully_shard, net())
    broken = True
    model.blocks[1].register_full_backward_hook(lambda *unused: 1 / 0 if broken else None)
    model.set_requires_gradient_sync(False)
    broken = False
    loss_of(model, words(rank, 0)).backward()
    broken = True
    with pytest.raises(ZeroDivisionError):
        loss_of(model, words(rank, 1)).backward()
    broken = False
    if says_so:
        model.reset_iter_state()
    else:
        with pytest.raises(RuntimeError, match=f"failed on rank {rank}.*reset_iter_state"):
            model(words(rank, 1))
    model.set_requires_gradient_sync(True)
    found = []
    for _ in range(2):
        loss_of(model, words(rank, 2)).backward()
        found.append(whole(p.grad for p in model.parameters()))
        model.zero_grad()
    return farthest(*found)


@pytest.mark.parametrize("says_so", [False, True])
def test_micro_batches_that_a_failed_backward_takes_with_it(says_so):
    """The next step is as if they had never been; a script that does not know is told."""
    assert run_ranks(fail_while_accumulating, 2, says_so) == [0, 0]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def refuse(rank, world):
    def check(kind, text, make, **options):
        with pytest.raises(kind, match=text):
            fully_shard(make(), **options)

    layer = lambda: nn.Linear(3, 3)  # noqa: E731
    scalar = nn.Module()
    scalar.one = nn.Parameter(torch.tensor(1.0))
    twice = fully_shard(layer())
    check(ValueError, "scalar parameters", lambda: scalar)
    check(ValueError, "already been applied to this FSDPLinear", lambda: twice)
    check(AssertionError, "already been applied to this FSDPLinear", lambda: twice)
    check(ValueError, "containers that do not implement forward", nn.ModuleList)
    check(ValueError, "factor of 2, not 3", layer, reshard_after_forward=3)
    check(ValueError, "bool or an int", layer, reshard_after_forward="no")
    check(ValueError, "Invalid shard_placement_fn result", layer, shard_placement_fn=lambda p: 1)
    check(
        NotImplementedError,
        "uneven sharding on dim 1",
        layer,
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None,
    )
    check(NotImplementedError, "'waves' is torch.complex64 and requires", Complex)
    check(NotImplementedError, "DTensor already", lambda: torchs(layer()))
    check(
        NotImplementedError,
        "non-contiguous",
        lambda: nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
    )
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        twice.set_modules_to_forward_prefetch([layer()])
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(twice)
    with pytest.raises(TypeError, match="must be an int"):
        twice.set_reduce_scatter_max_input_buffers(True)
    inner = fully_shard(nn.Sequential(fully_shard(layer())))
    inner[0](torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="already been lazily initialized"):
        inner(torch.ones(1, 3))
    assert type(inner[:1]) is nn.Sequential


def test_what_is_refused():
    run_ranks(refuse, 2)


def ignored(rank, world):
    model = net()
    left = {model.blocks[0].gain}
    apply(fully_shard, model, ignored_params=left)
    loss_of(model, words(rank, 0)).backward()
    gain = model.blocks[0].gain
    return isinstance(gain, DTensor), float(gain.grad)


def test_ignored_parameters_stay_each_ranks_own():
    (first, one), (second, other) = run_ranks(ignored, 2)
    assert not first and not second
    assert one != other


def costs(rank, world):
    torch.manual_seed(0)
    found = []
    for shard in (None, fully_shard):
        model = net(12) if shard is None else apply(shard, net(12))

        def step(model=model):
            model.zero_grad()
            loss_of(model, words(rank, 0)).backward()

        for _ in range(3):
            step()
        found.append(count_dispatched_ops(step))
    return found


@pytest.mark.slow
def test_a_step_dispatches_few_operations():
    """Asked: no more than 400 beyond twelve layers alone."""
    for alone, sharded in run_ranks(costs, 2):
        assert alone > 1000, "the profiler saw the model"
        assert sharded - alone <= 200


def buffers(rank, world):
    """Set a unit's number of buffers before the first forward: the largest holds for the model."""
    model = apply(fully_shard, net())
    model.blocks[1].set_reduce_scatter_max_input_buffers(3)
    alike = apply(fully_shard, net())
    for each in (model, alike):
        loss_of(each, words(rank, 0)).backward()
    grads = [whole([p.grad for p in each.parameters()]) for each in (model, alike)]
    return state_of(model).context.most_in_flight, farthest(*grads)


@pytest.mark.slow
def test_gradients_of_several_units_in_flight():
    assert run_ranks(buffers, 2) == [(3, 0), (3, 0)]


def told_in_turn(rank, world, at_last):
    model = apply(fully_shard, net())
    model.blocks[1].set_is_last_backward(not at_last)
    model.blocks[0].set_is_last_backward(True)
    model.blocks[2].set_is_last_backward(False)
    model.set_is_last_backward(at_last)
    again = apply(fully_shard, net())
    again.set_is_last_backward(not at_last)
    again.blocks[1].set_is_last_backward(at_last)
    for each in (model, again):
        loss_of(each, words(rank, 0)).backward()
    return [state_of(each).context.last_backward for each in (model, again)]


@pytest.mark.slow
@pytest.mark.parametrize("at_last", [True, False])
def test_what_a_script_said_last_before_the_first_forward_holds(at_last):
    assert run_ranks(told_in_turn, 2, at_last) == [[at_last] * 2] * 2


def gathered_early(rank, world):
    """Return how many gathers the root counts, and whether it knows all links that units have."""
    found = []
    for early in ([], [0], [0, 2]):
        model = apply(fully_shard, net())
        for index in early:
            model.blocks[index].unshard()
            model.blocks[index].reshard()
        loss_of(model, words(rank, 0)).backward()
        context = state_of(model).context
        gathers = sum(counted["gathers"] for counted in context.counters())
        used = [dtype_shard.links for unit in context.units() for dtype_shard in unit.dtype_shards]
        found.append((gathers, all(links in context.all_links() for links in used)))
    return found


@pytest.mark.slow
def test_units_that_were_gathered_before_the_first_forward_are_counted_and_trimmed():
    for found in run_ranks(gathered_early, 2):
        (plain, _), *_ = found
        assert found == [(plain, True), (plain + 1, True), (plain + 2, True)]


def in_another_order(rank, world):
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    units = [fully_shard(layer) for layer in model]
    root = fully_shard(nn.Sequential(*units))
    root(torch.ones(1, 4))
    for index in (0, 1) if rank == 0 else (1, 0):
        units[index].unshard(async_op=True)
    for unit in units:
        unit.reshard()
    return "went on"


@pytest.mark.slow
def test_ranks_that_gather_different_units_never_mix_them():
    """Each unit's messages have a tag of their own, so both orders end well here."""
    assert run_ranks(in_another_order, 2) == ["went on", "went on"]


def refuse_mesh(rank, world):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    fully_shard(nn.Linear(2, 2), mesh=mesh)


@pytest.mark.slow
def test_meshes_are_checked():
    run_ranks(check_meshes, 4)


def check_meshes(rank, world):
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="with mesh_dim_names specified"):
            refuse_mesh(rank, world)
    cube = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2, 1))
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
        fully_shard(nn.Linear(2, 2), mesh=cube)
    fully_shard(nn.Linear(2, 2), mesh=mesh_of(world, 2))
