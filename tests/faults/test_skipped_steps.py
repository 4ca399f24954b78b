"""on_skip="average_others": a rank whose step fails leaves it to the others."""

import os
import random
from contextlib import suppress

import pytest
import torch
from torch import nn

from fastsync import FastDDP, Faults, RankMismatchError
from fastsync.config.arguments import grouped
from tests.helpers.teams import run_ranks

LAYERS, WIDTH, STEPS = 4, 8, 6
FAILING = 1  # the layer behind whose input the backward fails: gradients of later ones have come


class BadSample(Exception):
    pass


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.fails = ""

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == FAILING:
                if self.fails == "forward":
                    raise BadSample("in forward")
                if self.fails == "backward":
                    x.register_hook(self.fail)
        return self.norm(x).square().mean()

    def fail(self, _):
        raise BadSample("in backward")


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, WIDTH, generator=generator).to(dtype)


def dtype_of(options):
    """Exact where nothing is coded."""
    return torch.float32 if options.get("wire") == "int8" else torch.float64


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def weight_of(rank, step):
    """Return the weight of a rank's batch."""
    return 1 + (2 * rank + step) % 4


def train(rank, world, schedule, options):
    """Weights after each step, how buckets held the parameters in it, and whether it was skipped.

    Args:
        schedule: (step, rank): where it fails.
        options: of FastDDP; "weighs": batches have weights.
    """
    options = dict(options)
    weighs = options.pop("weighs", False)
    dtype = dtype_of(options)
    net = Net(options.pop("norm", False)).to(dtype)
    model = FastDDP(
        net, bucket_cap_mb=0.0001, faults=Faults(on_skip="average_others"), **grouped(options)
    )
    optimizer = optimizer_of(net)
    names = [name for name, _ in net.named_parameters()]
    told = []
    for step in range(STEPS):
        net.fails = schedule.get((step, rank), "")
        optimizer.zero_grad()
        plan = [[names[i] for i in bucket.params] for bucket in model._engine.plan.buckets]
        weight = weight_of(rank, step) if weighs else 1
        if weighs:
            model.add_weight(weight)
        with model.skipping(BadSample, MemoryError) as attempt:
            if net.fails == "before":
                raise MemoryError("before the forward")
            (model(batch(rank, step, dtype)) * weight).backward()
        optimizer.step()
        weights = {name: param.detach().clone() for name, param in net.named_parameters()}
        told.append((weights, plan, attempt.skipped))
    return told


def given(where, plan):
    """Parameters for which a rank that fails there has given its gradients."""
    names = {name for bucket in plan for name in bucket}
    if not where:
        return names
    later = {
        f"layers.{i}.{kind}" for i in range(FAILING + 1, LAYERS) for kind in ("weight", "bias")
    }
    later |= {"norm.weight", "norm.bias"}
    sent = set()
    for bucket in plan:
        if where != "backward" or not set(bucket) <= later:
            break
        sent |= set(bucket)
    return sent


def expected(world, schedule, plans, options):
    """One process that averages the gradients that count."""
    dtype = dtype_of(options)
    net = Net(options.get("norm", False)).to(dtype)
    optimizer, steps = optimizer_of(net), []
    for step in range(STEPS):
        sums, weights = {}, {}
        for rank in range(world):
            net.zero_grad()
            weight = weight_of(rank, step) if options.get("weighs") else 1
            (net(batch(rank, step, dtype)) * weight).backward()
            counted = given(schedule.get((step, rank), ""), plans[step])
            for name, param in net.named_parameters():
                if name in counted:
                    sums.setdefault(name, []).append(param.grad.clone())
                    weights[name] = weights.get(name, 0) + weight
        for name, param in net.named_parameters():
            grads = sums.get(name)
            param.grad = sum(grads) / weights[name] if grads else None
        optimizer.step()
        steps.append({name: param.detach().clone() for name, param in net.named_parameters()})
    return steps


