"""How what an optimizer has updated reaches the other ranks, which may die meanwhile.

The local part of a step is always made to its end: after it, a rank that has shares of others has
them up to date, too. Only then does it look at what has become of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastsync.reducer.engine import Engine


class Delivery:
    """Delivery of what ranks step on to the other ranks of one model.

    Args:
        engine: engine of the model.

    Attributes:
        late: numbers of optimizers whose state the survivors of a death share anew at the end of
            their next step, because some had made it before and others had not.
        share_late: does that for those. Collective.
        until_all: runs a task of all ranks, which changes nothing for good, again and again until
            all ranks that are left have done it. Collective.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fault: RuntimeError | None = None  # of the running step
        self.late: frozenset[int] = frozenset()
        self.share_late: Callable[[], None] = lambda: None
        self.until_all: Callable[[Callable[[], None]], None] = lambda task: task()

    def begin(self) -> None:
        """Prepare for a step."""
        self._fault = None
        self._engine.shares.finish_gathers()  # which a step that raised has left

    def start(self, number: int, buffer: torch.Tensor, arrived: Callable[[], None]) -> None:
        """Send this rank's region of a buffer to all ranks. Collective.

        Args:
            number: of the optimizer.
            arrived: see `GradientShards.start_gather`.
        """
        if self._fault is not None or number in self.late:
            return
        try:
            self._engine.shares.start_gather(buffer, arrived)
        except RuntimeError as error:
            if self._engine.policy.elastic is None:
                raise
            self._fault = error

    def finish(self, number: int) -> None:
        """Wait until all ranks have what the step has updated. Collective.

        Raises:
            SyncFault: ranks have died, and the training cannot go on.
        """
        self._engine.during(self._finish)
        while number in self.late:
            self._engine.during(self.share_late)

    def _finish(self) -> None:
        shares, fault = self._engine.shares, self._fault
        self._fault = None
        try:
            if fault is not None:
                raise fault
            shares.finish_gathers()
        except RuntimeError:
            if self._engine.policy.elastic is not None:
                shares.drop_gathers()
            raise
