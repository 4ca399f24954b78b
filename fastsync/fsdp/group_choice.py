"""Choice of the modules that become units: repeated blocks; the rest belongs to the root."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fastsync._torch import cut_like
from fastsync.reducer.optimizer_hooks import params_of

# A module, a class of modules, or a module's name in the model.
UnitChoice = nn.Module | type[nn.Module] | str

# Smaller blocks share a unit: a collective costs more than what it saves.
SMALLEST_UNIT = 1 << 20  # bytes
MOST_UNITS = 64


def choose_units(
    root: nn.Module, units: Iterable[UnitChoice] | None
) -> list[nn.Module | list[nn.Module]]:
    """Modules, or lists of modules, in an order in which fully_shard() takes them.

    Raises:
        ValueError: one of `units` is nowhere in the model.
    """
    if units is None:
        return [group if len(group) > 1 else group[0] for group in _blocks(root)]
    found = {id(m): m for unit in units for m in _named(root, unit) if m is not root}
    below_first = reversed([m for m in root.modules() if id(m) in found])
    return list(below_first)


def _named(root: nn.Module, unit: UnitChoice) -> list[nn.Module]:
    if isinstance(unit, str):
        modules = [m for name, m in root.named_modules() if name == unit]
    elif isinstance(unit, type):
        modules = [m for m in root.modules() if isinstance(m, unit)]
    else:
        modules = [m for m in root.modules() if m is unit]
    if not modules:
        raise ValueError(
            f"units: {unit!r} is no module of the model, no name of one, and no class of one"
        )
    return modules


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _blocks(root: nn.Module) -> Iterator[list[nn.Module]]:
    """Consecutive blocks of the topmost repetitions, grouped until they are large enough."""
    smallest = max(SMALLEST_UNIT, _bytes(root) // MOST_UNITS)
    yield from _below(root, smallest)


def _below(module: nn.Module, smallest: int) -> Iterator[list[nn.Module]]:
    children = [(child, size) for child in module.children() if (size := _bytes(child))]
    kinds = Counter(type(child) for child, _ in children)
    group: list[nn.Module] = []
    grouped = 0
    for child, size in children:
        if kinds[type(child)] < 2 or not _is_block(child):
            yield from _below(child, smallest)
            continue
        group.append(child)
        grouped += size
        if grouped >= smallest:
            yield group
            group, grouped = [], 0


def _is_block(module: nn.Module) -> bool:
    """Return whether it has a forward, and its parameters are used there alone: language models
    compute their outputs with the weight of an embedding, in the forward of what holds it.
    """
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Embedding)


def exchange_in_optimizers(old: Sequence[nn.Parameter], new: Sequence[nn.Parameter]) -> int:
    """Replace `old` parameters by the `new` ones in every optimizer that holds them.

    What it keeps of them, because it has stepped before or its constructor makes a state, is cut as
    the parameters are.

    Returns:
        The number of optimizers that did.

    Raises:
        ValueError: a state cannot be cut.
    """
    places = {id(before): after for before, after in zip(old, new, strict=True)}
    found = [o for o in _optimizers() if any(id(param) in places for param in params_of(o))]
    states = [
        {
            param: _cut_state(optimizer, optimizer.state[param], places[id(param)])
            for param in params_of(optimizer)
            if id(param) in places and param in optimizer.state
        }
        for optimizer in found
    ]
    for optimizer, cut in zip(found, states, strict=True):
        for param, state in cut.items():
            del optimizer.state[param]
            optimizer.state[places[id(param)]] = state
        for group in optimizer.param_groups:
            group["params"] = [places.get(id(param), param) for param in group["params"]]
    return len(found)


def _cut_state(
    optimizer: Optimizer, state: Mapping[str, Any], param: torch.Tensor
) -> dict[str, Any]:
    """Return this rank's part of the state of a whole parameter, which `param` has replaced."""
    if not isinstance(param, DTensor):
        return dict(state)
    cut = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape:
            value = cut_like(value, param)
        elif isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(
                f"this {type(optimizer).__name__} was made before the model was wrapped with "
                f"zero=3, and keeps {name!r} of shape {tuple(value.shape)} of a parameter of shape "
                f"{tuple(param.shape)}, which cannot be cut as the parameter is; make the "
                "optimizer after the model has been wrapped"
            )
        cut[name] = value
    return cut


def _optimizers() -> list[Optimizer]:
    """Return all optimizers that are alive."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


def contiguous(module: nn.Module) -> None:
    """Give parameters of another memory order, as channels-last, the usual one."""
    for param in module.parameters():
        if not param.is_contiguous():
            with torch.no_grad():
                param.data = param.data.contiguous()