def drawn(seed, world):
    """Failures of some ranks in some steps; in one step all ranks fail before they begin."""
    draw = random.Random(seed)
    schedule = {}
    for step in range(STEPS):
        for rank in range(world):
            if draw.random() < 0.3:
                schedule[step, rank] = draw.choice(["before", "forward", "backward"])
    return schedule | {(STEPS - 2, rank): "before" for rank in range(world)}


CASES = [
    (2, {(0, 1): "forward"}, {}),
    (3, {(0, 0): "backward", (3, 2): "backward"}, {}),
    (3, {(2, 0): "before", (4, 1): "forward"}, {"norm": True}),
    (3, drawn(1, 3), {}),
    (2, {(0, 0): "forward", (0, 1): "before"}, {}),
    (2, drawn(2, 2), {"norm": True}),
    (3, drawn(3, 3), {"zero": 1}),
    (2, drawn(4, 2), {"zero": 1, "shared_memory": False}),
    (3, drawn(5, 3), {"shared_memory": False}),
    (3, drawn(6, 3), {"gradient_as_bucket_view": False}),
    (3, drawn(7, 3), {"wire": "int8"}),
    (2, drawn(8, 2), {"wire": "int8", "zero": 1}),
    (1, {(1, 0): "forward", (3, 0): "backward"}, {}),
    (3, {(1, 1): "backward", (1, 2): "forward", (4, 2): "before"}, {"weighs": True}),
    (3, drawn(17, 3), {"weighs": True, "zero": 1}),
    (1, {(1, 0): "forward", (3, 0): "backward"}, {"weighs": True}),
]


def check_weights(world, schedule, options):
    ranks = run_ranks(train, world, schedule, options)
    plans = [plan for _, plan, _ in ranks[0]]
    if world == 1:  # nothing is sent, and a step that failed has no gradients at all
        plans = [[[name for bucket in plan for name in bucket]] for plan in plans]
    wanted = expected(world, schedule, plans, options)
    atol = 0.03 if dtype_of(options) is torch.float32 else 1e-12
    for rank, told in enumerate(ranks):
        for step, (weights, plan, skipped) in enumerate(told):
            assert plan == ranks[0][step][1]
            assert skipped == ((step, rank) in schedule)
            for name, weight in weights.items():
                assert torch.equal(weight, ranks[0][step][0][name]), (step, rank, name)
                torch.testing.assert_close(weight, wanted[step][name], rtol=0, atol=atol)


@pytest.mark.slow(
    but=(
        "2-schedule0-options0",
        "3-schedule2-options2",
        "3-schedule6-options6",
        "3-schedule10-options10",
        "1-schedule12-options12",
        "3-schedule13-options13",
    )
)
@pytest.mark.parametrize(("world", "schedule", "options"), CASES)
def test_weights_are_those_of_the_batches_that_count(world, schedule, options):
    check_weights(world, schedule, options)


def test_failures_of_this_run():
    """Other ones each time; the seed repeats them."""
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    draw = random.Random(seed)
    options = {"norm": draw.random() < 0.5, "zero": draw.choice([0, 1])}
    check_weights(3, drawn(seed, 3), options | {"wire": draw.choice(["fp32", "int8"])})


def without_mean(rank, world, how):
    """Return each rank's error where the ranks that are left make no mean."""
    model = FastDDP(Net(), faults=Faults(on_skip="average_others"))
    try:
        for step in range(2):
            fails = step == 1 and rank == 1
            model.module.fails = how.split()[-1] if fails else ""
            model.add_weight(0 if how != "backward" and step == 1 and rank == 0 else 2)
            with model.skipping(BadSample):
                model(batch(rank, step)).backward()
            if how != "backward":
                model.zero_grad()
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("forward", "weights of step 2 make no mean: they are zero on all ranks"),
        ("in backward", "they are zero on all ranks that did not leave it out"),
        ("backward", "weights of step 2 make no mean: ranks left it out, and it adds to the mean"),
    ],
    ids=["none", "none is left", "added"],
)
def test_ranks_that_are_left_make_no_mean(how, words):
    texts = run_ranks(without_mean, 2, how)
    assert all(words in text for text in texts), texts


