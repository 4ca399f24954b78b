"""Fragments of the parameters: what is sent of them, and what becomes of its average.

A fragment that is sent is merged once, as a whole, when its average is there. Until then none of
its tensors changes because of it: where a rank has died, all fragments are as before or as after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fastsync.config.sync_modes import Delayed, DiLoCo, LocalSGD, SyncMode
from fastsync.sync.exchange import Codes, Exchange, FlatTensors, Pending

# Tensors by parameter name, by what they are.
FragmentState = dict[str, dict[str, torch.Tensor]]


class Fragment:
    """Some parameters that travel together.

    Args:
        names: of the parameters, for checkpoints.
        params: the parameters.
        exchange: averages them.

    Attributes:
        due: step after which it is merged, while it is on its way.
    """

    def __init__(self, names: Sequence[str], params: FlatTensors, exchange: Exchange) -> None:
        self.names, self.params, self.due = list(names), params, 0
        self._exchange = exchange
        self._pending: Pending | None = None
        self._check: Callable[[], None] = lambda: None

    @property
    def on_its_way(self) -> bool:
        """Return whether it has been sent and not merged."""
        return self._pending is not None

    def begin_rounds(self) -> None:
        """Begin with what the parameters are now: the same on all ranks."""

    def send(self, check: Callable[[], None], due: int) -> None:
        """Start the average.

        Args:
            check: raises where the ranks do not send the same; called before the merge.
            due: step after which it is merged.
        """
        counters = self._exchange.counters
        begun, sent = time.monotonic_ns(), counters.sent_bytes
        self._pending, self._check, self.due = self._start(), check, due
        counters.averages += self._exchange.world > 1
        self._exchange.note("average_started", self.names, counters.sent_bytes - sent, begun)

    def withdraw(self) -> None:
        """Forget what has been sent: nothing has changed."""
        self._pending, self._check = None, lambda: None

    def arrive(self) -> None:
        """Wait for the average.

        Raises:
            RankMismatchError, SyncFault: as `merge` does.
        """
        self._arrived()

    def merge(self, last: bool = False) -> None:
        """Wait for the average, and update the parameters.

        Args:
            last: all ranks are to have the same afterwards.

        Raises:
            RankMismatchError: the ranks have not sent the same; nothing has changed.
            SyncFault: a rank has ended; nothing has changed.
        """
        average = self._arrived()
        self._pending = None
        with torch.no_grad():
            self._update(average, last)

    def _arrived(self) -> torch.Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None
        with self._noted(not pending.arrived):
            self._check()
            average = pending.wait()
        self._check, self._pending = lambda: None, pending
        return average

    def _spread(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat` with the values of the rank that sends for this one."""
        with self._noted(not self._exchange.sends):
            return self._exchange.spread(flat)

    @contextmanager
    def _noted(self, waits: bool) -> Iterator[None]:
        begun = time.monotonic_ns()
        yield
        if waits:
            self._exchange.note("average_wanted", self.names, 0, begun)
            self._exchange.note("average_arrived", self.names, 0, time.monotonic_ns())

    def _start(self) -> Pending:
        raise NotImplementedError

    def _update(self, average: torch.Tensor, last: bool) -> None:
        raise NotImplementedError

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return what the fragment keeps from step to step, by name."""
        return {}

    def state(self) -> FragmentState:
        """Return copies of what it keeps. An average on its way is waited for."""
        flats = self._buffers()
        if self.on_its_way:
            flats["average"] = self._arrived()
        views = {kind: self.params.views(flat.clone()) for kind, flat in flats.items()}
        return {kind: dict(zip(self.names, held, strict=True)) for kind, held in views.items()}

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]], due: int) -> None:
        """Go on from what `state()` has returned, for these parameters or others.

        Args:
            due: step after which the average that it holds is merged; 0: it holds none.
        """
        flats = self._buffers()
        if due:
            flats["average"] = self.params.zeros()
            self._pending, self.due = Pending.known(flats["average"]), due
        for kind, flat in flats.items():
            held = state.get(kind, {})
            for name, view in zip(self.names, self.params.views(flat), strict=True):
                if name in held:
                    view.copy_(held[name])


class AveragedFragment(Fragment):
    """Parameters that become their averages (`LocalSGD`).

    Args:
        state_of: tensors that are averaged with them, at this step.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: FlatTensors,
        exchange: Exchange,
        state_of: Callable[[], list[torch.Tensor]],
    ) -> None:
        super().__init__(names, params, exchange)
        self._state_of, self._sent = state_of, params

    def _start(self) -> Pending:
        self._sent = FlatTensors([*self.params.tensors, *self._state_of()])
        return self._exchange.sum_flat(self._sent.pack())

    def _update(self, average: torch.Tensor, last: bool) -> None:
        self._sent.unpack(self._spread(average))


