"""Runs functions on several real ranks, and counts what torch dispatches.

Ranks are processes of this machine, joined by a Gloo process group. They are forked from a server
process that has imported torch once, so a rank costs a fraction of a second::

    def average(rank, world):
        model = fastsync.FastDDP(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(rank))).sum().backward()
        return model.module.weight.grad

    first, second = run_ranks(average, 2)
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fastsync._build import env
from fastsync._torch import PrefixStore, Store, TCPStore

__all__ = ["RankError", "count_dispatched_ops", "run_ranks"]

T = TypeVar("T")

# Seconds that the other ranks get to end by themselves once one has failed.
_GRACE = 5.0
_STACK_SIGNAL = signal.SIGUSR1
_INITIAL_RANDOM_STATE = torch.default_generator.get_state()


class RankError(AssertionError):
    """Ranks raised, crashed or hung; the text names each of them and shows where it was."""


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, grace: float = _GRACE
) -> list[T]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes joined by a Gloo group.

    Args:
        fn: a module-level function; it, `args` and its result travel by pickle.
        world_size: the number of processes.
        timeout: seconds after which ranks that are still running count as hanging.
        grace: seconds that the other ranks are given once one has failed.

    Returns:
        The results in rank order. The process group is destroyed and every process has ended.

    Raises:
        RankError: a rank raised, crashed, or did not end in time.
    """
    with Team(world_size) as team:
        results: list[T] = team.call(fn, *args, timeout=timeout, grace=grace)
    return results


