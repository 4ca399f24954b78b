"""Steps that a rank leaves out, because its batch is bad or its memory is too small for it.

The block of `model.skipping()` is one forward and backward. A rank whose block raises takes part in
what is left of the step without gradients, and gets the averages of the others, so that every rank
makes the same step of the optimizer after it. csrc/reducer/reducer.h has the engine's half.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from fastsync.ddp.buffers import BufferWatch
from fastsync.ddp.preemption_handler import PreemptibleDDP
from fastsync.faults.consensus import RankMismatchError
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer.engine import Engine
from fastsync.reducer.optimizer_hooks import StepWatcher, params_of, watch_steps

__all__ = ["Attempt", "SkippingDDP", "Skips"]

_log = logging.getLogger("fastsync")


@dataclass
class Attempt:
    """One forward and backward that this rank may leave out.

    Attributes:
        error: why it has; None if it has not.
    """

    error: Exception | None = None

    @property
    def skipped(self) -> bool:
        """Return whether this rank gave no gradients."""
        return self.error is not None


class Skips(StepWatcher):
    """The steps of one engine that ranks may leave out.

    Attributes:
        attempting: a block is running.
        refusal: the error that was raised because of what it holds.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ours = {id(param.tensor) for param in engine.params}
        self.attempting = False
        self.refusal: RuntimeError | None = None
        me = weakref.ref(self)
        engine.core.on_skips(lambda givers: _weigh(me, givers))
        watch_steps(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse steps in the middle of a block.

        Raises:
            RuntimeError: a rank that leaves the block early would not make this one.
        """
        if self.attempting and self._is_ours(optimizer):
            self.refusal = RuntimeError(
                "optimizer.step() is called inside `with model.skipping(...)`: a rank that skips "
                "would not call it, and would keep other weights. Call it after the block"
            )
            raise self.refusal

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step, which all ranks have to make: they compare it at the end of the next
        backward.
        """
        if self._is_ours(optimizer):
            self._engine.core.note_optimizer()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(id(param) in self._ours for param in params_of(optimizer))

    def weigh(self, givers: Sequence[int]) -> None:
        """Turn sums over all ranks, divided by their number, into averages of those that gave any.

        Args:
            givers: how many gave gradients, by parameter; -1 where it is not trained.
        """
        engine, world = self._engine, self._engine.group.size()
        if engine.group.rank() == 0:
            least = min(count for count in givers if count >= 0)
            step = engine.core.steps()
            _log.warning("fastsync: step %d has gradients of %d of %d ranks", step, least, world)
        with torch.no_grad():
            for param, count in zip(engine.params, givers, strict=True):
                if 0 < count < world and param.tensor.grad is not None:
                    param.tensor.grad.mul_(world / count)


def _weigh(skips: weakref.ref[Skips], givers: Sequence[int]) -> None:
    alive = skips()
    if alive is not None:
        alive.weigh(givers)


class SkippingDDP(PreemptibleDDP):
    """A front some of whose steps a rank may leave out."""

    _skips: Skips | None = None
    _buffer_watch: BufferWatch

    @contextmanager
    def skipping(self, *errors: type[Exception]) -> Iterator[Attempt]:
        """Run one forward and backward, which this rank leaves out if they raise one of `errors`.

        The gradients are then the averages of the ranks that have some, on every rank alike. So
        every rank goes on to `optimizer.step()`, after the block. If all ranks skip, there are no
        gradients, and the optimizer does nothing. Needs `on_skip="average_others"`.

        Raises:
            RuntimeError: the block holds not one backward that synchronises, or a step of the
                optimizer.
            ValueError: no class of errors is given, or layers exchange something in a forward.
        """
        skips = self._checked_skips(errors)
        engine = skips._engine
        attempt, steps, forwards = Attempt(), engine.core.steps(), engine.forwards
        skips.attempting = True
        try:
            yield attempt
        except errors as error:
            ours = isinstance(error, SyncFault | RankMismatchError) or error is skips.refusal
            if ours or engine.core.steps() != steps:
                raise
            attempt.error = error
        finally:
            skips.attempting = False
        if attempt.error is not None:
            self._skip(engine, attempt.error, begun=engine.forwards != forwards)
        elif engine.core.steps() != steps + 1:
            raise RuntimeError(
                "a block of model.skipping() holds one backward that synchronises, but this one "
                f"held {engine.core.steps() - steps}: let it begin before the first forward of a "
                "step, under no_sync() too, and end after its last backward"
            )

    def _checked_skips(self, errors: Sequence[type[Exception]]) -> Skips:
        if self._skips is None:
            raise RuntimeError(
                "skipping() needs FastDDP(model, faults=Faults(on_skip='average_others'))"
            )
        if not errors:
            raise ValueError("skipping() expects the classes of errors that end a step")
        module = cast(nn.Module, self.module)
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"layer {name!r} is a SyncBatchNorm, whose forward waits for all ranks: a rank "
                    "that skips would not come"
                )
        return self._skips

    def _skip(self, engine: Engine, error: Exception, begun: bool) -> None:
        """Do what the others do in this step.

        Args:
            begun: this rank has begun a forward, and has done what comes before one.
        """
        rank, step = engine.group.rank(), engine.core.steps() + 1
        what = f"{type(error).__name__}: {error}"
        _log.warning("fastsync: rank %d skips step %d: %s", rank, step, what)
        if not begun:
            self._pre_forward()
        if self.modules_buffers:
            self._buffer_watch.after_forward(self.module)
        engine.core.skip_step()
        if engine.group.size() == 1:  # no other rank has any of this rank's gradients
            self.zero_grad(set_to_none=True)
        self.require_forward_param_sync = True
