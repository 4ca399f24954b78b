"""nonfinite: steps on NaN and infinity are skipped on every rank, or an error on every rank."""

import math
import warnings

import pytest
import torch
from torch import nn, optim

from fastsync import FastDDP, Faults, NonFiniteGradientError
from fastsync.config.arguments import grouped
from fastsync.reducer import core
from tests.helpers.teams import run_ranks
from tests.zero.zero_loops import close

STEPS = 5
BAD_STEP, BAD_RANK = 2, 1
# By name: how FastDDP synchronises.
WAYS = {
    "plain": {},
    "no flags otherwise": {"find_unused_parameters": False},
    "static": {"static_graph": True},
    "copied": {"gradient_as_bucket_view": False},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4"},
    "top-k": {"wire": "topk"},
}


def net():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 700), nn.Tanh(), nn.Linear(700, 2)
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator)


def poison(param, value):
    """In the gradient, as autograd accumulates it: no other parameter's has it."""

    def hook(grad):
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return param.register_hook(hook)


def loop(model, rank, bad=math.nan, skipping=None):
    """Steps, of which one rank poisons one; `skipping`: the script leaves that one out itself."""
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        is_bad = step == BAD_STEP and rank == BAD_RANK
        weight = getattr(model, "module", model)[2].weight
        hook = poison(weight, bad) if is_bad and skipping is None else None
        model(batch(rank, step)).square().mean().backward()
        if hook is not None:
            hook.remove()
        if step != skipping:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def skip_as_by_hand(rank, world, way, bad):
    options = {"find_unused_parameters": True, **WAYS[way]}
    wanted = loop(FastDDP(net(), **grouped(options)), rank, skipping=BAD_STEP)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = loop(FastDDP(net(), faults=Faults(nonfinite="skip"), **grouped(options)), rank, bad)
    return found, wanted, [str(w.message) for w in caught if "NaN" in str(w.message)]


@pytest.mark.slow(but=("static",))
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_step_is_left_out_on_every_rank(way):
    exact = way not in ("int8", "int4", "top-k")  # whose steps carry something over
    results = run_ranks(skip_as_by_hand, 2, way, math.inf if way == "zero 2" else math.nan)
    for rank, (found, wanted, said) in enumerate(results):
        assert all(torch.isfinite(p).all() for p in found)
        assert not exact or all(map(torch.equal, found, wanted))
        assert len(said) == (1 if rank == 0 else 0)
        assert all("'2.weight'" in text and "ranks: 1)" in text for text in said)
    assert all(map(torch.equal, results[0][0], results[1][0]))


def raising(rank, world, options):
    model = FastDDP(
        net(), faults=Faults(nonfinite="raise"), find_unused_parameters=True, **grouped(options)
    )
    with pytest.raises(NonFiniteGradientError) as caught:
        loop(model, rank)
    return str(caught.value), caught.value.parameters, caught.value.ranks


@pytest.mark.slow("1", "2")
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_error_names_parameter_and_rank_on_every_rank(zero):
    for text, parameters, ranks in run_ranks(raising, 3, {"zero": zero}):
        assert "'2.weight'" in text and "(from ranks: 1)" in text
        assert (parameters, ranks) == (["2.weight"], [[1]])


def refused(optimizer):
    """Return the parameters whose gradients a step is refused for, and which ranks gave them."""
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    return caught.value.parameters, caught.value.ranks


def whole_graph(rank, world):
    """Infinity in the loss reaches all gradients; the one that comes first is named first."""
    model = FastDDP(net(), faults=Faults(nonfinite="raise"))
    optimizer = optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        factor = math.inf if step and rank != 1 else 1.0
        (model(batch(rank, step)).square().mean() * factor).backward()
        if step:
            return refused(optimizer)
        optimizer.step()


def test_all_parameters_are_named_in_the_order_of_backward():
    for parameters, ranks in run_ranks(whole_graph, 3):
        assert sorted(parameters) == sorted(name for name, _ in net().named_parameters())
        assert parameters[0].startswith("4.")
        assert ranks == [[0, 2]] * len(parameters)