class DelayedFragment(Fragment):
    """Parameters that become their averages plus what this rank has changed since (`Delayed`)."""

    def __init__(self, names: Sequence[str], params: FlatTensors, exchange: Exchange) -> None:
        super().__init__(names, params, exchange)
        self._sent = params.zeros()

    def _start(self) -> Pending:
        self._sent.copy_(self.params.pack())
        return self._exchange.sum_flat(self._sent.clone())

    def _update(self, average: torch.Tensor, last: bool) -> None:
        average = self._spread(average)
        self.params.unpack(self.params.pack().sub_(self._sent).add_(average))

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {"sent": self._sent}


class OuterFragment(Fragment):
    """Parameters that follow outer ones, on which an outer optimizer steps (`DiLoCo`).

    A difference is that to what the parameters became at the last merge, so that rounding outer
    parameters to bf16 changes none of them.
    """

    def __init__(
        self, names: Sequence[str], params: FlatTensors, exchange: Exchange, mode: DiLoCo
    ) -> None:
        super().__init__(names, params, exchange)
        self._mode = mode
        self._outer, self._momentum = params.pack(), params.zeros()
        self._codes: Codes | None = None
        self._residual = params.zeros() if mode.codec is not None else None
        self._lost = self._residual  # by codes on their way; the residual, once they are merged
        if mode.codec is not None:
            self._codes = Codes(mode.codec, params.numel, params.kept)

    def begin_rounds(self) -> None:
        self._outer = self.params.pack()

    def _start(self) -> Pending:
        with torch.no_grad():
            difference = self.params.rounded(self._outer) - self.params.pack()
            if self._codes is None or self._residual is None:
                return self._exchange.sum_flat(difference)
            self._lost = difference.add_(self._residual)
            return self._exchange.gather_codes(difference, self._codes)

    def _update(self, average: torch.Tensor, last: bool) -> None:
        lr, momentum = self._mode.outer_lr, self._mode.outer_momentum
        outer = self._momentum.mul(momentum).add_(average)
        torch.add(average, outer, alpha=momentum, out=outer)
        torch.add(self._outer, outer, alpha=-lr, out=outer)
        self._outer = self._spread(outer)  # where that fails, nothing has changed
        self._momentum.mul_(momentum).add_(average)
        self._residual = self._lost
        self.params.unpack(self._outer, 0.0 if last else self._mode.kept)

    def _buffers(self) -> dict[str, torch.Tensor]:
        flats = {"outer": self._outer, "momentum": self._momentum}
        residual = self._lost if self.on_its_way else self._residual
        return flats if residual is None else {**flats, "residual": residual}

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]], due: int) -> None:
        super().load(state, due)
        self._lost = self._residual


class FollowingFragment(Fragment):
    """Parameters that follow the outer ones of the rank that sends for this one (`DiLoCo`).

    Args:
        kept: part of this rank's own parameters that a merge keeps.
    """

    def __init__(
        self, names: Sequence[str], params: FlatTensors, exchange: Exchange, kept: float
    ) -> None:
        super().__init__(names, params, exchange)
        self._kept = kept

    def _start(self) -> Pending:
        return Pending.known(torch.empty(0))

    def _update(self, average: torch.Tensor, last: bool) -> None:
        outer = self._spread(self.params.zeros())
        self.params.unpack(outer, 0.0 if last else self._kept)

    def state(self) -> FragmentState:
        """Return nothing: the other rank has it all."""
        if self.on_its_way:
            self._arrived()
        return {}

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]], due: int) -> None:
        if due:
            self._pending, self.due = self._start(), due


def make_fragment(
    mode: SyncMode,
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    exchange: Exchange,
    state_of: Callable[[], list[torch.Tensor]],
) -> Fragment:
    """Return the fragment of some parameters in a mode.

    Args:
        state_of: tensors of the optimizer's state that are averaged with them.
    """
    if isinstance(mode, LocalSGD):
        return AveragedFragment(names, FlatTensors(params), exchange, state_of)
    if isinstance(mode, Delayed):
        return DelayedFragment(names, FlatTensors(params), exchange)
    flat = FlatTensors(params, mode.codec)
    if exchange.sends:
        return OuterFragment(names, flat, exchange, mode)
    return FollowingFragment(names, flat, exchange, mode.kept)
