"""Ends of a case: what no script may do, which has to end in an error on every rank.

The error names the parameter and the remedy, before a weight is wrong.
"""

import random
import re

from tests.fuzz.random_cases import rule
from tests.fuzz.random_cases.stages import thaw
from tests.fuzz.random_cases.tree import loss_of
from tests.fuzz.random_cases.wrapped import make_optimizer

__all__ = ["LAYERS_CHANGE", "change_layers", "layers_change", "refused"]

LAYERS_CHANGE = "layers change"
ADDED = r"about to step on parameter '.*', which the module got after it was wrapped.*anew"
REPLACED = r"parameter '.*' of the module is another tensor than .*before FastDDP"


def layers_change(seed):
    """Return whether layers change at the end of a case."""
    return random.Random(f"ending {seed}").random() < 1 / 7


def refused(call, error, weights):
    """Check that `call` raises an error on this rank, and writes to none of the weights."""
    weights = list(weights)
    before = [weight.detach().clone() for weight in weights]
    try:
        call()
    except RuntimeError as raised:
        assert re.search(error, str(raised), re.DOTALL), f"{raised} is not {error}"
    else:
        raise AssertionError(f"nothing was raised, but should have been: {error}")
    for weight, value in zip(weights, before, strict=True):
        assert rule.same(weight.detach(), value), "a weight was another one before the error"


def change_layers(wrapped):
    """Add a parameter, or replace one, in the middle of a training, and have all ranks use it."""
    thaw(wrapped)
    rng, tree = wrapped.rng, wrapped.tree
    optimizer = wrapped.optimizer if wrapped.drawn.zero else make_optimizer(tree.parameters())
    usual = wrapped.fixed_use if wrapped.drawn.fixed else wrapped.order
    if not usual:  # no backward, then
        return
    loss_of(wrapped.model(wrapped.input(), usual)).backward()  # without a gradient, none is told of
    # A static graph has its own error for a gradient that does not come.
    replaces = not wrapped.drawn.fixed and rng.random() < 0.5
    old = tree.weights[rng.choice(usual)] if replaces else None
    new = tree.grow() if old is None else tree.replace(old)
    used = [i for i, weight in enumerate(tree.weights) if weight is new or i in usual]
    holder = rng.choice(("a group", "its place", "another"))
    if holder == "its place" and old is not None:
        params = optimizer.param_groups[0]["params"]
        params[:] = [new if param is old else param for param in params]
    elif holder == "another":
        optimizer = make_optimizer([new])
    else:
        optimizer.add_param_group({"params": [new]})
    loss_of(wrapped.model(wrapped.input(), used)).backward()
    if rng.random() < 0.3 and not wrapped.joined:
        try:
            wrapped.model(wrapped.input(), used)
        except RuntimeError as raised:  # the backward had no gradient of `old`
            assert old is not None and re.search(REPLACED, str(raised), re.DOTALL), str(raised)
            return
    refused(optimizer.step, ADDED, tree.parameters())
