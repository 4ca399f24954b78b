"""Steps that a rank leaves out, because its batch is bad or its memory is too small for it.

The block of `model.skipping()` is one forward and backward. A rank whose block raises takes part in
what is left of the step without gradients, and gets the averages of the others, so that every rank
makes the same step of the optimizer after it. csrc/reducer/reducer.h has the engine's half.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from fastsync._torch import Front
from fastsync.faults.consensus import RankMismatchError
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer.engine import Engine
from fastsync.reducer.optimizer_hooks import StepWatcher, params_of, watch_steps
from fastsync.reducer.weak_calls import weakly

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
        self._sent: int | None = None  # buckets of the step that this rank leaves out
        engine.core.on_skips(weakly(self.weigh))
        watch_steps(self)

    @contextmanager
    def attempt(
        self,
        model: Front,
        pass_forward: Callable[[bool], None],
        errors: tuple[type[Exception], ...],
    ) -> Iterator[Attempt]:
        """Run one forward and backward of `model`, as `FastDDP.skipping` says.

        Args:
            pass_forward: does what comes before and after a forward that this rank leaves out; is
                told whether it has begun one, and has done what comes before.
        """
        _check_block(model.module, errors)
        core, attempt = self._engine.core, Attempt()
        steps, forwards = core.steps(), self._engine.forwards
        sent = core.stats()["collectives"]
        self.attempting = True
        try:
            yield attempt
        except errors as error:
            ours = isinstance(error, SyncFault | RankMismatchError) or error is self.refusal
            if ours or core.steps() != steps:
                raise
            attempt.error = error
        finally:
            self.attempting = False
        if attempt.error is not None:
            begun = self._engine.forwards != forwards
            self._note_skip(attempt.error)
            pass_forward(begun)
            self._sent = core.stats()["collectives"] - sent
            self._skip(model)
            self._sent = None
        elif core.steps() != steps + 1:
            raise RuntimeError(
                "a block of model.skipping() holds one backward that synchronises, but this one "
                f"held {core.steps() - steps}: let it begin before the first forward of a step, "
                "under no_sync() too, and end after its last backward"
            )

    def _note_skip(self, error: Exception) -> None:
        rank, step = self._engine.group.rank(), self._engine.core.steps() + 1
        what = f"{type(error).__name__}: {error}"
        _log.warning("fastsync: rank %d skips step %d: %s", rank, step, what)

    def _skip(self, model: Front) -> None:
        """Take part in the backward of the other ranks."""
        engine = self._engine
        has_begun = engine.core.backward_running()
        if engine.weights is not None and engine.plan.buckets and not has_begun:
            engine.weights.skip()
        engine.core.skip_step()
        if engine.group.size() == 1:  # no other rank has any of this rank's gradients
            model.zero_grad(set_to_none=True)
        model.require_forward_param_sync = True

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

    def weigh(self, contributors: Sequence[int]) -> None:
        """Turn sums over all ranks, divided by their number, into averages of those that gave any.

        Args:
            contributors: how many gave gradients, by parameter; -1 where it is not trained.
        """
        engine, world = self._engine, self._engine.group.size()
        if engine.group.rank() == 0:
            least = min(count for count in contributors if count >= 0)
            step = engine.core.steps()
            _log.warning("fastsync: step %d has gradients of %d of %d ranks", step, least, world)
        factors = [world / max(count, 1) for count in contributors]
        if engine.weights is not None:
            factors = engine.weights.factors_after_skips(self._gave(), contributors)
        with torch.no_grad():
            for param, count, factor in zip(engine.params, contributors, factors, strict=True):
                if 0 < count < world and param.tensor.grad is not None:
                    param.tensor.grad.mul_(factor)
        if engine.weights is not None:
            engine.weights.note_mean()

    def _gave(self) -> list[bool]:
        """Return whether this rank has given each gradient of the step that ends."""
        buckets = self._engine.plan.buckets[: self._sent]
        sent = {index for bucket in buckets for index in bucket.params}
        return [index in sent for index in range(len(self._engine.params))]


def _check_block(module: nn.Module, errors: tuple[type[Exception], ...]) -> None:
    if not errors:
        raise ValueError("skipping() expects the classes of errors that end a step")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"layer {name!r} is a SyncBatchNorm, whose forward waits for all ranks: a rank "
                "that skips would not come"
            )
