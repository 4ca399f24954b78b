"""Agreement of the ranks on the step after which all of them save, when one is told to end.

A signal reaches one rank, or all, at any moment. Every rank counts the places between steps that
it passes, and has a thread that waits for a signal, and for word of others in the store:

1. The thread of the first rank that gets a signal says so in the store.
2. Each thread holds its rank's count: a rank that comes to the next place waits there. The thread
   tells the others the count, and waits for theirs. No rank's script is needed for that, so a rank
   may be anywhere: in a forward, in its data loader, waiting for others in a backward.
3. All save at the place after the highest count. No rank has passed it, since its count was held,
   and each will come to it, since the others need its gradients for the steps before.

Steps themselves cost an uncontended lock.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

from fastsync._torch import Store

_PERIOD = 0.25  # seconds between looks at the store
_RANKS_PER_PERIOD = 500  # that the store answers in that time without being busy with it
_PAUSE = 0.02
_SAME = 3.0  # seconds in which a launcher repeats what its scheduler has sent to all processes
_CALLED, _DECIDED, _VOID = "called", "decided", "void"
_SIGNAL, _CLOSED = b"s", b"x"  # what is written to the pipe


class Preemption:
    """Watch that tells this rank when to save.

    Args:
        place: a name that all ranks know, and none has used before.
        store: store that all ranks reach; None where this rank is the only one.
        me: this rank, and how many there are.
        look_out: begins to watch ranks; the function that it returns raises where one has ended.
    """

    def __init__(
        self,
        place: str,
        store: Store | None,
        me: tuple[int, int],
        look_out: Callable[[], Callable[[], None]],
    ) -> None:
        self._place, self._store, (self._rank, self._world) = place, store, me
        self._look_out = look_out
        self._lock = threading.Lock()  # of the count, which the thread holds while ranks agree
        self._passed = 0
        self._at: int | None = None  # where all save
        self._number = 0  # the signal
        self._quiet_until = 0.0  # later signals end this process
        self._numbers: tuple[signal.Signals, ...] = ()
        self._process = os.getpid()
        self._pipe = os.pipe()
        self._thread = threading.Thread(target=_watch, args=(self,), daemon=True)

    def begin(self, numbers: tuple[signal.Signals, ...]) -> None:
        """Handle these signals from now on. Call it on the main thread."""
        self._numbers = numbers
        for number in numbers:
            signal.signal(number, _Handler(self))
        self._thread.start()

    def leave(self, how: str, why: str) -> None:
        """Do nothing: others learn it from the watch."""

    def wait_for_peer_exit(self, seconds: float) -> None:
        """Do nothing: the watch waits."""

    def close(self) -> None:
        """End the thread. It must not run any more when the interpreter ends."""
        if self._process == os.getpid() and self._thread.is_alive():
            os.write(self._pipe[1], _CLOSED)
            self._thread.join(_SAME)

    def abandon(self) -> None:
        """Restore the default handlers in a process that was forked: signals end it as they end
        others.
        """
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)

    def comes(self) -> bool:
        """Pass a place between steps; return whether this rank is to save there.

        Waits while the ranks agree.
        """
        with self._lock:
            self._passed += 1
            return self._at is not None and self._passed >= self._at

    def end_saved(self) -> None:
        """End this rank, which has saved, as have all others.

        Raises:
            SystemExit: with the exit code of a process that a signal ends.
        """
        self._quiet_until = time.monotonic() + _SAME  # a launcher tells those that are left to end
        number = self._number or signal.SIGTERM
        text = f"rank {self._rank} ends: {signal.Signals(number).name}, saved"
        print(f"fastsync: {text}", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    def on_signal(self, number: int) -> None:
        """Handle a signal on the main thread."""
        now = time.monotonic()
        if self._quiet_until and now >= self._quiet_until:
            self.end(number)
        elif not self._quiet_until:
            self._quiet_until = now + _SAME
            self._number = number
            os.write(self._pipe[1], _SIGNAL)

    def end(self, number: int) -> None:
        """End this process at once."""
        if os.getpid() == self._process:
            line = f"fastsync: rank {self._rank} ends: {signal.Signals(number).name}\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # -- the thread's --

    def watch(self) -> None:
        """Wait for a signal, or word of one; then agree with all ranks."""
        period = max(_PERIOD, self._world * _PERIOD / _RANKS_PER_PERIOD)
        try:
            while not (message := self._message(period)) and not self._is_called():
                pass
            if message != _CLOSED:
                self._agree()
        except RuntimeError as error:  # each kind of store has its own
            self._give_up(f"the rendezvous store has gone: {error}")
            self._quiet_until = time.monotonic()
            if self._number:
                os.kill(self._process, self._number)

    def _message(self, seconds: float) -> bytes:
        """Return what has been written to the pipe: a signal, or the end. Empty: nothing."""
        ready, _, _ = select.select([self._pipe[0]], [], [], seconds)
        return os.read(self._pipe[0], 1) if ready else b""

    def _is_called(self) -> bool:
        return self._store is not None and self._store.check([self._key(_CALLED)])

    def _agree(self) -> None:
        with self._lock:
            if self._store is None:
                self._at = self._passed + 1
                return
            store, called = self._store, self._key(_CALLED)
            first = store.compare_set(called, "", str(int(self._number or signal.SIGTERM)))
            self._number = self._number or int(first)
            store.set(self._key(str(self._rank)), str(self._passed))
            if store.add(self._key("count"), 1) == self._world:
                passed = [int(store.get(self._key(str(r)))) for r in range(self._world)]
                store.compare_set(self._key(_DECIDED), "", str(max(passed) + 1))
            decided = self._decision(store)
            self._at = None if decided == _VOID else int(decided)

    def _decision(self, store: Store) -> str:
        key, why, look = self._key(_DECIDED), "", self._look_out()
        while not store.check([key]):
            closed = self._message(_PAUSE) == _CLOSED
            try:
                look()
            except RuntimeError as error:
                closed, why = True, str(error)
            if closed:
                store.compare_set(key, "", _VOID)
        decided = store.get(key).decode()
        if decided == _VOID:
            self._give_up(why or "another rank has ended")
        return decided

    def _give_up(self, why: str) -> None:
        if self._number:
            text = f"rank {self._rank} does not call on_preemption: {why}"
            print(f"fastsync: {text}", file=sys.stderr, flush=True)

    def _key(self, what: str) -> str:
        return f"{self._place}/{what}"


class _Handler:
    """Handler of a signal: calls `preemption` while there is one."""

    def __init__(self, preemption: Preemption) -> None:
        self._preemption = weakref.ref(preemption)

    @property
    def is_over(self) -> bool:
        return self._preemption() is None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        preemption = self._preemption()
        if preemption is not None:
            preemption.on_signal(number)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _watch(preemption: Preemption) -> None:
    preemption.watch()


def check_handlers(numbers: tuple[signal.Signals, ...]) -> None:
    """Return whether these signals can be handled here.

    Raises:
        ValueError: on another thread than the main one, or something else handles one of them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "on_preemption handles signals, which only the main thread may: wrap the model there"
        )
    for number in numbers:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_DFL and not (
            isinstance(handler, _Handler) and handler.is_over
        ):
            raise ValueError(
                f"on_preemption waits for {number.name}, which is handled already by {handler!r}: "
                "leave one of them out, or give the other signals to a PreemptionPolicy"
            )


def outlive_preemption(worker: int = 0) -> None:
    """Keep a worker of a data loader alive when a launcher tells all processes to end.

    It still ends when its rank tells it to: `DataLoader(..., worker_init_fn=outlive_preemption)`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
