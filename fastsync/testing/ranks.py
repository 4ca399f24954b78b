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
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fastsync.torch_private import PrefixStore, Store, TCPStore

__all__ = ["RankError", "count_dispatched_ops", "run_ranks"]

T = TypeVar("T")

# Seconds that the other ranks get to end by themselves once one has failed.
_GRACE = 5.0
_STACK_SIGNAL = signal.SIGUSR1


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
    with tempfile.TemporaryDirectory(prefix="fastsync-ranks-") as folder:
        job = pickle.dumps((fn, args))
        team = _Team(world_size, Path(folder))
        try:
            team.start(job)
            team.collect(time.monotonic() + timeout, grace)
        finally:
            team.kill()
        return team.results()


def count_dispatched_ops(fn: Callable[[], object]) -> int:
    """The number of CPU events that torch's profiler records while `fn` runs.

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
    reported: bool = False
    ended: bool = False


@dataclass
class _Team:
    """The processes of one call of `run_ranks`, seen from the process that called it."""

    size: int
    folder: Path
    ranks: list[_Rank] = field(default_factory=list)

    def start(self, job: bytes) -> None:
        # This process serves the rendezvous store: its port cannot be taken by another process, and
        # the store lives longer than every rank.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            stacks = self.folder / f"rank{rank}.stacks"
            mine, theirs = _context().Pipe(duplex=False)
            arguments = (rank, self.size, self.store.port, job, theirs, str(stacks))
            process = _context().Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(_Rank(process, mine, stacks))

    def collect(self, deadline: float, grace: float) -> None:
        """Wait for all ranks, less long once one has failed."""
        timeout = deadline - time.monotonic()
        failed = False
        while running := [rank for rank in self.ranks if not rank.ended]:
            if not failed and any(rank.failure for rank in self.ranks):
                failed = True
                deadline = min(deadline, time.monotonic() + grace)
            left = deadline - time.monotonic()
            if left <= 0:
                when = "after another rank had failed" if failed else f"after {timeout:.0f} s"
                _give_up(running, when)
                return
            handles: dict[Any, _Rank] = {
                r.process.sentinel if r.reported else r.pipe: r for r in running
            }
            for handle in wait(list(handles), left):
                _advance(handles[handle])

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.pipe.close()

    def results(self) -> list[Any]:
        failures = [f"rank {i} {r.failure}" for i, r in enumerate(self.ranks) if r.failure]
        if failures:
            raise RankError("\n".join(failures))
        return [rank.value for rank in self.ranks]


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
    except EOFError:
        rank.process.join()
        rank.failure = f"{_ending(rank.process.exitcode)} without a word\n{_text_of(rank.stacks)}"
        rank.ended = True


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _stack_of(rank: _Rank) -> str:
    """Return the stack of a rank that hangs; its interpreter need not be running for that."""
    if rank.process.pid is None or not rank.process.is_alive():
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, _STACK_SIGNAL)
    time.sleep(0.2)
    return _text_of(rank.stacks)


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _run_rank(rank: int, world: int, port: int, job: bytes, pipe: Connection, log: str) -> None:
    """Run a job in a rank's process."""
    torch.set_num_threads(1)
    with Path(log).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(_STACK_SIGNAL, stacks)
        try:
            with _group(rank, world, port) as store:
                fn, args = pickle.loads(job)
                pipe.send_bytes(pickle.dumps(("", pickle.dumps(fn(rank, world, *args)))))
                _meet(store, world)
        except BaseException:
            pipe.send_bytes(pickle.dumps((f"raised:\n{traceback.format_exc()}", b"")))
        faulthandler.disable()


@contextlib.contextmanager
def _group(rank: int, world: int, port: int) -> Iterator[Store]:
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("ranks", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=30),
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