def accumulated(rank, world, zero):
    """Produce NaN in an earlier one of several backwards of a step, and then fix it by hand."""
    model = FastDDP(net(), faults=Faults(nonfinite="raise"), zero=zero)
    optimizer = optim.SGD(model.parameters(), 0.1)
    outcomes = []
    for mended in (None, False, True):
        optimizer.zero_grad()
        for part in range(3):
            bad = part == 0 and rank == 0 and mended is not None
            hook = poison(model.module[0].bias, math.nan) if bad else None
            model(batch(rank, part)).square().mean().backward()
            if hook is not None:
                hook.remove()
        if mended:
            model.module[0].bias.grad.nan_to_num_(0.0)
        try:
            optimizer.step()
            outcomes.append("stepped")
        except NonFiniteGradientError as error:
            outcomes.append(error.parameters)
    return outcomes


@pytest.mark.slow("1", "2")
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_accumulates_is_not_forgotten_and_may_be_mended(zero):
    for outcomes in run_ranks(accumulated, 2, zero):
        assert outcomes == ["stepped", ["0.bias"], "stepped"]


def two_optimizers(rank, world):
    """Only the optimizer that would step on NaN is held up."""
    model = FastDDP(net(), faults=Faults(nonfinite="skip"))
    first, second = model.module[0], model.module[2]
    optimizers = [optim.SGD(layer.parameters(), 0.1) for layer in (first, second)]
    hook = poison(first.weight, math.nan) if rank == 1 else None
    model(batch(rank, 0)).square().mean().backward()
    before = [layer.weight.detach().clone() for layer in (first, second)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for optimizer in optimizers:
            optimizer.step(lambda: torch.tensor(3.0))
    del hook
    return [torch.equal(a, b.weight) for a, b in zip(before, (first, second), strict=True)]


def test_only_the_optimizer_of_a_bad_gradient_is_held_up():
    assert run_ranks(two_optimizers, 2) == [[True, False]] * 2


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, 4, sparse=True)
        self.line = nn.Linear(4, 1)

    def forward(self, x):
        return self.line(self.words(x))


def sparse_rows(rank, world):
    model = FastDDP(Words(), faults=Faults(nonfinite="raise"))
    optimizer = optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(torch.tensor([rank, 7])).sum()
        if step and rank == 1:  # the rows are infinite, the dense layer's gradient is not
            model.module.words.weight.register_hook(lambda grad: grad * math.inf)
        loss.backward()
        if step:
            return refused(optimizer)
        optimizer.step()


def test_rows_of_sparse_gradients_are_looked_at():
    assert run_ranks(sparse_rows, 2) == [(["words.weight"], [[1]])] * 2


def alone(rank, world):
    model = FastDDP(net(), faults=Faults(nonfinite="raise"))
    nothing = model.clip_grad_norm_(0.0).item()
    optimizer = optim.SGD(model.parameters(), 0.1)
    poison(model.module[0].weight, math.inf)
    model(batch(0, 0)).sum().backward()
    return nothing, refused(optimizer)


def test_one_rank_alone_looks_too_and_may_clip_nothing():
    assert run_ranks(alone, 1) == [(0.0, (["0.weight"], [[0]]))]


def without_looking(rank, world):
    errors = []
    with pytest.raises(ValueError, match="nonfinite must be one of ignore, skip, raise") as error:
        FastDDP(net(), faults=Faults(nonfinite="stop"))
    errors.append(error)
    model = FastDDP(net(), faults=Faults(nonfinite="skip"))
    with pytest.raises(ValueError, match="LBFGS"):
        optim.LBFGS(model.parameters()).step(lambda: model(batch(rank, 0)).sum())
    return len(errors)


def test_what_cannot_be_looked_at_is_refused():
    assert run_ranks(without_looking, 2) == [1, 1]


def clipped(rank, world, zero):
    """Torch's function, and the model's: after several backwards, too, and with small norms."""
    results = []
    for ours in (False, True):
        model = FastDDP(net(), zero=zero)
        optimizer = optim.SGD(model.parameters(), 0.5, momentum=0.5)
        norms = []
        for step, max_norm in enumerate([0.1, 1e6, 0.01, 0.5, 0.1]):
            optimizer.zero_grad()
            for part in range(1 + step % 2):
                model(batch(rank, 10 * step + part)).square().mean().backward()
            if ours:
                norms.append(model.clip_grad_norm_(max_norm))
            else:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
        results.append(([p.detach().clone() for p in model.parameters()], norms))
    return results


