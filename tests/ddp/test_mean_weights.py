"""Weights of micro-batches: gradients are those of one process that has all samples."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fastsync import FastDDP
from tests.helpers.teams import run_ranks

# The samples of each rank's micro-batches, in each step.
EVEN = [[2, 3], [4, 1]]
SPARSE = [[3, 0, 2], [0, 0, 0]]
THREE = [[1, 2, 3], [5, 0, 0], [2, 2, 9]]
ALONE = [[2, 5, 1]]


def whole(size, draw):
    return torch.randint(-3, 4, size, generator=draw).float()


def net():
    """Return a model whose gradients are whole numbers, so that fp32 holds them exactly."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))
    for param in model.parameters():
        param.data = whole(param.shape, draw)
    return model


def samples(rank, step, micro, count):
    draw = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return whole((count, 5), draw), whole((count, 3), draw)


def loss_of(model, rank, step, micro, count):
    x, y = samples(rank, step, micro, count)
    like = next(model.parameters())
    return (model(x.to(like.dtype)) * y.to(like.dtype)).sum()


def expected(splits, steps):
    """Return the gradients of one process that has all samples, in fp64, step by step."""
    model, found = net().double(), []
    for step in range(steps):
        model.zero_grad()
        total = sum(map(sum, splits))
        for rank, counts in enumerate(splits):
            for micro, count in enumerate(counts):
                (loss_of(model, rank, step, micro, count) / total).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def mean_of_rows(state, bucket):
    """Averages dense and sparse buckets, as a script may."""
    flat = bucket.buffer().to_dense()
    work = dist.all_reduce(flat, async_op=True).get_future()

    def mean(done):
        found = flat / dist.get_world_size()
        return found.to_sparse(1) if bucket.buffer().is_sparse else found

    return work.then(mean)


def give(model, loss, count, form):
    """Call backward in one of the forms that the documents have."""
    if form == "mean":
        loss = model.add_weight(count, mean=loss / max(count, 1))
    elif form == "tensor":
        model.add_weight(torch.tensor(count))
    else:
        model.add_weight(count)
    loss.backward()


def read(model):
    """Return copies of the gradients, those of shards in whole. Collective with zero."""
    return [p.grad.clone() for p in model.module.parameters()]


def train(rank, world, splits, steps, options, form="sum", local=True, set_to_none=True):
    """Return the gradients of each step. The optimizer steps by nothing."""
    model = FastDDP(net(), bucket_cap_mb=0.0005, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none)
        for micro, count in enumerate(splits[rank]):
            last = micro == len(splits[rank]) - 1
            with contextlib.nullcontext() if last or not local else model.no_sync():
                give(model, loss_of(model, rank, step, micro, count), count, form)
        found.append(read(model))
        optimizer.step()
    return found


