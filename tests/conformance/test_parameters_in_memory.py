"""Parameters whose memory a script looks at, shares, or has integers in."""

import pytest
import torch
from torch import nn

from fastsync import FastDDP
from tests.conformance.stages import STAGES, batch, check, full, loss_of, net, train
from tests.helpers.teams import run_ranks

REPLICATED = ["zero0", "zero1", "zero1-small", "zero2"]


class Quantised(nn.Module):
    """A linear layer of frozen codes, with a trained scale and an adapter."""

    def __init__(self, dtype=torch.int8):
        super().__init__()
        codes = (torch.arange(35).view(7, 5) % 11 - 5).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((7,), 0.1))
        self.adapter = nn.Linear(5, 7)

    def forward(self, x):
        return x @ (self.codes.float() * self.scale[:, None]).T + self.adapter(x)


class QuantisedFirst(nn.Module):
    """A base of codes before layers that are trained."""

    def __init__(self):
        super().__init__()
        self.base = Quantised(torch.uint8)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x)))


def holds_codes(wrap, rank):
    model = wrap(net(QuantisedFirst))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank)
    return full(model)


def holds_codes_in_a_group_of_their_own(wrap, rank):
    model = wrap(net(Quantised))
    codes = [p for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": codes}, {"params": trained, "lr": 0.1}], momentum=0.9)
    train(model, optimizer, rank)
    only_codes = torch.optim.SGD(codes, 0.1)
    only_codes.step()
    assert not any(len(optimizer.state.get(p, {})) for p in codes)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(model, optimizer, rank)
    return full(model)


def holds_codes_made_before(wrap, rank):
    module = net(Quantised)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    model = wrap(module)
    train(model, optimizer, rank)
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "script", [holds_codes, holds_codes_in_a_group_of_their_own], ids=lambda s: s.__name__
)
def test_an_optimizer_holds_frozen_integers(script, stage):
    check(script, stage)


@pytest.mark.slow(but=("zero1-small", "zero3"))
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "fully_shard"])
def test_an_optimizer_made_before_holds_frozen_integers(stage):
    check(holds_codes_made_before, stage)


class Language(nn.Module):
    """An embedding and a head of the same sizes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.words(x))))


def with_words(wrap, rank, module):
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model((torch.arange(6) * (step + rank + 1)) % 9)).backward()
        optimizer.step()
    return full(model)


def ties_by_storage(wrap, rank):
    module = net(Language)
    module.head.weight.data = module.words.weight.data
    return with_words(wrap, rank, module)


def overlaps_partly(wrap, rank):
    module = net(Language)
    module.middle.weight.data = module.words.weight.data[3:7]
    return with_words(wrap, rank, module)


def keeps_a_buffer_of_a_parameter(wrap, rank):
    module = net(Language)
    module.register_buffer("first_words", module.words.weight.detach()[:2])
    return with_words(wrap, rank, module)


def ties_by_parameter(wrap, rank):
    module = net(Language)
    module.head.weight = module.words.weight
    return with_words(wrap, rank, module)


def lies_in_one_storage(wrap, rank):
    """Interleaved, but no element belongs to two."""
    module = net(Language)
    both = torch.cat([module.words.weight.detach(), module.head.weight.detach()], dim=1)
    flat = torch.cat([module.middle.weight.detach().flatten(), module.middle.bias.detach()])
    module.words.weight.data, module.head.weight.data = both[:, :4], both[:, 4:]
    module.middle.weight.data, module.middle.bias.data = flat[:16].view(4, 4), flat[16:]
    return with_words(wrap, rank, module)


@pytest.mark.slow(but=("zero1-small", "zero3", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_share_memory(stage):
    """fully_shard is called for each layer, so the two are met in different calls."""
    if stage == "zero0":
        check(ties_by_storage, stage)
        check(overlaps_partly, stage)
        check(keeps_a_buffer_of_a_parameter, stage)
        return
    names = (
        "weight of Embedding.*weight of Linear"
        if stage == "fully_shard"
        else (r"'words.weight' and 'head.weight'")
    )
    remedy = "head.weight = embedding.weight"
    check(ties_by_storage, stage, error=f"{names}.*share memory.*{remedy}")
    names = names.replace("head", "middle")
    check(overlaps_partly, stage, error=f"{names}.*share memory.*{remedy}")
    if stage != "fully_shard":
        names = "'words.weight' and 'buffer first_words'"
        check(keeps_a_buffer_of_a_parameter, stage, error=f"{names}.*share memory")


def ties_later(wrap, rank):
    """By storage, between two steps."""
    model = wrap(net(Language))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model(torch.arange(6) + rank)).backward()
        optimizer.step()
        if step == 1:
            named = dict(model.named_parameters())
            named["module.head.weight"].data = named["module.words.weight"].data
    return full(model)


@pytest.mark.slow(but=("zero1-small",))
@pytest.mark.parametrize("stage", REPLICATED)
def test_parameters_that_share_memory_later(stage):
    error = "'words.weight' and 'head.weight' share memory.*or use zero=0"
    check(ties_later, stage, error=None if stage == "zero0" else error)


def reads_numbers(wrap, rank):
    """Decide by numbers of parameters and gradients, as a log or a threshold needs them."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        params = list(model.parameters())
        seen += [param.grad.square().sum().item() for param in params]
        seen += [float(param.detach().norm()) for param in params]
        seen += [param.grad.abs().max().item() for param in params]
        seen.append(float(torch.isclose(params[0].grad, params[0].grad + 1e-5).all()))
        norm = nn.utils.clip_grad_norm_(params, 10.0)
        if norm.item() > seen[0] ** 0.5:
            optimizer.step()
        if rank == 0:  # which may log it alone
            seen += [norm.item(), torch.stack([norm, norm]).norm().item()]
    return {"seen": torch.tensor(seen), **full(model)}