@pytest.mark.slow(but=("1-0",))
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_clipping_by_the_model_is_torchs(zero, world):
    results = run_ranks(clipped, world, zero)
    for (wanted, wanted_norms), (found, found_norms) in results:
        assert close(found, wanted)
        assert torch.allclose(torch.stack(found_norms), torch.stack(wanted_norms), rtol=1e-5)
        assert found_norms[0].dtype is torch.float32 and found_norms[0].shape == ()
    for mine in results[1:]:
        assert all(map(torch.equal, mine[1][0], results[0][1][0]))


def other_norms(rank, world, zero):
    model = FastDDP(net(), zero=zero)
    optimizer = optim.SGD(model.parameters(), 0.0)
    found = []
    for norm_type in (2.0, math.inf, 1.0):
        optimizer.zero_grad()
        model(batch(rank, 0)).square().mean().backward()
        found.append(model.clip_grad_norm_(1e9, norm_type).item())
        optimizer.step()
    model.module[0].bias.grad[0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert math.isnan(model.clip_grad_norm_(1.0).item())
    return found, model.module[2].weight.grad.isnan().all().item()


def test_other_norms_and_norms_that_are_none():
    first = run_ranks(other_norms, 2, 0)
    assert first[0] == first[1] and first[0][1]
    for found, poisoned in run_ranks(other_norms, 2, 2):
        assert found == pytest.approx(first[0][0], rel=1e-4) and poisoned


def tensors():
    generator = torch.Generator().manual_seed(11)
    base = torch.randn(70, 90, generator=generator)
    return [
        torch.randn(200_003, generator=generator),
        base.t(),
        base[::2, 1::3],
        base.bfloat16(),
        base.half()[3:],
        base.double(),
        torch.randn(7, dtype=torch.complex64, generator=generator).conj(),
        torch.empty(0),
        torch.tensor(3.0),
        base[:3].to_sparse(),
    ]


def test_squares_are_those_of_the_plain_sum():
    plain = [t.to_dense().to(torch.complex128).abs().square().sum().item() for t in tensors()]
    assert core.square_sums(tensors()) == pytest.approx(plain, rel=1e-12)
    huge = torch.full((3,), 3e38)
    assert core.square_sums([huge]) == pytest.approx([3 * float(huge[0]) ** 2])


def test_squares_do_not_depend_on_threads():
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            sums.append(core.square_sums(tensors()))
    finally:
        torch.set_num_threads(before)
    assert sums[0] == sums[1]


@pytest.mark.slow(but=("inf",))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_found_anywhere(bad):
    assert all(core.all_finite(tensors()))
    for place in (0, 15, 16, 65_535, 65_536, -1):
        poisoned = [t.clone() for t in tensors()]
        for tensor in poisoned:
            if tensor.layout is torch.strided and tensor.numel():
                flat = tensor.view(-1) if tensor.is_contiguous() else tensor.t().reshape(-1)
                if tensor.is_contiguous():
                    flat[place % flat.numel()] = bad
                else:
                    tensor[-1, -1] = bad
        finite = core.all_finite(poisoned)
        assert finite == [t.layout is not torch.strided or not t.numel() for t in poisoned]


def frozen_since(rank, world):
    """Freeze the poisoned parameter before the step; the next plan lacks it."""
    model = FastDDP(net(), faults=Faults(nonfinite="raise"))
    optimizer = optim.SGD(model.parameters(), 0.1)
    weight = model.module[0].weight
    hook = poison(weight, math.nan) if rank == 0 else None
    for _ in range(2):
        model(batch(rank, 0)).square().mean().backward()
        if hook is not None:
            hook.remove()
        weight.requires_grad_(False)
    return refused(optimizer)[0]


def test_what_was_frozen_since_is_looked_at():
    assert run_ranks(frozen_since, 2) == [["0.weight"]] * 2


def in_doubles(rank, world):
    model = FastDDP(net().double())
    model(batch(rank, 0).double()).square().mean().backward()
    return model.clip_grad_norm_(1.0).dtype


def test_a_norm_of_doubles_is_one():
    assert run_ranks(in_doubles, 2) == [torch.float64] * 2
