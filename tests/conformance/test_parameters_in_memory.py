"""Parameters whose memory a script looks at, shares, or has integers in."""

import pytest
import torch
from torch import nn

from tests.conformance.stages import STAGES, batch, check, full, loss_of, net

REPLICATED = ["zero0", "zero1", "zero1-small", "zero2"]


def train(model, optimizer, rank, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()


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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "script", [holds_codes, holds_codes_in_a_group_of_their_own], ids=lambda s: s.__name__
)
def test_an_optimizer_holds_frozen_integers(script, stage):
    check(script, stage)


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


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_share_a_storage_or_are_one(stage):
    check(ties_by_parameter, stage)
    if stage == "fully_shard":
        check(lies_in_one_storage, stage, error="non-contiguous")
    else:
        check(lies_in_one_storage, stage)