def distance(found, wanted):
    """Return the difference of two lists of tensors, relative to the norm of the second."""
    found, wanted = (torch.cat([t.flatten().double() for t in ts]) for ts in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def farthest(results, wanted):
    return max(distance(f, w) for steps in results for f, w in zip(steps, wanted, strict=True))


@pytest.mark.slow(
    but=("even-no_sync-0", "even-every-0", "even-no_sync-2", "3-every-1", "zero-no_sync-0")
)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("local", [True, False], ids=["no_sync", "every"])
@pytest.mark.parametrize("splits", [EVEN, SPARSE, THREE, ALONE], ids=["even", "zero", "3", "alone"])
def test_gradients_are_those_of_one_process(splits, local, zero):
    options = {"zero": zero}
    results = run_ranks(train, len(splits), splits, 4, options, "sum", local)
    assert farthest(results, expected(splits, 4)) <= 2**-23


@pytest.mark.parametrize("form", ["mean", "tensor"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_other_forms_and_gradients_that_are_zeroed(form, set_to_none):
    for local in (True, False):
        options = {"static_graph": local}
        results = run_ranks(train, 2, EVEN, 3, options, form, local, set_to_none)
        assert farthest(results, expected(EVEN, 3)) <= 2**-23


def kept(rank, world, plan, zero):
    """Go on with the gradients of earlier steps, all in the same mean."""
    model = FastDDP(net(), bucket_cap_mb=0.0005, zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if zero:  # from its first step on, gradients are spread
        give(model, loss_of(model, rank, 9, 0, 1), 1, "sum")
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for step in range(3):
        with model.no_sync():
            give(model, loss_of(model, rank, step, 0, plan[rank][step]), plan[rank][step], "sum")
        give(model, loss_of(model, rank, step, 1, 2), 2, "sum")
        if step == 2 or not zero:  # to read spread gradients makes them whole
            found.append(read(model))
        optimizer.step()
    return found


@pytest.mark.slow(but=("1-0", "2-0", "2-1", "3-2"))
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_mean_that_is_not_cleared_goes_on(world, zero):
    plan = [[2, 0, 5], [1, 4, 0], [0, 3, 1]][:world]
    wanted = []
    model, total = net().double(), 0
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(3):
        for rank in range(world):
            for micro, count in enumerate((plan[rank][step], 2)):
                model.zero_grad()
                loss_of(model, rank, step, micro, count).backward()
                sums = [s + p.grad for s, p in zip(sums, model.parameters(), strict=True)]
                total += count
        wanted.append([s / total for s in sums])
    # Each step rounds the mean once more.
    results = run_ranks(kept, world, plan, zero)
    assert farthest(results, wanted[-1:] if zero else wanted) <= 3 * 2**-23


class TwoHeads(nn.Module):
    """Its second head takes part in some forwards."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([net(), net()])

    def forward(self, x, both):
        return self.heads[0](x) + (self.heads[1](x) if both else 0)


def partly_used(rank, world, local):
    model = FastDDP(TwoHeads(), bucket_cap_mb=0.0005)
    for step, both in enumerate((True, rank == 1, False)):
        with contextlib.nullcontext() if step == 0 or not local else model.no_sync():
            x, y = samples(rank, step, 0, 2)
            model.add_weight(2)
            (model(x, both) * y).sum().backward()
    if local:
        model.add_weight(0)
        (model(x[:0], False) * y[:0]).sum().backward()
    return read(model)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_use_stay_in_the_mean(world, local):
    model = TwoHeads().double()
    for step in range(3):
        for rank in range(world):
            x, y = (t.double() for t in samples(rank, step, 0, 2))
            both = (True, rank == 1, False)[step]
            ((model(x, both) * y).sum() / (6 * world)).backward()
    wanted = [p.grad for p in model.parameters()]
    for found in run_ranks(partly_used, world, local):
        assert distance(found, wanted) <= 3 * 2**-23


def clipped(rank, world, form):
    model = FastDDP(net(), bucket_cap_mb=0.0005)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        optimizer.zero_grad()
        counts = EVEN[rank]
        for micro, count in enumerate(counts):
            with contextlib.nullcontext() if micro else model.no_sync():
                loss = loss_of(model, rank, step, micro, count)
                model.add_weight(count)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0) if form == "ours" else None
        if norm is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return float(norm), read(model)


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_clipping_and_loss_scaling_see_the_mean(form):
    wanted = expected(EVEN, 3)[-1]
    norm = float(torch.cat([w.flatten() for w in wanted]).norm())
    for found, grads in run_ranks(clipped, 2, form):
        assert abs(found - norm) <= 1e-6 * norm
        assert distance(grads, [w / norm for w in wanted]) <= 1e-5


def joined(rank, world, local):
    """Rank 1 has inputs for one step, rank 0 for three."""
    model = FastDDP(net(), bucket_cap_mb=0.0005)
    found = []
    with model.join():
        for step in range(3 if rank == 0 else 1):
            model.zero_grad()
            if local:
                with model.no_sync():
                    give(model, loss_of(model, rank, step, 0, 3), 3, "sum")
            give(model, loss_of(model, rank, step, 1, 2), 2, "sum")
            found.append(read(model))
    return found


def test_ranks_without_inputs_weigh_nothing():
    splits = [[[0, 2], [0, 2]], [[0, 2], [0, 0]], [[0, 2], [0, 0]]]
    first, _ = run_ranks(joined, 2, False)
    for step, counts in enumerate(splits):
        model = net().double()
        total = sum(map(sum, counts))
        for rank, (_, count) in enumerate(counts):
            (loss_of(model, rank, step, 1, count) / total).backward()
        assert distance(first[step], [p.grad for p in model.parameters()]) <= 2**-23


def frozen_and_joined(rank, world):
    """Rank 1 runs out of inputs of a model that is frozen, between two steps that train it."""
    model, found = FastDDP(net(), bucket_cap_mb=0.0005), []
    for step in range(2):
        model.zero_grad()
        give(model, loss_of(model, rank, step, 0, 2 + rank), 2 + rank, "sum")
        found.append(read(model))
        model.zero_grad()
        model.requires_grad_(False)
        with model.join():
            for _ in range(40 - 39 * rank):  # the plan loses frozen parameters after some steps
                model(torch.ones(1, 5, requires_grad=True)).sum().backward()
        model.requires_grad_(True)
    return found


def test_a_frozen_model_under_join_exchanges_no_weights():
    for found in run_ranks(frozen_and_joined, 2):
        for step, wanted in enumerate(expected([[2], [3]], 2)):
            assert distance(found[step], wanted) <= 2**-23


def plain_and_weighted(rank, world):
    """Steps without any weight are means over ranks, as ever."""
    model = FastDDP(net(), bucket_cap_mb=0.0005)
    found = []
    for step in range(4):
        model.zero_grad()
        loss = loss_of(model, rank, step, 0, 2 + rank)
        if step % 2:
            model.add_weight(2 + rank)
        loss.backward()
        found.append(read(model))
    return found


def test_steps_without_weights_stay_means_over_ranks():
    results = run_ranks(plain_and_weighted, 2)
    for step in range(4):
        model = net().double()
        for rank in range(2):
            loss_of(model, rank, step, 0, 2 + rank).backward()
        by = 5 if step % 2 else 2
        wanted = [p.grad / by for p in model.parameters()]
        assert all(distance(found[step], wanted) <= 2**-23 for found in results)


def dropped(rank, world, kind):
    """Give up a micro-batch, or a step that failed, and begin it anew."""
    model = FastDDP(net(), bucket_cap_mb=0.0005)
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            give(model, loss_of(model, rank, step, 0, 3), 3, "sum")
        if kind == "failed" and step:
            hook = model.module[2].weight.register_hook(refuse)
            with contextlib.suppress(ZeroDivisionError):
                give(model, loss_of(model, rank, step, 1, 4), 4, "sum")
            hook.remove()
        if step:
            model.zero_grad()
            with model.no_sync():
                give(model, loss_of(model, rank, step, 2, 2), 2, "sum")
        give(model, loss_of(model, rank, step, 3, 1 + rank), 1 + rank, "sum")
    return read(model)


def refuse(grad):
    raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["cleared", "failed"])
def test_weights_of_gradients_that_are_dropped_do_not_count(kind):
    model = net().double()
    for rank in range(2):
        for micro, count in ((2, 2), (3, 1 + rank)):
            (loss_of(model, rank, 1, micro, count) / 7).backward()
    wanted = [p.grad for p in model.parameters()]
    for found in run_ranks(dropped, 2, kind):
        assert distance(found, wanted) <= 2**-23


def frozen(rank, world, zero):
    """Give weights where nothing is trained, as for gradients of inputs alone."""
    model = FastDDP(net(), zero=zero)
    model.requires_grad_(False)
    for _ in range(3):
        give(model, model(torch.ones(1, 5, requires_grad=True)).sum(), 5, "sum")
    model.requires_grad_(True)
    give(model, loss_of(model, rank, 0, 0, 1 + rank), 1 + rank, "sum")
    return read(model)


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_of_frozen_models_do_not_count(zero):
    wanted = expected([[1], [2]], 1)[0]
    for found in run_ranks(frozen, 2, zero):
        assert distance(found, wanted) <= 2**-23


def partly_frozen(rank, world, zero):
    """Give weights where rank 1 alone trains nothing."""
    model = FastDDP(net(), zero=zero, find_unused_parameters=True)
    model.requires_grad_(rank == 0)
    x, y = samples(rank, 0, 0, 1 + rank)
    give(model, (model(x.requires_grad_()) * y).sum(), 1 + rank, "sum")
    return read(model)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_of_a_rank_that_trains_nothing_count(zero):
    wanted = [grad / 3 for grad in expected([[1]], 1)[0]]
    for found in run_ranks(partly_frozen, 2, zero):
        assert distance(found, wanted) <= 2**-23


# --- mistakes


def mistaken(rank, world, kind, step_of_mistake, zero):
    model = FastDDP(net(), bucket_cap_mb=0.0005, zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        wrong = kind if step == step_of_mistake else ""
        if wrong not in ("half", "changed", "weightless") or rank == 0:
            optimizer.zero_grad()
        if wrong == "half":
            model.module[0].weight.grad = None
        if wrong == "changed" and rank == 1:
            for param in model.module.parameters():
                param.grad.mul_(2)
        try:
            for micro in range(2):
                with contextlib.nullcontext() if micro else model.no_sync():
                    loss = loss_of(model, rank, step, micro, 2)
                    weight = 2.0
                    if wrong == "zero":
                        weight = 0
                    if rank == 1 and micro == 0:
                        weight = {"negative": -3, "nan": float("nan")}.get(wrong, weight)
                    missing = (wrong == "missing" and micro == 0) or wrong == "none"
                    plain = kind == "weightless" and step == 0
                    if not (plain or (rank == 1 and missing)):
                        model.add_weight(weight)
                    loss.backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}", step
        optimizer.step()
    return "", -1


MISTAKES = {
    "zero": "they are zero on all ranks",
    "negative": "ranks [1] gave a negative one",
    "nan": "ranks [1] gave NaN or infinity",
    "missing": "ranks [1] gave none for one of several backwards",
    "none": "ranks [1] gave none",
    "changed": "ranks [1] changed gradients of the last step, which it did not clear",
    "weightless": "ranks [1] went on with gradients of a step without weights",
    "half": "ranks [1] cleared some gradients of the last step and went on with others",
}


@pytest.mark.slow(but=("missing-0", "none-0", "negative-1", "zero-0", "weightless-0"))
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_errors_on_every_rank_that_name_the_ranks(kind, zero):
    for found, step in run_ranks(mistaken, 2, kind, 1, zero):
        assert step == 1 and found.startswith("RankMismatchError"), found
        assert MISTAKES[kind] in found


def test_the_first_weight_on_one_rank_alone():
    with pytest.raises(AssertionError) as caught:
        run_ranks(raising_alone, 2)
    text = str(caught.value)
    assert "ranks [1] did not come" in text and "Call add_weight() on every rank" in text


def raising_alone(rank, world):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "1"
    model = FastDDP(net())
    loss = loss_of(model, rank, 0, 0, 2)
    if rank == 0:
        model.add_weight(2)
    loss.backward()


def not_numbers(rank, world):
    model = FastDDP(net())
    texts = []
    for weight in (torch.ones(2), torch.ones((), dtype=torch.complex64), "3 tokens"):
        try:
            model.add_weight(weight)
        except (TypeError, ValueError) as error:
            texts.append(str(error))
    return texts


def test_a_weight_is_one_number():
    assert all(len(texts) == 3 for texts in run_ranks(not_numbers, 2))


class Looked(nn.Module):
    """Has a parameter whose gradient is sparse, too."""

    def __init__(self):
        super().__init__()
        self.net, self.rows = net(), nn.Embedding(4, 3, sparse=True)
        self.rows.weight.data = whole((4, 3), torch.Generator().manual_seed(1))

    def forward(self, x):
        return self.net(x) + self.rows(torch.arange(len(x)) % 4)


def hooked(rank, world, splits, make, hook, late):
    """Return the gradients of two steps with weights and of one without."""
    torch.manual_seed(0)
    model = FastDDP(make(), bucket_cap_mb=0.0005)
    if not late:
        model.register_comm_hook(None, hook)
    found = []
    for step in range(3):
        model.zero_grad()
        for micro, count in enumerate(splits[rank]):
            last = micro == len(splits[rank]) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                if step < 2:
                    model.add_weight(count)
                loss_of(model, rank, step, micro, count).backward()
        found.append([p.grad.to_dense().clone() for p in model.module.parameters()])
        if late and step == 0:
            model.register_comm_hook(None, hook)
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "make, hook, bound",
    [
        (net, default_hooks.allreduce_hook, 2**-23),
        (net, default_hooks.fp16_compress_hook, 2**-10),
        (Looked, mean_of_rows, 2**-23),
    ],
    ids=["allreduce", "fp16", "sparse"],
)
def test_a_hook_reduces_gradients_that_weights_have_scaled(make, hook, bound, late):
    splits, steps = THREE, []
    for step in range(3):
        model, total = make().double(), 3 if step == 2 else sum(map(sum, splits))
        for rank, counts in enumerate(splits):
            for micro, count in enumerate(counts):
                (loss_of(model, rank, step, micro, count) / total).backward()
        steps.append([p.grad.to_dense() for p in model.parameters()])
    assert farthest(run_ranks(hooked, 3, splits, make, hook, late), steps) <= bound
