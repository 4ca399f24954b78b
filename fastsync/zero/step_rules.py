"""Rules for what an optimizer may step on: any elements of a parameter, or only the whole of it."""

from __future__ import annotations

from torch import optim

from fastsync.reducer.optimizer_hooks import is_elementwise, known_optimizers

__all__ = ["steps_by_parameter", "unit_for"]

# Each parameter's update depends on that parameter alone, but on all of its elements.
_TENSORWISE = ("Adafactor", "Muon", "SparseAdam")


def steps_by_parameter(optimizer: optim.Optimizer) -> bool:
    """Return whether it may step on its parameters in turns: each update concerns one parameter
    alone.
    """
    known = is_elementwise(optimizer) or type(optimizer) in known_optimizers(_TENSORWISE)
    return known and hasattr(type(optimizer).step, "__wrapped__")


def unit_for(optimizer: optim.Optimizer, asked: str) -> str:
    """Return the pieces that `optimizer` can step on: "element" or "tensor".

    Args:
        asked: `Zero.shard_by`; anything but "auto" is taken as the user's word.

    Raises:
        ValueError: the class is not known, or couples parameters.
    """
    if asked != "auto":
        return asked
    kind = type(optimizer)
    if isinstance(optimizer, optim.LBFGS):
        raise ValueError(
            "zero cannot shard LBFGS, whose step takes all parameters at once; use zero=0"
        )
    if is_elementwise(optimizer):
        return "element"
    if kind in known_optimizers(_TENSORWISE):
        return "tensor"
    raise ValueError(
        f"zero does not know how {kind.__module__}.{kind.__qualname__} may be sharded. Pass "
        "zero=Zero(stage, shard_by='element') if each element's update depends on that element "
        "alone (as in SGD and Adam), shard_by='tensor' if it depends on other elements of the "
        "same parameter (as in LAMB, Muon and Shampoo), or zero=0 if it depends on other parameters"
    )