@pytest.mark.slow(but=("zero1-small", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_of_parameters_and_gradients(stage):
    check(reads_numbers, stage)


def reads_extremes(wrap, rank):
    """Read what needs an element, where a rank has none: of a bias of one number."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)))
    loss_of(model(batch(rank, 0))).backward()
    params, seen = list(model.parameters()), []
    for tensor in (*params, *(param.grad for param in params)):
        values = tensor.detach()
        extremes = (values.max(), values.min(), values.amax(), values.amin(dim=0).sum())
        seen += [float(each) for each in (*extremes, values.norm(float("inf")))]
    norm = nn.utils.clip_grad_norm_(params, 0.01, norm_type=float("inf"))
    torch.optim.SGD(params, 0.1).step()
    if rank == 0:
        seen.append(norm.item())
    return {"seen": torch.tensor(seen), **full(model)}


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", STAGES)
def test_extremes_of_parameters_and_gradients(stage):
    check(reads_extremes, stage)


@pytest.mark.slow(but=("zero1-small", "zero3", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_share_a_storage_or_are_one(stage):
    check(ties_by_parameter, stage)
    if stage == "fully_shard":
        check(lies_in_one_storage, stage, error="non-contiguous")
    else:
        check(lies_in_one_storage, stage)


def looked_at(model):
    """Return what scripts keep of parameters: views, flat views, and addresses."""
    params = list(model.parameters())
    views = [p.detach() for p in params]
    flat = [p.data.view(-1)[1:] for p in params]
    rows = [p.data[0] for p in params]
    return params, [*views, *flat, *rows], [p.data_ptr() for p in params]


def keeps_views(wrap, rank, make, **options):
    model = wrap(net(), **options)
    params, views, addresses = looked_at(model)
    optimizers = make(params)
    results = {}
    for step in range(4):
        if step == 2:
            model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()})
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            with torch.no_grad():
                views[0].mul_(0.99)  # as on the parameter itself
        results |= {f"{step} {i}": view.clone() for i, view in enumerate(views)}
    assert [p.data_ptr() for p in params] == addresses
    return full(model) | results


def adamw(params):
    return [torch.optim.AdamW(params, 0.01)]


def adafactor(params):
    return [torch.optim.Adafactor(params, 0.01)]


def two_optimizers(params):
    return [torch.optim.AdamW(params[:3], 0.01), torch.optim.SGD(params[3:], 0.1, momentum=0.9)]


def two_interleaved_optimizers(params):
    return [torch.optim.AdamW(params[::2], 0.01), torch.optim.Adafactor(params[1::2], 0.01)]


def another_over_the_same(params):
    return [torch.optim.SGD(params, 0.1, momentum=0.9), torch.optim.AdamW(params, 0.01)]


def another_over_some_of_the_same(params):
    return [torch.optim.SGD(params, 0.1, momentum=0.9), torch.optim.AdamW(params[2:5], 0.01)]


def others_in_another_order(params):
    return [torch.optim.SGD(params[::-1], 0.1, momentum=0.9)]


MAKERS = [
    adamw,
    adafactor,
    two_optimizers,
    two_interleaved_optimizers,
    another_over_the_same,
    another_over_some_of_the_same,
    others_in_another_order,
]


class _Keeps:
    def __init__(self, make, **options):
        self.make, self.options = make, options

    def __call__(self, wrap, rank):
        return keeps_views(wrap, rank, self.make, **self.options)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REPLICATED)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_views_of_parameters_stay_views(make, stage):
    """With zero=3 and fully_shard() parameters are DTensors, which have no such views."""
    check(_Keeps(make), stage)


@pytest.mark.slow(but=("two_optimizers-{'elastic': True}", "adamw-{'shared_memory': False}"))
@pytest.mark.parametrize("options", [{"elastic": True}, {"shared_memory": False}], ids=str)
@pytest.mark.parametrize("make", [adamw, two_optimizers, adafactor], ids=lambda m: m.__name__)
def test_views_stay_views_with_other_features(make, options):
    check(_Keeps(make, **options), "zero1")


def keeps_views_from_before_wrapping(wrap, rank):
    module = net()
    params, views, _ = looked_at(module)
    model = wrap(module)
    optimizer = torch.optim.AdamW(params, 0.01)
    train(model, optimizer, rank)
    return full(model) | {str(i): view.clone() for i, view in enumerate(views)}


@pytest.mark.slow(but=("zero1-small", "zero2"))
@pytest.mark.parametrize("stage", REPLICATED)
def test_views_from_before_wrapping_stay_views(stage):
    check(keeps_views_from_before_wrapping, stage)


def homes(rank, world, keeper):
    """Return whether each bucket's parameters have moved, and whether weights are the same."""
    module = net()
    views = [p.detach() for p in module.parameters()] if rank == keeper else []
    model = FastDDP(module, zero=1)
    moved = [home is not None for _, home in model.reducer.sharded._homes]
    train(model, torch.optim.AdamW(model.parameters(), 0.01), rank)
    assert all(torch.equal(v, p) for v, p in zip(views, module.parameters(), strict=False))
    return moved, [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("keeper", [None, 1])
def test_parameters_move_when_they_are_wrapped_unless_a_rank_keeps_views(keeper):
    (moved, weights), (others_moved, other_weights) = run_ranks(homes, 2, keeper)
    assert moved == [True] and others_moved == [keeper is None]
    assert all(map(torch.equal, weights, other_weights))
