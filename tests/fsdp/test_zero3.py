"""FastDDP(zero=3): scripts of zero=2 as they are, units chosen, optimizers of before, refusals."""

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fastsync import FastDDP, RankMismatchError, Zero
from fastsync.config.arguments import grouped
from fastsync.fsdp.group_choice import choose_units
from fastsync.testing import RankError
from tests.fsdp.fsdp_models import OPTIMIZERS, Net, farthest, loss_of, net, whole, words
from tests.helpers.teams import run_ranks


def script(rank, world, zero, make, early, units=None):
    """Train as any script does; nothing in it depends on `zero`, except that
    weights are collected.
    """
    module = net()
    for param in module.parameters():
        param.data.add_(rank)  # rank 0's count
    decays = lambda p: {"params": p, "weight_decay": 0.01}  # noqa: E731

    def optimizer_of(module):
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        others = [p for p in module.parameters() if p.ndim < 2]
        return OPTIMIZERS[make]([decays(matrices), {"params": others}])

    optimizer = optimizer_of(module) if early else None
    options = {} if units is None else {"units": units}
    model = FastDDP(module, **grouped({"zero": zero, **options}))
    optimizer = optimizer or optimizer_of(model)
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            loss_of(model, words(rank, step)).backward()
        loss_of(model, words(rank, step + 9)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            loss = loss_of(model, words(rank, 20)).item()
        model.train()
    return whole(model.parameters()), loss


@pytest.mark.slow(but=("2-adamw-False",))
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_script_of_zero_2_trains_with_3(world, make, early):
    wanted = run_ranks(script, world, 2, make, early)
    for (found, loss), (theirs, other) in zip(
        run_ranks(script, world, 3, make, early), wanted, strict=True
    ):
        assert farthest(found, theirs) <= 2e-5
        assert loss == pytest.approx(other, rel=1e-4)


def statistics(rank, world, zero):
    """Steps of a model with buffers, some of which ranks with other batches change."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8)
    norm.running_mean.add_(rank)
    model = FastDDP(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 4)), zero=zero)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(batch).square().mean().backward()
        optimizer.step()
    model(batch * 0)  # on rank 0's buffers
    return whole(model.parameters()), [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("world", [2, 3])
def test_buffers_are_those_of_rank_0(world):
    wanted, found = run_ranks(statistics, world, 2), run_ranks(statistics, world, 3)
    for (params, buffers), (theirs, others) in zip(found, wanted, strict=True):
        assert farthest(params, theirs) <= 2e-6
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], buffers, strict=True))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(others, buffers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("units", [["blocks.1"], [nn.Linear], ["blocks.0", nn.LayerNorm]])
def test_units_may_be_said(units):
    (wanted, _), _ = run_ranks(script, 2, 3, "adamw", False)
    for found, _ in run_ranks(script, 2, 3, "adamw", False, units):
        assert farthest(found, wanted) <= 1e-5


def test_repeated_blocks_become_units():
    def named(root, units=None):
        names = {id(m): n for n, m in root.named_modules()}
        chosen = choose_units(root, units)
        return [
            [names[id(m)] for m in (unit if isinstance(unit, list) else [unit])] for unit in chosen
        ]

    large = Net(3, 300)
    assert named(large) == [["blocks.0"], ["blocks.1"], ["blocks.2"]]
    assert named(Net(8, 120)) == [[f"blocks.{i + j}" for j in range(4)] for i in (0, 4)]
    assert named(net()) == []
    # Whose forward also uses the weight of an embedding: both stay with the root.
    positions = nn.ModuleDict({"words": nn.Embedding(999, 300), "places": nn.Embedding(999, 300)})
    assert named(nn.ModuleDict({"embed": positions, "net": large})) == [
        [f"net.blocks.{i}"] for i in range(3)
    ]
    assert named(large, ["blocks.1"]) == [["blocks.1"]]
    with pytest.raises(ValueError, match="'nowhere' is no module of the model"):
        named(large, ["nowhere"])


class Tied(nn.Module):
    """Model with tied weights, as in GPT-2: the embedding of words also makes the output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(3000, 100), nn.Embedding(8, 100)
        self.blocks = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))

    def forward(self, batch):
        x = self.blocks(self.words(batch) + self.places.weight[: batch.shape[1]])
        return nn.functional.linear(x, self.words.weight)


