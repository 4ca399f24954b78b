"""Backwards out of the ordinary: checkpoints, failures, several losses, uneven inputs, copies."""

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from fastsync import FastDDP, fully_shard
from fastsync.testing import RankError
from tests.helpers.models import build, differences, grads, many, state, wrap
from tests.helpers.teams import run_ranks


class Checkpointed(nn.Module):
    def __init__(self, reentrant, times, last=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6) if last else nn.Identity()
        self.reentrant, self.times = reentrant, times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(x).square().mean()


def run_checkpointed(kind, rank, reentrant, times, last=True, **options):
    model = wrap(kind, Checkpointed(reentrant, times, last), **options)
    seen = []
    for step in range(4):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, 6)).backward()
        seen.append(grads(model))
    if kind == "fast":
        assert model.sync_stats()["steps"] == 4, "an inner backward must not end the step"
    return seen


def compare_checkpointed(rank, world, reentrant, times, options, fast_options):
    warnings.simplefilter("ignore")
    ours = run_checkpointed("fast", rank, reentrant, times, **options, **fast_options)
    theirs = run_checkpointed("torch", rank, reentrant, times, **options)
    return [differences(a, b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.slow(but=("True-2-options6-large",))
@pytest.mark.parametrize("fast_options", [{}, {"bucket_cap_mb": 1e-6}], ids=["large", "small"])
@pytest.mark.parametrize(
    ("reentrant", "times", "options"),
    [
        (False, 1, {}),
        (False, 2, {}),
        (True, 1, {}),
        (True, 1, {"last": False}),  # the first gradient comes from a backward within the backward
        (True, 1, {"static_graph": True}),
        (False, 2, {"static_graph": True}),
        (True, 2, {"static_graph": True}),
    ],
)
def test_checkpoints_equal_ddp(reentrant, times, options, fast_options):
    args = (reentrant, times, options, fast_options)
    assert run_ranks(compare_checkpointed, 2, *args) == [[[]] * 4] * 2


def checkpoint_twice(rank, world):
    warnings.simplefilter("ignore")
    model = FastDDP(Checkpointed(True, 2), bucket_cap_mb=1e-6)
    try:
        for _ in range(3):
            model(torch.ones(1, 6)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_reentrant_checkpoint_used_twice_says_what_to_do():
    """Its bucket has been sent when the second gradient comes, as in DDP."""
    for text in run_ranks(checkpoint_twice, 2):
        assert "mark a variable ready only once" in text
        assert "static_graph=True" in text
        assert "inner." in text


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fail:
            raise ArithmeticError("no gradient today")
        return grad, None


class FailsHalfWay(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, fail):
        return self.second(Failing.apply(self.first(x), fail)).sum()


def fail_half_way(rank, world, cap):
    model = FastDDP(FailsHalfWay(), bucket_cap_mb=cap)
    x = torch.full((1, 4), float(rank + 1))
    model(x, False).backward()
    try:
        model(x, True).backward()
    except ArithmeticError:
        pass
    else:
        raise AssertionError("backward hid the error")
    text = ""
    try:
        model(x, False)
    except RuntimeError as error:
        text = str(error)
    values = []
    for _ in range(2):
        model.zero_grad()
        model(x, False).backward()
        values.append(model.module.first.weight.grad.sum().item())
    reference = copy.deepcopy(model.module)
    reference.zero_grad()
    reference(torch.full((1, 4), (world + 1) / 2), False).backward()
    return text, values, reference.first.weight.grad.sum().item()


def test_after_a_backward_that_failed_before_anything_was_sent():
    for world in (1, 2):
        for text, values, wanted in run_ranks(fail_half_way, world, 25):
            assert not text, "nothing was lost, so nothing is said"
            assert values == pytest.approx([wanted] * 2)


def test_after_a_backward_that_failed_half_way():
    for text, values, wanted in run_ranks(fail_half_way, 2, 1e-6):
        assert "stopped half-way" in text
        assert "after 2 of 4 buckets" in text
        assert values == pytest.approx([wanted] * 2), "all ranks failed alike, and go on"
    for text, values, wanted in run_ranks(fail_half_way, 1, 1e-6):
        assert not text, "one rank cannot disagree with itself"
        assert values == pytest.approx([wanted] * 2)


def pack_and_fail(rank, world, options):
    """Fail when a gradient has been packed ahead of its bucket, which nobody has sent."""
    model = FastDDP(FailsHalfWay(512), bucket_cap_mb=25, **options)
    x = torch.ones(1, 512)
    model(x, False).backward()
    model.zero_grad()
    with pytest.raises(ArithmeticError):
        model(x, True).backward()
    with pytest.raises(RuntimeError, match=f"rank {rank}, after 0 of 1 buckets.* 1 gradients"):
        model(x, False)
    model(x, False)


@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"wire": "int8"}], ids=repr)
def test_after_a_backward_that_failed_when_gradients_were_packed(options):
    run_ranks(pack_and_fail, 2, options)


