"""What scripts do with DTensors as if they were whole: read numbers, draw, and write into parts.

Each function does the same with the copy's tensors, and compares. Results are the copy's, or an
error on every rank.
"""

import torch
from torch import nn

# What a number is read of, and how far from the copy's it may be, in units of the sum of magnitudes
# and the distance of one number to the next.
NUMBERS = {
    "sum": (lambda t: t.sum(), 8),
    "norm": (lambda t: t.norm(), 8),
    "mean of squares": (lambda t: t.float().square().mean(), 64),
    "greatest": (lambda t: t.abs().max(), 0),
    "positive": (lambda t: (t > 0).sum(), 0),
}
DRAWS = {
    "normal": lambda t: t.normal_(0.0, 0.1),
    "uniform": lambda t: t.uniform_(-0.1, 0.1),
    "bernoulli": lambda t: t.bernoulli_(0.5),
    "noise": lambda t: t.add_(torch.randn_like(t), alpha=2**-6),
    "truncated": lambda t: nn.init.trunc_normal_(t, std=0.1, a=-0.2, b=0.2),
    "kaiming": lambda t: nn.init.kaiming_uniform_(t) if t.dim() > 1 and t.numel() else t,
    "xavier": lambda t: nn.init.xavier_normal_(t) if t.dim() > 1 and t.numel() else t,
}
PARTS = {
    "first": lambda t: t[0].mul_(0.5),
    "last": lambda t: t[-1].zero_(),
    "set": lambda t: t.__setitem__(0, 0.25),
    "slice": lambda t: t[1:].mul_(0.5),
    "flat": lambda t: t.view(-1).mul_(0.5),
    "column": lambda t: t[..., 0].mul_(0.5),
}
REFUSED = ("writes into a part of a DTensor", "redistribut")  # the latter by torch


def read(case):
    """Read numbers of parameters and gradients."""
    name = case.apart.choice(tuple(NUMBERS))
    case.note(f"read: {name}")
    number, units = NUMBERS[name]
    for each, param in case.params.items():
        pairs = [(param, case.copies[each])]
        if case.before[each] is not None:
            pairs.append((param.grad, case.copies[each].grad))
        for ours, theirs in pairs:
            if theirs.numel() == 0 and name != "sum":
                continue
            found, wanted = (float(number(t.detach())) for t in (ours, theirs))
            eps = max(torch.finfo(dtype).eps for dtype in (theirs.dtype, torch.float32))
            bound = units * eps * float(theirs.detach().double().norm(1))
            assert abs(found - wanted) <= bound, f"{name} of {each}: {found}, not {wanted}"


def read_alone(case):
    """One rank alone reads a norm that all have computed."""
    grads = [param.grad for each, param in case.params.items() if case.before[each] is not None]
    case.note("read alone")
    reader = case.apart.randrange(case.seat.world)
    if not grads:
        return
    norm = nn.utils.get_total_norm(grads)
    theirs = [param.grad for param in case.copies.values() if param.grad is not None]
    wanted = nn.utils.get_total_norm(theirs)
    if case.seat.rank == reader:
        assert abs(float(norm) - float(wanted)) <= 0.02 * float(wanted), (norm, wanted)


def draw(case):
    """Draw weights anew; all generators are in one state afterwards."""
    name = case.apart.choice(tuple(DRAWS))
    case.note(f"draw: {name}")
    chosen = [each for each in case.params if case.apart.random() < 0.5]
    seed, states = case.apart.randrange(1 << 40), []
    for tensors in (case.params, case.copies):
        torch.default_generator.manual_seed(seed)
        for each in chosen:
            with torch.no_grad():
                DRAWS[name](tensors[each])
        states.append(torch.default_generator.get_state())
    assert torch.equal(*states), "ranks would draw other numbers from here on"
    case.compare_weights()


def write_part(case):
    """Write into a part of a parameter; where that is a copy, all ranks raise."""
    name = case.apart.choice(tuple(PARTS))
    case.note(f"part: {name}")
    each = case.apart.choice(tuple(case.params))
    if case.copies[each].numel() == 0:
        return
    refused = False
    with torch.no_grad():
        try:
            PARTS[name](case.params[each])
        except RuntimeError as error:
            if not any(text in str(error) for text in REFUSED):
                raise
            refused = True
        everyone = case.gathered(torch.tensor([float(refused)]))
        assert bool((everyone == everyone[0]).all()), f"some ranks alone refuse {name} of {each}"
        if not refused:
            PARTS[name](case.copies[each])
    case.compare_weights()


AS_WHOLE = (read, read_alone, draw, write_part)
