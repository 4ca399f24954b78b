"""Parts of each batch by the ranks' speed: every sample once, and the gradients of one process."""

import os
import random
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fastsync
from fastsync import FastDDP, Shares, fully_shard
from fastsync.ddp.shares import WINDOW, divide, step_time
from tests.ddp.test_mean_weights import distance, net, whole
from tests.helpers.teams import run_ranks

TOTAL, SAMPLES = 12, 103
COSTS = [1.0, 3.0, 1.5]  # of a sample, by rank
EPOCHS = 4  # of more than twice as many batches as WINDOW


def test_parts_are_proportional_and_whole():
    assert divide(512, [3, 1]) == [384, 128]
    assert divide(10, [1, 1, 1]) == [4, 3, 3]
    assert divide(4, [1000, 1, 1]) == [2, 1, 1]
    assert divide(3, [1, 1e9, 1]) == [1, 1, 1]
    assert divide(100, [0.3]) == [100]


def test_random_parts_add_up_and_follow_the_speeds():
    draw = random.Random()
    for _ in range(3000):
        ranks = draw.randint(1, 9)
        total = ranks + int(10 ** draw.uniform(0, 5)) - 1
        speeds = [10 ** draw.uniform(-6, 6) for _ in range(ranks)]
        parts = divide(total, speeds)
        assert sum(parts) == total and min(parts) >= 1, (total, speeds)
        ordered = [part for _, part in sorted(zip(speeds, parts, strict=True))]
        assert ordered == sorted(ordered), (total, speeds)
        exact = [total * speed / sum(speeds) for speed in speeds]
        if min(exact) > 1.001:
            off = max(abs(p - e) for p, e in zip(parts, exact, strict=True))
            assert off < 1.001, (total, speeds)
        assert divide(total, [4.0 * speed for speed in speeds]) == parts