def weighs_on(rank, world):
    """Go on with the gradients of a step that a rank has left out."""
    model, found = FastDDP(Net().double(), faults=Faults(on_skip="average_others")), []
    for step in range(2):
        model.module.fails = "forward" if step == 0 and rank == 1 else ""
        model.add_weight(2 + rank)
        with model.skipping(BadSample):
            (model(batch(rank, step, torch.float64)) * (2 + rank)).backward()
        found = [p.grad.clone() for p in model.parameters()]
    return found


def test_the_mean_of_the_others_goes_on():
    net = Net().double()
    for rank, step in ((0, 0), (0, 1), (1, 1)):
        (net(batch(rank, step, torch.float64)) * (2 + rank) / 7).backward()
    for found in run_ranks(weighs_on, 2):
        for grad, param in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-12, atol=1e-14)


def one_step(rank, model, fails=()):
    model.module.fails = "forward" if rank in fails else ""
    with model.skipping(BadSample) as attempt:
        model(batch(rank, 0)).backward()
    return attempt


def break_contract(rank, world, how):
    """Return each rank's error for a script that breaks the contract."""
    model = FastDDP(Net(), faults=Faults(on_skip="average_others"))
    optimizer = optimizer_of(model)
    one_step(rank, model)
    optimizer.step()
    try:
        if how == "inside":
            with model.skipping(RuntimeError):
                optimizer.step()
        elif how == "no backward":
            with model.skipping(BadSample):
                model(batch(rank, 0))
        elif how == "micro-batch":
            with model.skipping(BadSample), model.no_sync():
                model(batch(rank, 0)).backward()
        elif how == "afterwards":
            with model.skipping(BadSample):
                model(batch(rank, 0)).backward()
                raise BadSample("when the step was over")
        elif how == "no step":
            if not one_step(rank, model, fails=(1,)).skipped:
                optimizer.step()
            one_step(rank, model)
        elif how == "nothing":
            with model.skipping():
                pass
        elif how == "SyncBatchNorm":
            model.module.norm = nn.SyncBatchNorm(WIDTH)
            one_step(rank, model)
    except (RuntimeError, ValueError, BadSample) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("inside", "optimizer.step() is called inside"),
        ("no backward", "this one held 0"),
        ("micro-batch", "this one held 0"),
        ("afterwards", "when the step was over"),
        ("no step", "only 2 of 3 ranks have called optimizer.step() after step 2"),
        ("nothing", "expects the classes of errors"),
        ("SyncBatchNorm", "'norm' is a SyncBatchNorm"),
    ],
)
def test_what_would_leave_ranks_with_other_weights_is_an_error_on_every_rank(how, words):
    texts = run_ranks(break_contract, 3, how)
    assert all(words in text for text in texts), texts
    if how == "no step":
        assert ["rank 1 not" in text for text in texts] == [False, True, False]


def raise_another(rank, world):
    model = FastDDP(Net(), faults=Faults(on_skip="average_others"))
    with suppress(MemoryError), model.skipping(BadSample):
        raise MemoryError("not asked for")
    model(batch(rank, 0)).backward()  # the step that no rank has made
    return model.sync_stats().steps


def test_other_errors_pass():
    assert run_ranks(raise_another, 2) == [1, 1]


def ask(rank, world, options):
    try:
        FastDDP(Net(), **grouped(options)).skipping(BadSample).__enter__()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs FastDDP(model, faults=Faults(on_skip='average_others'))"),
        ({"on_skip": "ignore"}, "on_skip must be one of raise, average_others"),
    ],
)
def test_what_has_to_be_asked_for(options, words):
    [text] = run_ranks(ask, 1, options)
    assert words in text