def fail_and_go_on(rank, world, zero, same_graph):
    """Return the gradients of a backward that no forward parts from one that failed."""
    model = FailsHalfWay()
    if zero == "units":
        for module in (model.first, model.second, model):
            fully_shard(module)
        forward = model
    else:
        forward = FastDDP(model, zero=zero)
    x, fail = torch.full((1, 4), float(rank + 1)), {"now"}
    failing = forward(x, fail).square()
    after = failing if same_graph else forward(x, False).square()
    with pytest.raises(ArithmeticError):
        failing.backward(retain_graph=True)
    forward.zero_grad()
    fail.clear()
    after.backward()
    found = [getattr(p.grad, "full_tensor", p.grad.clone)() for p in model.parameters()]
    plain = FailsHalfWay()
    for other in range(world):
        (plain(torch.full((1, 4), float(other + 1)), False).square() / world).backward()
    return [float((a - p.grad).abs().max()) for a, p in zip(found, plain.parameters(), strict=True)]


@pytest.mark.parametrize("same_graph", [False, True], ids=["another graph", "the same graph"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3, "units"])
def test_a_backward_right_after_one_that_failed(zero, same_graph):
    for errors in run_ranks(fail_and_go_on, 2, zero, same_graph):
        assert errors == pytest.approx([0] * 4, abs=1e-4)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x, part, fail=False):
        return Failing.apply(self.parts[part](x).sum(), fail)


def accumulate_and_fail(rank, world, zero):
    model = FastDDP(Parts(), zero=zero)
    x = torch.full((1, 4), float(rank + 1))
    with model.no_sync():
        model(x, rank).backward()
    with pytest.raises(ArithmeticError):
        model(x, 0, True).backward()
    model(x, 1).backward()
    return [float(part.weight.grad.mean()) for part in model.module.parts]


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_accumulated_before_a_backward_that_failed(zero):
    """Rank 0 alone has some of the first part, and rank 1 more of the second."""
    assert run_ranks(accumulate_and_fail, 2, zero) == [[1 / 2, (1 + 2 + 2) / 2]] * 2


def fail_on_one(rank, world):
    model = FastDDP(FailsHalfWay(), bucket_cap_mb=1e-6)
    model(torch.ones(1, 4), rank == 1).backward()


def test_a_backward_that_fails_on_one_rank_is_reported_there():
    with pytest.raises(RankError, match="no gradient today"):
        run_ranks(fail_on_one, 2, grace=1)


def train_unevenly(kind, rank, by_initial, cap):
    warnings.simplefilter("ignore")
    model = wrap(kind, build("many"), bucket_cap_mb=cap)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(seed):
        torch.manual_seed(seed)
        opt.zero_grad()
        model(torch.randn(2, 16)).square().sum().backward()
        opt.step()

    seen = []
    for count in (2 + 5 * rank, 9 - 3 * rank):
        with model.join(divide_by_initial_world_size=by_initial):
            for index in range(count):
                step(100 * index + rank)
        seen.append(state(model.module))
        step(rank)  # everyone is back, and counts again
        seen.append(state(model.module))
    return seen


def compare_uneven(rank, world, by_initial, cap):
    ours = train_unevenly("fast", rank, by_initial, cap)
    theirs = train_unevenly("torch", rank, by_initial, cap)
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        errors.append(max(float((a[n].double() - b[n].double()).abs().max()) for n in a))
    return errors, ours[-1]


@pytest.mark.slow(but=("False-25",))
@pytest.mark.parametrize("cap", [25, 0.002])
@pytest.mark.parametrize("by_initial", [True, False])
def test_uneven_inputs_under_join(by_initial, cap):
    results = run_ranks(compare_uneven, 3, by_initial, cap)
    for errors, last in results:
        assert max(errors) < 1e-5, errors
        assert not differences(last, results[0][1])


def copies_of(model):
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield torch.load(stored, weights_only=False)


def train_copies(rank, world):
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default"):
        pickle.dumps(FastDDP(many(2, 8), process_group=dist.new_group([0, 1])))
    model = FastDDP(many(2, 8), bucket_cap_mb=1e-4, gradient_as_bucket_view=False, wire="bf16")
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    found = []
    torch.manual_seed(rank)
    x = torch.randn(2, 8)
    model(x).square().sum().backward()
    for twin in copies_of(model):
        twin.zero_grad()
        twin(x).square().sum().backward()
        same_buckets = len(twin._engine.plan.buckets) == len(model._engine.plan.buckets)
        found.append((differences(grads(twin), grads(model)), same_buckets, type(twin).__name__))
    return found, isinstance(model, DDP)


def test_copies_train_by_themselves():
    for found, is_ddp in run_ranks(train_copies, 2):
        assert found == [([], True, "FastDDP")] * 3
        assert is_ddp