@pytest.mark.parametrize("speeds", [[1, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_what_is_no_speed(speeds):
    with pytest.raises(ValueError, match="speeds are positive numbers"):
        divide(5, speeds)


def test_the_last_rank_decides_the_time():
    assert step_time([6, 2], [3, 2]) == 2


class Samples(torch.utils.data.Dataset):
    """Whole numbers, so that fp32 holds all gradients exactly, and each sample's index."""

    def __init__(self):
        draw = torch.Generator().manual_seed(3)
        self.x, self.y = whole((SAMPLES, 5), draw), whole((SAMPLES, 3), draw)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


def wrap(kind):
    if kind == "fully_shard":
        model = net()
        fully_shard(model[0])
        return fully_shard(model)
    return FastDDP(net(), bucket_cap_mb=0.0005, zero=int(kind))


def with_costs(shares, rank):
    """Let time pass by the samples that this rank trains alone; return the function to call."""
    clock = [0.0]
    shares._busy = lambda: clock[0]
    shares._restart()

    def train(count):
        clock[0] += COSTS[rank] * count

    return train


class Ahead:
    """Draws as many batches ahead, as a loader with workers does."""

    def __init__(self, sampler, count):
        self.sampler, self.count = sampler, count

    def __iter__(self):
        drawn = deque()
        for batch in self.sampler:
            drawn.append(batch)
            if len(drawn) > self.count:
                yield drawn.popleft()
        yield from drawn


def train(rank, world, kind, ahead, micro):
    """Return the samples, the parts and the gradients of each step."""
    model, dataset = wrap(kind), Samples()
    shares = Shares(model, TOTAL)
    trained = with_costs(shares, rank)
    sampler = Ahead(shares.sampler(dataset, seed=5), rank if ahead else 0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found, speeds = [], set()
    for _ in range(EPOCHS):
        steps = []
        for indices, x, y in loader:
            optimizer.zero_grad()
            for part in torch.arange(len(x)).tensor_split(micro):
                model.add_weight(len(part))
                (model(x[part]) * y[part]).sum().backward()
            trained(len(x))
            grads = [p.grad for p in model.parameters()]
            grads = [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]
            steps.append((indices.tolist(), grads))
            optimizer.step()
            speeds |= set(shares._measured)
        found.append(steps)
    return found, shares.parts, speeds


def oracle(indices):
    model, dataset = net().double(), Samples()
    x, y = dataset.x[indices].double(), dataset.y[indices].double()
    ((model(x) * y).sum() / len(indices)).backward()
    return [p.grad for p in model.parameters()]


CASES = {
    "0": ("0", False, 1, 2),
    "ahead": ("0", True, 1, 3),
    "micro": ("0", False, 3, 2),
    "1": ("1", False, 1, 2),
    "2": ("2", True, 2, 2),
    "3": ("3", False, 2, 2),
    "fully_shard": ("fully_shard", True, 1, 2),
}


@pytest.mark.slow(but=("0", "ahead", "fully_shard"))
@pytest.mark.parametrize("case", CASES)
def test_samples_are_trained_once_with_gradients_of_one_process(case):
    kind, ahead, micro, world = CASES[case]
    results = run_ranks(train, world, kind, ahead, micro)
    # Means that are added to in one step are rounded as often.
    bound = micro * 2**-23
    for epoch in zip(*(found for found, *_ in results), strict=True):
        seen = []
        for step in zip(*epoch, strict=True):
            indices = [index for mine, _ in step for index in mine]
            seen += indices
            wanted = oracle(indices)
            assert max(distance(grads, wanted) for _, grads in step) <= bound
        assert sorted(seen) == list(range(SAMPLES))
        assert len(epoch[0]) == -(-SAMPLES // TOTAL)
    wanted = divide(TOTAL, [1 / cost for cost in COSTS[:world]])
    assert [parts for _, parts, _ in results] == [wanted] * world
    for cost, (_, _, speeds) in zip(COSTS, results, strict=False):
        assert list(speeds) == pytest.approx([1 / cost] * len(speeds))


def small(rank, world, samples, total):
    shares = Shares(FastDDP(net()), total)
    sampler = shares.sampler(range(samples), shuffle=False)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return batches


@pytest.mark.parametrize(
    ("samples", "sizes"), [(2, [2]), (5, [5]), (8, [8]), (9, [9]), (10, [8, 2]), (17, [8, 9])]
)
def test_small_epochs_have_all_samples(samples, sizes):
    results = run_ranks(small, 2, samples, 8)
    batches = [one + other for one, other in zip(*results, strict=True)]
    assert [len(batch) for batch in batches] == sizes
    assert [index for batch in batches for index in batch] == list(range(samples))


def slow(rank, world, kind):
    """Train with a rank whose forwards take longer; the other one waits for it."""
    model = wrap(kind)
    shares, x = Shares(model, 16), torch.ones(16, 5)
    sizes = []
    for _ in range(3 * WINDOW):
        mine = x[shares.next()]
        sizes.append(len(mine))
        if rank == 1:
            time.sleep(2e-3 * len(mine))
        model.add_weight(len(mine))
        model(mine).sum().backward()
        model.zero_grad()
    return sizes


@pytest.mark.parametrize("kind", ["0", "fully_shard"])
def test_waiting_for_a_slow_rank_makes_no_rank_slow(kind):
    fast, other = run_ranks(slow, 2, kind)
    assert all(a + b == 16 for a, b in zip(fast, other, strict=True))
    assert fast[0] == 8 and fast[-1] > 11, fast


def mistaken(rank, world, kind):
    model = FastDDP(net())
    total = 8 + rank if kind == "total" else 8
    shares = Shares(model, total)
    sampler = shares.sampler(range(16), seed=rank if kind == "seed" else 0)
    if kind == "epoch":
        sampler.set_epoch(rank)
    parts = iter(sampler)
    x = torch.ones(16, 5)
    for _ in range(2):
        mine = slice(rank, 16, 2) if kind == "undrawn" and rank == 1 else next(parts)
        if kind != "weightless":
            model.add_weight(4)
        model(x[mine]).sum().backward()


MISTAKES = {
    "total": r"total is 9 there but 8 on rank 0",
    "seed": r"seed is 1 there but 0 on rank 0",
    "epoch": r"ranks \[1\] train on samples of another sampler or epoch than rank 0",
    "undrawn": r"ranks \[1\] have drawn no part of a batch by step 1",
    "weightless": r"weights of step 1 make no mean: ranks \[0, 1\] gave none",
}


def caught(rank, world, kind):
    with pytest.raises(fastsync.RankMismatchError, match=MISTAKES[kind]):
        mistaken(rank, world, kind)


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_errors_on_every_rank(kind):
    run_ranks(caught, 2, kind)


def alone(rank, world):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "1"
    model = FastDDP(net())
    if rank == 0:
        Shares(model, 8)
    dist.barrier()


def test_a_rank_that_does_not_divide():
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not come.*Make fastsync.Shares on"):
        run_ranks(alone, 2)


def refusals(rank, world):
    model = FastDDP(net())
    old = Shares(model, 8)
    old.next()
    Shares(model, 8).next()
    with pytest.raises(RuntimeError, match=r"make fastsync\.Shares anew"):
        old.next()
    for total in (1, 0):
        with pytest.raises(ValueError, match="cannot be divided among 2 ranks"):
            Shares(model, total)
    with pytest.raises(ValueError, match="expects a FastDDP model"):
        Shares(net(), 8)
    with pytest.raises(ValueError, match="1 samples cannot be divided"):
        Shares(model, 8).sampler(range(1))


def test_what_cannot_be_divided():
    run_ranks(refusals, 2)
