"""Two sets of parameters of one wrapper, trained in turn, as two optimizers of a GAN train them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fastsync import FastDDP
from tests.helpers.models import differences, grads
from tests.helpers.teams import run_ranks

STEPS = 24  # in which the set changes 15 times
FEW_PLANS = 4  # one for all, one for each set, and one more for the order that was seen


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 8))
        self.critic = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, noise):
        return self.critic(self.generator(noise))


def toggle(module, trained):
    """Toggle as Lightning's `toggle_optimizer` does."""
    for name, part in module.named_children():
        part.requires_grad_(name == trained)


def train(model, rank, set_to_none, alone=None):
    """Yield the module's gradients after each step; `alone`: a rank that freezes one bias."""
    optimizers = {
        name: torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        for name, part in model.module.named_children()
    }
    for step in range(STEPS):
        trained = ("critic", "generator")[step % 3 == 2]
        toggle(model.module, trained)
        if rank == alone:
            model.module.critic[0].bias.requires_grad_(False)
        for optimizer in optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)
        noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(noise).square().mean().backward()
        yield grads(model)
        optimizers[trained].step()


def in_turn(rank, world, set_to_none, options):
    warnings.simplefilter("ignore")
    ours = FastDDP(Gan(), find_unused_parameters=True, **options)
    theirs = DDP(Gan(), find_unused_parameters=True)
    names = list(dict(theirs.module.named_parameters()))
    found = set()
    for mine, wanted in zip(
        train(ours, rank, set_to_none), train(theirs, rank, set_to_none), strict=True
    ):
        used = [n for n in names if wanted[n] is not None and mine[n] is not None]
        found |= {n for n in differences({n: mine[n] for n in used}, {n: wanted[n] for n in used})}
        found |= {
            n for n in names if (mine[n] is None) and wanted[n] is not None and wanted[n].any()
        }
    return sorted(found), ours.sync_stats()["plans"], ours.sync_stats()["steps"]


@pytest.mark.slow(but=("views-True",))
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"]
)
def test_the_bits_of_ddp_with_a_plan_for_each_set(set_to_none, options):
    for found, plans, steps in run_ranks(in_turn, 2, set_to_none, options):
        assert not found
        assert steps == STEPS
        assert plans <= FEW_PLANS


def coded_in_turn(rank, world, wire):
    warnings.simplefilter("ignore")
    model = FastDDP(Gan(), wire=wire)
    for _ in train(model, rank, True):
        state = model.sync_state_dict()
    return model.sync_stats()["plans"], sorted(state["residuals"])


def test_error_feedback_outlives_the_turns():
    for plans, kept in run_ranks(coded_in_turn, 2, "int4"):
        assert plans <= FEW_PLANS
        assert len(kept) == len(list(Gan().parameters()))


def alone(rank, world):
    """Train one parameter less on rank 1 than on the others; no rank gets other bits for that."""
    warnings.simplefilter("ignore")
    model, alike = FastDDP(Gan()), []
    for mine in train(model, rank, True, alone=1):
        rows = [None] * world
        torch.distributed.all_gather_object(rows, mine)
        alike.append(not any(differences(row, rows[0]) for row in rows))
    return all(alike), model.sync_stats()["steps"]


def test_a_rank_that_trains_less_than_the_others():
    assert run_ranks(alone, 3) == [(True, STEPS)] * 3


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def averaged(group, bucket):
    future = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / torch.distributed.get_world_size())


def sparse_under_hook(rank, world):
    found = []
    for wrap in (FastDDP, DDP):
        model = wrap(Words())
        model.register_comm_hook(torch.distributed.group.WORLD, averaged)
        for step in range(3):
            model.zero_grad()
            tokens = torch.tensor([rank, 3 * step + rank, 7])
            model(tokens).square().sum().backward()
        grad = model.module.embed.weight.grad
        found.append((grad.is_sparse, grad.to_dense(), model.module.head.weight.grad.clone()))
    return found


def test_hooks_take_sparse_gradients():
    for ours, theirs in run_ranks(sparse_under_hook, 2):
        assert ours[0] and theirs[0]
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])