def count_dispatched_ops(fn: Callable[[], object]) -> int:
    """Return the number of CPU events that torch's profiler records while `fn` runs.

    Every operation that passes torch's dispatcher is one, collectives and ranges included.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        fn()
    events = recorded.events()
    return 0 if events is None else len(events)


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Each rank imports the main module, which mostly is pytest.
    main = ["pytest"] if "pytest" in sys.modules else []
    context.set_forkserver_preload([*main, "fastsync.testing._forkserver"])
    return context


@dataclass
class _Rank:
    process: ForkServerProcess
    pipe: Connection
    stacks: Path
    value: Any = None
    failure: str = ""
    reported: bool = True  # of the function that it was given last
    ended: bool = False


class Team:
    """Ranks that run one function after the other, each in a new process group.

    That is cheaper than `run_ranks` by the start and end of processes, but what a function leaves
    behind in its process, such as a replaced attribute of a module, is there for the next one.
    Environment, working directory, random state and torch's defaults are put back.

    A rank that raises, crashes or hangs ends the team.
    """

    def __init__(self, size: int) -> None:
        self.ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fastsync-ranks-")
        # This process serves the rendezvous store: no other process can take its port, and the
        # store lives until every rank has ended.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._deadline, self._seconds, self._grace = 0.0, 0.0, _GRACE
        for rank in range(size):
            stacks = Path(self._folder.name, f"rank{rank}.stacks")
            mine, theirs = _context().Pipe()
            arguments = (rank, size, self._store.port, theirs, str(stacks))
            process = _context().Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(_Rank(process, mine, stacks))

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is None)

    def call(
        self, fn: Callable[..., T], *args: Any, timeout: float = 60.0, grace: float = _GRACE
    ) -> list[T]:
        """Return what `fn(rank, world_size, *args)` returns on each rank; see `run_ranks`."""
        self._deadline, self._seconds, self._grace = time.monotonic() + timeout, timeout, grace
        job = pickle.dumps((fn, args))
        for rank in self.ranks:
            rank.reported, rank.value = False, None
            with contextlib.suppress(ConnectionError):  # it has ended, and will be found so
                rank.pipe.send_bytes(job)
        try:
            self._wait_for("reported")
            self._raise_failures()
        except BaseException:
            self._kill()
            raise
        return [rank.value for rank in self.ranks]

    def close(self, wait: bool = True) -> None:
        """End all ranks.

        Args:
            wait: let them end by themselves, within the time that their last function was given.

        Raises:
            RankError: a rank did not end as it should, although it had returned its results.
        """
        try:
            if wait:
                self._deadline = max(self._deadline, time.monotonic() + self._grace)
                for rank in self.ranks:
                    with contextlib.suppress(ConnectionError):
                        rank.pipe.send_bytes(b"")
                self._wait_for("ended")
                self._raise_failures()
        finally:
            self._kill()

    def _wait_for(self, state: str) -> None:
        """Wait until all ranks have reported, or have ended; less long once one has failed."""
        deadline, failed = self._deadline, False
        while running := [r for r in self.ranks if not (r.ended or getattr(r, state))]:
            if not failed and any(rank.failure for rank in self.ranks):
                failed = True
                deadline = min(deadline, time.monotonic() + self._grace)
            left = deadline - time.monotonic()
            if left <= 0:
                when = "after another rank had failed" if failed else f"after {self._seconds:.0f} s"
                _give_up(running, when)
                return
            handles: dict[Any, _Rank] = {
                r.process.sentinel if r.reported else r.pipe: r for r in running
            }
            for handle in wait(list(handles), left):
                _advance(handles[handle])

    def _raise_failures(self) -> None:
        failures = [f"rank {i} {r.failure}" for i, r in enumerate(self.ranks) if r.failure]
        if failures:
            raise RankError("\n".join(failures))

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self.ranks = []
        self._folder.cleanup()


def _give_up(running: list[_Rank], when: str) -> None:
    # A rank that has its result only waits for those that have none, if there are any.
    stuck = [rank for rank in running if not rank.reported] or running
    for rank in stuck:
        rank.failure = rank.failure or f"was still running {when}:\n{_stack_of(rank)}"


def _advance(rank: _Rank) -> None:
    """Take in what the rank sent, or its end."""
    if rank.reported:
        rank.process.join()
        code = rank.process.exitcode
        rank.ended = True
        if code != 0 and not rank.failure:
            rank.failure = f"returned, but then {_ending(code)}"
        return
    try:
        rank.failure, value = pickle.loads(rank.pipe.recv_bytes())
        rank.value = None if rank.failure else pickle.loads(value)
        rank.reported = True
    except (EOFError, ConnectionResetError):
        rank.process.join()
        rank.failure = f"{_ending(rank.process.exitcode)} without a word\n{_text_of(rank.stacks)}"
        rank.ended = True


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _stack_of(rank: _Rank) -> str:
    """Return the stack of a rank that hangs; its interpreter need not be running."""
    if rank.process.pid is None or not rank.process.is_alive():
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, _STACK_SIGNAL)
    time.sleep(0.2)
    return _text_of(rank.stacks)


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _run_rank(rank: int, world: int, port: int, pipe: Connection, log: str) -> None:
    """Run functions in a rank's process, one after the other, until one fails."""
    torch.set_num_threads(1)
    with Path(log).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(_STACK_SIGNAL, stacks)
        store = TCPStore("127.0.0.1", port, is_master=False)
        for number in itertools.count():
            job = pipe.recv_bytes()
            if not job:
                break
            try:
                with _group(rank, world, PrefixStore(f"ranks{number}", store)) as ours, _put_back():
                    fn, args = pickle.loads(job)
                    pipe.send_bytes(pickle.dumps(("", pickle.dumps(fn(rank, world, *args)))))
                    _meet(ours, world)
            except BaseException:
                pipe.send_bytes(pickle.dumps((f"raised:\n{traceback.format_exc()}", b"")))
                break
        faulthandler.disable()


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Put back what functions change in passing, and free what they have left."""
    folder, random_state = os.getcwd(), random.getstate()
    with warnings.catch_warnings(), env.put_back():
        yield
    os.chdir(folder)
    random.setstate(random_state)
    torch.default_generator.set_state(_INITIAL_RANDOM_STATE)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    gc.collect()


@contextlib.contextmanager
def _group(rank: int, world: int, store: Store) -> Iterator[Store]:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=30)
    )
    try:
        yield store
    finally:
        dist.destroy_process_group()


def _meet(store: Store, world: int) -> None:
    """Ranks leave together: one that closes its connections early can fail another's collective.

    Not a barrier of the group, which would meet whatever collective a test has left behind.
    """
    if store.add("leaving", 1) == world:
        store.set("left", "all")
    store.wait(["left"], timedelta(hours=1))
