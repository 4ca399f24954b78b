"""Scripts that read, change and reset what an optimizer keeps of parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conformance.stages import (
    SHARDED_PARAMETERS,
    STAGES,
    batch,
    check,
    full,
    loss_of,
    net,
    train,
    whole,
)

REPLICATED = [stage for stage in STAGES if stage not in SHARDED_PARAMETERS]
SPREAD = ["zero1", "zero1-small", "zero2"]


def with_state(model, optimizer):
    """Return weights and the whole state by position of the parameter."""
    saved = optimizer.state_dict()["state"]
    state = {
        f"{index} {name}": whole(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
        for index, values in saved.items()
        for name, value in values.items()
    }
    return full(model) | state


def changed(wrap, rank, change, make=torch.optim.AdamW, settings=None):
    """Call `change(params, optimizer)` between steps."""
    model = wrap(net())
    optimizer = make(model.parameters(), **{"lr": 0.01, **(settings or {})})
    train(model, optimizer, rank, range(2))
    found = change(list(model.parameters()), optimizer) or {}
    train(model, optimizer, rank, range(2, 4))
    return with_state(model, optimizer) | found


def pop(params, optimizer):
    for p in params[::2]:
        optimizer.state.pop(p)
    assert optimizer.state.pop(params[0], None) is None


def delete_what_is_gone(params, optimizer):
    for p in params:
        del optimizer.state[p]
    with pytest.raises(KeyError):
        del optimizer.state[params[0]]
    with pytest.raises(KeyError):
        optimizer.state.pop(params[0])


def assign_nothing(params, optimizer):
    for p in params[:3]:
        optimizer.state[p] = {}


def clear(params, optimizer):
    optimizer.state.clear()
    assert len(optimizer.state) == 0 and params[0] not in optimizer.state


def zero_moments(params, optimizer):
    for p in params:
        optimizer.state[p]["exp_avg"].zero_()


def scale_together(params, optimizer):
    values = [state["exp_avg"] for state in optimizer.state.values()]
    torch._foreach_mul_(values, 0.25)


def reset_steps(params, optimizer):
    for state in optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])


def reset_steps_in_place(params, optimizer):
    for state in optimizer.state.values():
        state["step"].zero_()


def mask_moments(params, optimizer):
    """Not alike for all elements."""
    for p in params:
        mask = (torch.arange(p.numel()) % 3 == 0).view(p.shape).float()
        optimizer.state[p]["exp_avg"].mul_(mask)


def mix_with_parameters(params, optimizer):
    with torch.no_grad():
        for p in params:
            optimizer.state[p]["exp_avg"].add_(p, alpha=0.1)
            p.add_(optimizer.state[p]["exp_avg"])
            p.lerp_(end=optimizer.state[p]["exp_avg_sq"], weight=0.1)


def copy_into(params, optimizer):
    for i, p in enumerate(params):
        optimizer.state[p]["exp_avg"].copy_(torch.linspace(0, 0.01 * i, p.numel()).view(p.shape))


def assign_whole(params, optimizer):
    for i, p in enumerate(params):
        optimizer.state[p] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.linspace(0, 0.01 * i, p.numel()).view(p.shape),
            "exp_avg_sq": torch.full_like(p, 0.01),
        }


def swap(params, optimizer):
    """Entries put aside and put back."""
    kept = {p: dict(optimizer.state[p]) for p in params}
    optimizer.state.clear()
    for p, values in kept.items():
        optimizer.state[p] = values


def rebuild_as_lightning(params, optimizer):
    for p, values in optimizer.state.items():
        optimizer.state[p] = type(values)({name: value.to("cpu") for name, value in values.items()})


def read(params, optimizer):
    found = {}
    for i, (p, state) in enumerate(optimizer.state.items()):
        assert any(p is q for q in params) and p in optimizer.state
        assert state["exp_avg"].shape == p.shape
        found[f"{i} norm"] = whole(state["exp_avg"].norm())
        found[f"{i} values"] = whole(state["exp_avg_sq"].clone())
        found[f"{i} steps"] = whole(state["step"])
        found[f"{i} names"] = torch.tensor(len(state))
    found["entries"] = torch.tensor([len(optimizer.state), bool(optimizer.state)])
    return found


def keep_more(params, optimizer):
    for i, p in enumerate(params):
        optimizer.state[p]["age"] = i
        optimizer.state[p]["before"] = torch.ones_like(p)
    assert all(optimizer.state[p]["age"] == i for i, p in enumerate(params))
    assert all("before" in optimizer.state[p] for p in params)
    for p in params:
        del optimizer.state[p]["before"]


CHANGES = [
    pop,
    delete_what_is_gone,
    assign_nothing,
    clear,
    zero_moments,
    scale_together,
    reset_steps,
    reset_steps_in_place,
    mask_moments,
    mix_with_parameters,
    copy_into,
    swap,
    rebuild_as_lightning,
    read,
    keep_more,
]
REPLICATED_ONLY = [assign_whole]  # DTensors do not mix with tensors


def is_mixed(change):
    return change in (mask_moments, copy_into)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_take_effect(change, stage):
    if stage in SHARDED_PARAMETERS and is_mixed(change):
        check(changed, stage, change, error="mixed torch.Tensor and DTensor")
    else:
        check(changed, stage, change)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REPLICATED)
@pytest.mark.parametrize("change", REPLICATED_ONLY, ids=lambda change: change.__name__)
def test_changes_with_whole_tensors_take_effect(change, stage):
    check(changed, stage, change)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SPREAD)
@pytest.mark.parametrize("make", ["SGD", "RMSprop", "Adagrad", "NAdam", "ASGD", "Rprop"])
def test_other_optimizers_are_reset(stage, make):
    momentum = {"momentum": 0.9} if make in ("SGD", "RMSprop") else {}
    for change in (pop, assign_nothing):
        check(changed, stage, change, getattr(torch.optim, make), momentum)


class Matrix(nn.Module):
    """Parameters that Adafactor keeps rows and columns of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def looks_at_rows(wrap, rank):
    model = wrap(net(Matrix))
    optimizer = torch.optim.Adafactor(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    found = {}
    for i, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            found[f"{i} {name}"] = whole(value.clone())
            if name == "row_var":
                value.mul_(2)
    optimizer.state.pop(next(iter(model.parameters())))
    train(model, optimizer, rank, range(2, 4))
    return with_state(model, optimizer) | found


@pytest.mark.slow(but=("zero1-small", "zero2"))
@pytest.mark.parametrize("stage", REPLICATED)
def test_state_of_whole_matrices(stage):
    check(looks_at_rows, stage)


def views(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    for state in optimizer.state.values():
        state["exp_avg"][0].zero_()
    return full(model)


def copies(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    copy.deepcopy(optimizer)
    return full(model)


def communicates(wrap, rank):
    """Average the ranks' states, which are the same under DDP."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    for state in optimizer.state.values():
        dist.all_reduce(state["exp_avg"])
        state["exp_avg"] /= dist.get_world_size()
    return full(model)


@pytest.mark.slow(but=("zero1-small",))
@pytest.mark.parametrize("stage", SPREAD)
def test_what_cannot_be_is_an_error(stage):
    check(views, stage, error="view of a value of the optimizer's state.*copy_")
    check(communicates, stage, error="allreduce_.default cannot take a value of the optimizer's")
    check(copies, stage, error="use optimizer.state_dict\\(\\), on every rank")


class ScheduleFree(torch.optim.Optimizer):
    """Optimizer like schedulefree's: it evaluates an average of what it trains; both are in `z` and
    the parameter.
    """

    def __init__(self, params, lr=0.1, beta=0.9, early=False):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})
        for group in self.param_groups if early else ():
            for p in group["params"]:
                self.state[p]["z"] = torch.clone(p.detach())

    def _switch(self, train):
        with torch.no_grad():
            for group in self.param_groups:
                if group["train_mode"] != train:
                    weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                    for p in group["params"]:
                        state = self.state[p]
                        if "z" in state:
                            p.lerp_(end=state["z"].to(p.device), weight=weight)
                    group["train_mode"] = train

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                z, share = state["z"], 1 / (group["k"] + 1)
                p.lerp_(end=z, weight=share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def switches_to_averages(wrap, rank, early, made_before, **options):
    module = net()
    optimizer = ScheduleFree(module.parameters(), early=early) if made_before else None
    model = wrap(module, **options)
    optimizer = optimizer or ScheduleFree(model.parameters(), early=early)
    results = {}
    for step in range(4):
        optimizer.train()
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
        optimizer.eval()
        results |= {f"{step} {name}": tensor for name, tensor in full(model).items()}
    return results


def by_element(wrap, rank, *how):
    return switches_to_averages(wrap, rank, *how, shard_by="element")


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("early", "made_before"),
    [(False, False), (True, False), (True, True)],
    ids=["later", "at once", "before wrapping"],
)
def test_an_optimizer_that_switches_between_weights(early, made_before, stage):
    if stage == "fully_shard" and made_before:
        pytest.skip("fully_shard makes other parameters than the optimizer has")
    check(by_element if stage in SPREAD else switches_to_averages, stage, early, made_before)


def made_before(wrap, rank, make, steps_before, settings):
    """Make the optimizer, and perhaps have it step, before the model is wrapped."""
    module = net()
    optimizer = getattr(torch.optim, make)(module.parameters(), lr=0.02, **settings)
    train(module, optimizer, 0, range(steps_before))
    optimizer.zero_grad()
    model = wrap(module)
    train(model, optimizer, rank, range(3))
    return full(model)


MADE_BEFORE = {
    "Adagrad": ("Adagrad", 0, {"initial_accumulator_value": 0.1}),
    "AdamW that has stepped": ("AdamW", 2, {}),
    "SGD that has stepped": ("SGD", 2, {"momentum": 0.9}),
}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "fully_shard"])
@pytest.mark.parametrize("name", MADE_BEFORE)
def test_an_optimizer_that_has_a_state_before_wrapping(name, stage):
    check(made_before, stage, *MADE_BEFORE[name])


def test_an_optimizer_from_before_fully_shard_is_an_error():
    names = r"AdamW holds parameter 'first.weight' as it was before fully_shard\(\)"
    check(made_before, "fully_shard", "AdamW", 0, {}, error=names)