def tied(rank, world, zero):
    model = FastDDP(Tied(), zero=zero)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, words(rank, step)).backward()
        optimizer.step()
    return whole(model.parameters())


def test_a_root_may_compute_with_the_weight_of_an_embedding():
    wanted = run_ranks(tied, 2, 0)
    for found, theirs in zip(run_ranks(tied, 2, 3), wanted, strict=True):
        assert farthest(found, theirs) <= 1e-5


def facts(rank, world):
    module = net()
    early = optim.AdamW(module.parameters())
    model = FastDDP(module, zero=3)
    loss_of(model, words(rank, 0)).backward()
    params = list(model.parameters())
    assert early.param_groups[0]["params"] == params
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in params)
    assert isinstance(model, FastDDP) and isinstance(model, nn.parallel.DistributedDataParallel)
    stats = model.sync_stats()
    assert stats.steps == 1 and stats.sent_bytes > 0
    norm = model.clip_grad_norm_(0.1)
    return float(norm), [type(p).__name__ for p in params], str(stats)


def test_what_a_wrapped_model_shows():
    first, second = run_ranks(facts, 2)
    assert first[0] == second[0] > 0


REFUSED = {
    "wire": {"wire": "topk"},
    "nonfinite": {"nonfinite": "skip"},
    "shard_by": {"shard_by": "tensor"},
    "master_weights": {"master_weights": True},
}


def refuse(rank, world):
    found = {}
    for what, options in REFUSED.items():
        with pytest.raises(ValueError, match=r"zero=3") as error:
            FastDDP(net(), **grouped({"zero": 3, **options}))
        found[what] = str(error.value)
    with pytest.raises(ValueError, match="'scale' has none"):
        module = net()
        module.scale = nn.Parameter(torch.tensor(1.0))
        FastDDP(module, zero=3)
    with pytest.raises(ValueError, match="cannot shard a RecursiveScriptModule"):
        FastDDP(torch.jit.script(nn.Linear(2, 2)), zero=3)
    with pytest.raises(ValueError, match="what zero=3 gathers"):
        FastDDP(net(), zero=Zero(2, units=["blocks.0"]))
    with pytest.raises(ValueError, match="with delay_all_reduce_named_params"):
        module = net()
        delayed = [("blocks.0.gain", module.blocks[0].gain)]
        options = {"param_to_hook_all_reduce": module.blocks[1].gain}
        FastDDP(module, delay_all_reduce_named_params=delayed, **grouped({"zero": 3, **options}))
    model = FastDDP(net(), zero=3)
    with pytest.raises(ValueError, match=r"is a shard of FastDDP\(zero=3\).*keep the wrapper"):
        FastDDP(model.module, zero=3)
    for call in (
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        lambda: model.set_wire("bf16"),
        lambda: model.sync_state_dict(),
        lambda: model.join().__enter__(),
    ):
        with pytest.raises(ValueError):
            call()
    return found


def test_what_cannot_be_combined_is_an_error_on_every_rank():
    first, second = run_ranks(refuse, 2)
    assert first == second


def differ(rank, world):
    FastDDP(net(), zero=3 - rank)


def test_ranks_that_mean_different_stages():
    with pytest.raises(RankError) as error:
        run_ranks(differ, 2)
    assert str(error.value).count(RankMismatchError.__name__) >= 2


def stepped(rank, world):
    module = net()
    optimizer = optim.Adafactor(module.parameters())
    loss_of(module, words(rank, 0)).backward()
    optimizer.step()
    dist.barrier()
    with pytest.raises(ValueError, match=r"keeps .row_var. of shape .* make the optimizer after"):
        FastDDP(module, zero=3)


def test_a_state_that_cannot_be_cut():
    run_ranks(stepped, 2)
