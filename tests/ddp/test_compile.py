"""torch.compile: before and after wrapping, graphs split where buckets end, and what is refused."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fastsync.testing import run_ranks
from tests.helpers.models import wrap


class Net(nn.Module):
    """Registered in another order than used; one layer used twice, one frozen, one tied."""

    def __init__(self, width=128, layers=6):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.layers[1].bias.requires_grad = False
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.layers[2].weight

    def forward(self, x):
        for layer in [*self.layers[3:], *self.layers[:3], self.layers[4]]:
            x = torch.relu(layer(x))
        return self.norm(self.tied(x))


class Breaking(Net):
    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return super().forward(x)


def compiled(kind, model, when, backend, **options):
    if when == "before":
        return wrap(kind, torch.compile(model, backend=backend), **options)
    return torch.compile(wrap(kind, model, **options), backend=backend)


def train(model, rank, sizes=(4, 4, 4, 6, 6)):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step, size in enumerate(sizes):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(size, 128)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def compare(rank, world, build, when, backend, options):
    used = {"find_unused_parameters": build is Breaking}
    eager = train(wrap("torch", build(), **used), rank)
    ours = train(compiled("fast", build(), when, backend, **options), rank)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, eager, strict=True))


SMALL = {"bucket_cap_mb": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_training_equals_eager_ddp(when):
    assert all(run_ranks(compare, 2, Net, when, "aot_eager", SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("build", "backend", "options"),
    [(Breaking, "aot_eager", SMALL), (Net, "aot_eager", {}), (Net, "inductor", SMALL)],
    ids=["graph breaks", "one bucket", "inductor"],
)
def test_more_training_equals_eager_ddp(build, when, backend, options):
    assert all(run_ranks(compare, 2, build, when, backend, options, timeout=300))


def watched(events):
    """A backend whose backward graphs report when they run."""
    from torch._dynamo.backends.common import aot_autograd  # more than a second

    def backward(graph, inputs):
        def run(*args):
            events.append("graph")
            return graph(*args)

        return run

    return aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=backward)


def watch_steps(rank, world, when, options, mode):
    torch._dynamo.config.optimize_ddp = mode
    events = []

    def hook(state, bucket):
        events.append(bucket.index())
        return allreduce_hook(state, bucket)

    model = compiled("fast", Net(), when, watched(events), **options)
    wrapped = model if when == "before" else model._orig_mod
    wrapped.register_comm_hook(None, hook)
    seen = []
    for size in (2, 2, 5, 7):  # the third recompiles
        events.clear()
        model(torch.randn(size, 128)).sum().backward()
        seen.append(list(events))
    return seen, len(wrapped.sync_stats()["buckets"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "options"),
    [
        ("before", {"bucket_cap_mb_list": [0.01, 0.2, 0.01]}),
        ("after", SMALL),
        ("after", {"bucket_cap_mb": 0.05}),
    ],
    ids=["listed", "equal", "one each"],
)
def test_graphs_are_split_where_buckets_end(when, options):
    """Each graph of the backward completes one bucket, which leaves before the next graph runs."""
    for seen, buckets in run_ranks(watch_steps, 2, when, options, True):
        assert buckets > 2
        wanted = [event for bucket in range(buckets) for event in ("graph", bucket)]
        for step in seen[1:]:
            assert step == wanted


@pytest.mark.slow
def test_an_unsplit_graph_sends_everything_at_its_end():
    """The comparison that makes the test above mean something."""
    for seen, buckets in run_ranks(watch_steps, 2, "after", {"bucket_cap_mb": 0.1}, False):
        assert seen[1] == ["graph", *range(buckets)]


def compile_the_backward(rank, world):
    model = wrap("fast", Net())
    loss = model(torch.ones(2, 128)).sum()
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="does not work with compiled autograd"),
    ):
        loss.backward()


def test_compiled_autograd_is_refused():
    run_ranks(compile_the_backward, 2)


def python_reducer(rank, world):
    if rank == 0:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    with pytest.raises(RuntimeError, match="'python_reducer'") as caught:
        wrap("fast", Net())
    return str(caught.value)


def test_the_python_reducer_is_refused_on_every_rank():
    first, second = run_ranks(python_reducer, 2)
    assert first in second


class Outer(nn.Module):
    """A FastDDP inside a compiled module, beside layers of its own."""

    def __init__(self, kind):
        super().__init__()
        self.inner = wrap(kind, Net())

    def forward(self, x):
        return self.inner(2 * x).sum()


def inside(rank, world):
    found = []
    for kind in ("fast", "torch"):
        outer = Outer(kind)
        torch._dynamo.reset()
        step = torch.compile(outer, backend="aot_eager") if kind == "fast" else outer
        step(torch.full((2, 128), rank + 1.0)).backward()
        found.append([p.grad for p in outer.parameters() if p.requires_grad])
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_a_wrapped_module_inside_a_compiled_one():
    assert all(run_ranks(inside, 2))