def several_models(rank, world):
    """A generator and a critic, differentiated in turns and through each other."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inner = nn.Linear(4, 4), nn.Linear(4, 1)
    found = []
    for kind in ("fast", "torch"):
        one, other = (wrap(kind, copy.deepcopy(module)) for module in inner)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(2, 4)
            one.zero_grad()
            other.zero_grad()
            other(one(x)).square().mean().backward()
        found.append({**grads(one), **{f"other.{n}": g for n, g in grads(other).items()}})
    return differences(*found)


def test_several_models_in_one_graph():
    assert run_ranks(several_models, 2) == [[], []]


def exchange_states(rank, world):
    fast, torchs = wrap("fast", build("conv", 1)), wrap("torch", build("conv", 2))
    torchs.load_state_dict(fast.state_dict())
    there = differences(state(fast), state(torchs))
    other = wrap("torch", build("conv", 3))
    fast.load_state_dict(other.state_dict())
    return there, differences(state(fast), state(other)), next(iter(fast.state_dict()))


def test_state_dicts_fit_both_ways():
    for there, back, name in run_ranks(exchange_states, 2):
        assert (there, back) == ([], [])
        assert name.startswith("module.")


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, tokens, use=True):
        hidden = self.embed(tokens) if use else torch.ones(1, 3)
        # torch's DDP has no answer to a rank without a sparse gradient: there it becomes zero.
        hidden = hidden if use is not None else hidden + 0 * self.embed(tokens).sum()
        return self.head(hidden).square().sum()


def train_sparse(rank, world):
    warnings.simplefilter("ignore")
    found = []
    for unused in (False, True):
        kept = []
        for kind in ("fast", "torch"):
            model = wrap(kind, Sparse(), find_unused_parameters=unused)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                opt.zero_grad()
                missing = unused and rank == 1 and step == 2
                without = False if kind == "fast" else None
                model(torch.tensor([rank, step, 7, 7]), without if missing else True).backward()
                assert model.module.embed.weight.grad.is_sparse
                opt.step()
            kept.append(state(model.module))
        errors = [float((kept[0][n] - kept[1][n]).abs().max()) for n in kept[0]]
        found.append(max(errors))
    return found


def test_sparse_embeddings():
    for errors in run_ranks(train_sparse, 2):
        assert max(errors) < 1e-6


class PartlyTied(nn.Module):
    """An embedding with sparse gradients that `ties` also use as a matrix: dense gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, tokens, uses):
        hidden = self.embed(tokens) if "rows" in uses else torch.ones(1, 3)
        if "matrix" in uses:
            hidden = hidden @ self.embed.weight.T @ self.embed.weight.detach()
        return self.head(hidden).square().sum()


def train_partly_tied(rank, world, joins):
    """Return gradients, and those of one process with the batches of both ranks."""
    warnings.simplefilter("ignore")
    model, alone = FastDDP(PartlyTied()), PartlyTied()
    uses = [("rows", "rows+matrix"), ("none", "matrix"), ("rows", "rows"), ("rows+matrix", "none")]
    if joins:
        uses += [("rows", "ended"), ("rows+matrix", "ended")]
    found = []
    with model.join(enable=joins):
        for step, ranks in enumerate(uses):
            if ranks[rank] == "ended":
                break
            model.zero_grad(), alone.zero_grad()
            model(torch.tensor([rank, step]), ranks[rank]).backward()
            for r in range(world):
                if ranks[r] != "ended":
                    (alone(torch.tensor([r, step]), ranks[r]) / world).backward()
            found.append((model.module.embed.weight.grad, alone.embed.weight.grad))
    return found


@pytest.mark.parametrize("joins", [False, True])
def test_embeddings_that_one_rank_alone_ties(joins):
    for found in run_ranks(train_partly_tied, 2, joins):
        assert len(found) >= 4
        for step, (ours, theirs) in enumerate(found):
            assert ours.is_sparse == (step in (2, 4))
            assert torch.allclose(ours.to_dense(), theirs.to_dense(), atol=1e-6), step


def join_sparse(rank, world):
    warnings.simplefilter("ignore")
    model = FastDDP(Sparse())
    with model.join():
        for step in range(3 + 2 * rank):
            model.zero_grad()
            model(torch.tensor([rank, step])).backward()
    return sorted(model.module.embed.weight.grad.coalesce().indices()[0].tolist())


def test_sparse_embeddings_under_join():
    first, second = run_ranks(join_sparse, 2)
    assert first == [0, 1, 2]
    assert second == [1, 4]


def watch_from_a_thread(rank, world):
    """Counters may be read at any time, also while a hook frees gradients that Python knows."""
    model = FastDDP(many(20, 8), bucket_cap_mb=1e-4)
    stop = threading.Event()

    def poll():
        while not stop.is_set():
            model.sync_stats()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: setattr(q, "seen", q.grad.shape))
    thread = threading.Thread(target=poll)
    thread.start()
    for _ in range(30):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
    stop.set()
    thread.join()
    return model.sync_stats()["steps"]


@pytest.mark.slow
def test_counters_can_be_read_from_another_thread():
    assert run_ranks(watch_from_a_thread, 2, timeout=60) == [30, 30]
