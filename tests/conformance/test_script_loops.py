"""Small relatives of training scripts' loops: DDP's bits at every step, on two ranks.

Each loop is a generator function of a wrapper and a rank. It yields what a step leaves behind: a
dictionary of tensors.
"""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn import functional as F

from tests.helpers.models import ConvNet, Transformer, differences, grads, state, wrap
from tests.helpers.teams import run_ranks

STEPS = 4


def data(rank, step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def net(inside=8, outside=8):
    return nn.Sequential(nn.Linear(inside, 16), nn.ReLU(), nn.Linear(16, outside))


def left(**models):
    """Weights, buffers and gradients of all models."""
    found = {}
    for label, model in models.items():
        plain = getattr(model, "module", model)
        found |= {f"{label}.{name}": value for name, value in state(plain).items()}
        found |= {f"{label}.{name}.grad": value for name, value in grads(plain).items()}
    return found


def sgd(*models):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.05, momentum=0.9)


def nanogpt(wrapped, rank):
    """Accumulates by setting DDP's attribute; autocast; clipping."""
    model = wrapped(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2
            tokens = (data(rank, 10 * step + micro, 2, 6) * 10).long().abs() % 50
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield left(model=model)
        optimizer.zero_grad(set_to_none=True)


def timm(wrapped, rank):
    """A moving average of the bare model's weights; checkpoints saved and read in between."""
    plain = ConvNet()
    average = copy.deepcopy(plain).eval()
    model = wrapped(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(rank, step, 2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(
                average.state_dict().values(), plain.state_dict().values(), strict=True
            ):
                mean.copy_(mean * 0.9 + value * 0.1 if mean.is_floating_point() else value)
        if step == 1:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        yield left(model=model, average=average)


class MoCo(nn.Module):
    """Query and key encoder in one module; keys of all ranks in a queue that is a buffer."""

    def __init__(self):
        super().__init__()
        self.query, self.key = net(), net()
        for mine, its in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data.copy_(its.data)
            mine.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.ones(8, 16), dim=0))

    def forward(self, one, other):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for mine, its in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.9 + its.data * 0.1
            k = F.normalize(self.key(other), dim=1)
        near = (q * k).sum(1, keepdim=True)
        logits = torch.cat([near, q @ self.queue.clone().detach()], 1) / 0.07
        everyones = [torch.empty_like(k) for _ in range(2)]
        dist.all_gather(everyones, k)
        keys = torch.cat(everyones).T
        self.queue = torch.cat([self.queue[:, keys.shape[1] :], keys], 1)
        return logits


def moco(wrapped, rank):
    model = wrapped(MoCo())
    optimizer = sgd(model.module.query)
    for step in range(STEPS):
        logits = model(data(rank, step, 4, 8), data(rank, 100 + step, 4, 8))
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield left(model=model)


def barlow_twins(wrapped, rank):
    """The loss sums a correlation over the ranks, in place, while its graph stands."""
    model = wrapped(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        one = model(data(rank, step, 4, 8))
        other = model(data(rank, 100 + step, 4, 8))
        correlation = one.T @ other / 8
        dist.all_reduce(correlation.detach())
        loss = (correlation - torch.eye(8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield left(model=model)


def hifi_gan(wrapped, rank):
    """Two wrappers; the discriminator runs for both losses."""
    made, judge = wrapped(net()), wrapped(net(8, 1))
    make, learn = sgd(made), sgd(judge)
    for step in range(STEPS):
        real, seed = data(rank, step, 4, 8), data(rank, 100 + step, 4, 8)
        fake = made(seed)
        learn.zero_grad()
        loss = (1 - judge(real)).square().mean() + judge(fake.detach()).square().mean()
        loss.backward()
        learn.step()
        make.zero_grad()
        loss = (1 - judge(fake)).square().mean() + (fake - real).abs().mean()
        loss.backward()
        make.step()
        yield left(made=made, judge=judge)


def stylegan2(wrapped, rank):
    """Toggles requires_grad of both nets; lazy regularisation by gradients of gradients."""
    made, judge = wrapped(net()), wrapped(net(8, 1))
    make, learn = sgd(made), sgd(judge)

    def trains(model, flag):
        for param in model.module.parameters():
            param.requires_grad = flag

    for step in range(STEPS):
        real, seed = data(rank, step, 4, 8), data(rank, 100 + step, 4, 8)
        trains(made, False)
        trains(judge, True)
        fake = made(seed)
        loss = F.softplus(judge(fake)).mean() + F.softplus(-judge(real)).mean()
        learn.zero_grad()
        loss.backward()
        learn.step()
        if step % 2 == 0:
            real.requires_grad = True
            scores = judge(real)
            (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            learn.zero_grad()
            (slope.square().sum(1).mean() + 0 * scores[0, 0]).backward()
            learn.step()
        trains(made, True)
        trains(judge, False)
        make.zero_grad()
        F.softplus(-judge(made(seed))).mean().backward()
        make.step()
        yield left(made=made, judge=judge)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = net(), net()
        self.scale = nn.Parameter(torch.ones([]))

    def forward(self, image, text):
        normal = (F.normalize(tower, dim=-1) for tower in (self.image(image), self.text(text)))
        return (*normal, self.scale.exp())


def open_clip(wrapped, rank):
    """Features of all ranks, gathered so that gradients flow back through the collective."""
    model = wrapped(Clip())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        image, text, scale = model(data(rank, step, 4, 8), data(rank, 100 + step, 4, 8))
        images = torch.cat(torch.distributed.nn.functional.all_gather(image))
        texts = torch.cat(torch.distributed.nn.functional.all_gather(text))
        logits, labels = scale * images @ texts.T, torch.arange(8)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.scale.clamp_(0, 4)
        yield left(model=model)


LOOPS = [nanogpt, timm, moco, barlow_twins, hifi_gan, stylegan2, open_clip]


def run(loop, kind, rank):
    torch.manual_seed(0)
    return list(loop(lambda module, **options: wrap(kind, module, **options), rank))


def compare(rank, world, loop):
    ours, theirs = run(loop, "fast", rank), run(loop, "torch", rank)
    moved = [len(differences(a, b)) > 0 for a, b in itertools.pairwise(theirs)]
    return [differences(a, b) for a, b in zip(ours, theirs, strict=True)], all(moved)


@pytest.mark.slow(but=("timm",))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_step_has_ddps_bits(loop):
    for found, moved in run_ranks(compare, 2, loop):
        assert found == [[]] * STEPS
        assert moved, "nothing was trained"
