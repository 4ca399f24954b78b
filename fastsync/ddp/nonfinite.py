"""Steps on gradients that hold NaN or infinity: skipped, or an error that says whose they are.

Each rank looks at its own gradients before they are averaged, and tells the others with the flags
that travel anyway; so all ranks know of the same parameters, and only after such a backward do they
exchange anything more.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import LBFGS, Optimizer

from fastsync._build.env import Env
from fastsync._torch import caller_level, on_unscaled
from fastsync.reducer import core
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import gather_watched, make_rendezvous, watched
from fastsync.reducer.optimizer_hooks import (
    Arguments,
    StepWatcher,
    optimizer_proxy,
    params_of,
    watch_steps,
    with_loss,
)
from fastsync.zero.gradient_proxies import ShardedGradient

_PLACE = "the search for NaN and infinity"


class NonFiniteGradientError(RuntimeError):
    """An optimizer was about to step on gradients that hold NaN or infinity.

    Attributes:
        parameters: names of the parameters of these gradients, in the order in which a backward
            reaches them.
        ranks: by parameter, those that gave NaN or infinity.
    """

    def __init__(self, message: str, parameters: list[str], ranks: list[list[int]]) -> None:
        super().__init__(message)
        self.parameters, self.ranks = parameters, ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.parameters, self.ranks)


@dataclass(frozen=True)
class _Found:
    """One rank's knowledge of a parameter whose average is reported not to be finite.

    Attributes:
        given: this rank gave NaN or infinity.
        left: they are still in the gradient, or in the part of it that this rank has.
    """

    given: bool
    left: bool


class NonFiniteGuard(StepWatcher):
    """Check before each step of an optimizer of the engine's parameters.

    Args:
        engine: engine whose policy asks for the check.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._index_of = {id(param.tensor): i for i, param in enumerate(engine.params)}
        self._place = make_rendezvous(
            engine.group, "non-finite gradients", Env.read().agree_timeout
        )
        watch_steps(self)

    def replaces(self, optimizer: Optimizer) -> bool:
        """Return whether it steps on parameters of the engine."""
        return any(id(p) in self._index_of for p in params_of(optimizer))

    def replace_step(self, optimizer: Optimizer, args: Arguments) -> Arguments | None:
        """Replace the optimizer by one without parameters where the step is to be skipped.

        Raises:
            NonFiniteGradientError: where it is to be an error.
            ValueError: the optimizer computes gradients while it steps.
        """
        mine = {self._index_of[id(p)] for p in params_of(optimizer) if id(p) in self._index_of}
        if args[0] is not optimizer:
            return None
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS computes gradients while it steps, so that nobody can look at them before; "
                "use nonfinite='ignore'"
            )
        args = with_loss(args)
        report = self._report(mine)
        if report is None:
            return args
        if self._engine.policy.nonfinite == "raise":
            raise report
        if self._engine.group.rank() == 0:
            warnings.warn(f"{report}; this step is skipped", stacklevel=caller_level())
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        return (optimizer_proxy(optimizer, groups), *args[1:])

    def _report(self, mine: set[int]) -> NonFiniteGradientError | None:
        """Return the error about the gradients of these parameters, if any. Collective where there
        is one.
        """
        given = self._given()
        if not given:
            return None
        order = list(self._engine.plan.params)
        order += sorted(given.keys() - set(order))  # frozen since
        suspects = [i for i in order if i in mine and i in given]
        if not suspects:
            return None
        known = self._exchange([_Found(given[i], self._is_left(i)) for i in suspects])
        found = [
            (self._engine.params[i].name, [r for r, one in enumerate(of_rank) if one.given])
            for i, *of_rank in zip(suspects, *known, strict=True)
            if any(one.left for one in of_rank)
        ]
        return _error(found) if found else None

    def _given(self) -> dict[int, bool]:
        """Return the parameters that any rank knows of, and whether this rank gave NaN or infinity.
        Collective with groups, whose ranks alone know of their parameters.
        """
        given = dict(self._engine.core.nonfinite())
        if self._engine.policy.groups and self._engine.group.size() > 1:
            everyones = gather_watched(sorted(given), self._engine.group, _PLACE)
            given = {i: given.get(i, False) for i in sorted({i for its in everyones for i in its})}
        return given

    def _is_left(self, index: int) -> bool:
        grad = self._engine.params[index].tensor.grad
        if grad is None:
            return False
        if isinstance(grad, ShardedGradient):
            whole = grad.share.whole
            grad = grad.share.owned() if whole is None else whole
        return not core.all_finite([grad])[0]

    def _exchange(self, mine: list[_Found]) -> list[list[_Found]]:
        """Gather what every rank has found."""
        group = self._engine.group
        if group.size() == 1:
            return [mine]
        self._place.meet(
            "the others to step on gradients that hold NaN or infinity",
            remedy="With nonfinite='skip' or 'raise', every rank makes the same steps",
        )
        return gather_watched(mine, group, _PLACE)


def _error(found: list[tuple[str, list[int]]]) -> NonFiniteGradientError:
    (name, ranks), *others = found
    more = f", and those of {len(others)} more parameters" if others else ""
    ranks_text = ", ".join(map(str, ranks)) or "none in the last backward, but an earlier one"
    message = (
        f"the gradient of parameter {name!r} holds NaN or infinity (from ranks: {ranks_text})"
        f"{more}. Find out what those ranks computed: their inputs, a loss that is not finite, "
        "or an overflow in 16 bits"
    )
    return NonFiniteGradientError(message, [n for n, _ in found], [r for _, r in found])


class ScalerGuard:
    """Tell all ranks of an overflow in the gradients of a group, which its ranks alone have.

    So all ranks leave out the same steps of a GradScaler.

    Args:
        engine: engine whose policy has groups.
    """

    def __init__(self, engine: Engine) -> None:
        self._group = engine.group
        self._ours = frozenset(id(param.tensor) for param in engine.params)
        on_unscaled(self.share)

    def share(self, optimizer: Optimizer, found: torch.Tensor) -> None:
        """Let `found` say whether any rank has found infinity. Collective."""
        if any(id(param) in self._ours for param in params_of(optimizer)):
            how = dist.ReduceOp.MAX
            start = partial(dist.all_reduce, found, how, group=self._group, async_op=True)
            watched(self._group, "the search for infinities", start)
