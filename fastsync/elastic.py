"""Starts a training whose ranks may die: the others go on.

torchrun ends all ranks when one dies. This leaves the others alone, and serves the rendezvous store
itself, so that rank 0 may die as well::

    python -m fastsync.elastic --nproc-per-node 4 train.py --lr 0.1

The script wraps its model with `FastDDP(model, elastic=True)`. With `--restarts` ranks that die are
started again, and `model.catch_up(optimizer)` brings them back into the training. It also brings in
the ranks that join with `--max-ranks`, one for each SIGUSR1. All ranks run on this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from fastsync.build.env import NCCL_LETS_LIVE, inherited
from fastsync.front.seat import ELASTIC_STORE
from fastsync.ranks.newcomers import ENDED, back_key
from fastsync.torch_private import PrefixStore, Store, TCPStore

__all__ = ["main"]

_PAUSE = 0.05
_GRACE = 2.5  # seconds between SIGTERM and SIGKILL
_HERE = "127.0.0.1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.elastic",
        description="Starts PROGRAM on several ranks, and leaves the others alone when one dies.",
    )
    parser.add_argument("--nproc-per-node", type=int, required=True, metavar="N", help="ranks")
    parser.add_argument(
        "--min-ranks",
        type=int,
        default=1,
        metavar="N",
        help="end all ranks, and fail, when fewer are left (default: 1)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start ranks that die again, N times in all; the script calls catch_up() (default: 0)",
    )
    parser.add_argument(
        "--max-ranks",
        type=int,
        metavar="N",
        help="start a rank more on each SIGUSR1, while fewer are running; the script calls "
        "catch_up() (default: --nproc-per-node)",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module's name")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    return parser


@dataclass
class _Ranks:
    """Processes, by rank.

    Args:
        command: what each runs.
        world: how many begin.
        server: whose store they meet in.
        restarts: of ranks that end badly, in all.
        most: that run at once; more may join than have begun.

    Attributes:
        ranks: how many there have been, with those that have joined.
        asked: how often another one has been asked for; written by a signal's handler alone.
        running: those that have not ended.
        failed: exit codes of those that have ended badly for good; negative: the signal.
    """

    command: Sequence[str]
    world: int
    server: TCPStore
    restarts: int = 0
    most: int = 0
    ranks: int = 0
    asked: int = 0
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    signalled: int = 0  # this process
    _heard: int = 0  # of what has been asked
    _restarted: int = 0
    _later: int = 0  # how many processes have been started after the others
    _again: dict[int, int] = field(default_factory=dict)  # running ranks, and the how manieth
    _alone: dict[int, TCPStore] = field(default_factory=dict)  # the stores of their groups
    _ends: bool = False  # a rank has come to its end

    def start(self) -> None:
        self.ranks = self.world
        for rank in range(self.world):
            self.running[rank] = self._process(rank, rank, self.world, self.server)

    def _process(
        self, rank: int, group_rank: int, group_size: int, server: TCPStore
    ) -> subprocess.Popen[bytes]:
        place = {"RANK": group_rank, "LOCAL_RANK": rank, "WORLD_SIZE": group_size, "GROUP_RANK": 0}
        place |= {"LOCAL_WORLD_SIZE": self.world, "MASTER_PORT": server.port}
        variables = {name: str(value) for name, value in place.items()}
        # As torchrun tells its ranks that the store is there already.
        variables |= {"MASTER_ADDR": _HERE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        variables["TORCHELASTIC_RESTART_COUNT"] = str(self._later)
        variables["FASTSYNC_ELASTIC_RANK"] = f"{rank}/{self.world}"
        if server is not self.server:
            variables["FASTSYNC_ELASTIC_STORE"] = f"{_HERE}:{self.server.port}"
        environment = {**NCCL_LETS_LIVE, **inherited(variables)}
        return subprocess.Popen(self.command, env=environment)

    @property
    def _store(self) -> Store:
        return PrefixStore(ELASTIC_STORE, self.server)

    def look(self, restarts: bool = True) -> None:
        """Notes who has ended, says who has badly, and starts those again that may come back."""
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[rank]
            self._again.pop(rank, None)
            self._alone.pop(rank, None)
            if code == 0 and not self._ends:
                self._ends = True
                self._store.set(ENDED, "")
            if code != 0:
                self._note(rank, code, restarts and self._restarted < self.restarts)

    def take_in(self) -> None:
        """Starts the ranks that are to join."""
        while self._heard < self.asked:
            self._heard += 1
            left = len(self.running)
            if left >= self.most or self._ends:
                why = "the training ends" if self._ends else f"{left} of {self.most} are running"
                print(f"fastsync.elastic: no rank joins: {why}", file=sys.stderr)
                continue
            rank, self.ranks = self.ranks, self.ranks + 1
            self._start_later(rank)
            print(f"fastsync.elastic: rank {rank} joins; {left + 1} are running", file=sys.stderr)

    def _note(self, rank: int, code: int, restarts: bool) -> None:
        left = f"{len(self.running)} ranks are running"
        # Somebody has to have what it needs.
        again = restarts and not self._ends and any(map(self._trains, self.running))
        words = "; it is started again" if again else ""
        print(f"fastsync.elastic: rank {rank} {_words(code)}; {left}{words}", file=sys.stderr)
        if not again:
            self.failed[rank] = code
            return
        self._restarted += 1
        self._start_later(rank)

    def _start_later(self, rank: int) -> None:
        self._later += 1
        self._again[rank] = self._later
        # It is the only rank of its default group, whose keys would be those of the others' rank 0.
        self._alone[rank] = _serve()
        self.running[rank] = self._process(rank, 0, 1, self._alone[rank])

    def _trains(self, rank: int) -> bool:
        again = self._again.get(rank, 0)
        return not again or self._store.check([back_key(again)])

    @property
    def goes_on(self) -> bool:
        """Whether any process has what all need. Those that wait to come back have not."""
        return self._ends or any(map(self._trains, self.running))

    def end(self) -> None:
        """Returns when none is running."""
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE
        while self.running and time.monotonic() < deadline:
            self.look(restarts=False)
            time.sleep(_PAUSE)
        for process in self.running.values():
            process.kill()
            process.wait()
        self.look(restarts=False)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number

    def on_request(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1


def _serve() -> TCPStore:
    return TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`.

    Returns:
        The exit status: 0 if at least `--min-ranks` ranks have ended well.
    """
    parser = _parser()
    asked = parser.parse_args(argv)
    world, least = asked.nproc_per_node, asked.min_ranks
    if not 1 <= least <= world:
        parser.error(f"--min-ranks must be from 1 to --nproc-per-node, {world}, but is {least}")
    if asked.restarts < 0:
        parser.error(f"--restarts must not be negative, but is {asked.restarts}")
    most = world if asked.max_ranks is None else asked.max_ranks
    if most < world:
        parser.error(f"--max-ranks must be at least --nproc-per-node, {world}, but is {most}")
    if most > world == 1:
        parser.error("--max-ranks: ranks join a training that has begun with at least 2")
    # As long as this process lives, so does the store.
    store = _serve()
    command = [sys.executable, *(["-m"] if asked.module else []), asked.program, *asked.arguments]
    ranks = _Ranks(command, world, store, asked.restarts, most)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ranks.on_signal)
    signal.signal(signal.SIGUSR1, ranks.on_request)
    try:
        ranks.start()
        if most > world:
            words = f"send SIGUSR1 to process {os.getpid()} for each rank that is to join"
            print(f"fastsync.elastic: {words}", file=sys.stderr)
        while ranks.running and not ranks.signalled and ranks.ranks - len(ranks.failed) >= least:
            ranks.look()
            ranks.take_in()
            if not ranks.goes_on:
                print("fastsync.elastic: no rank is left that has trained", file=sys.stderr)
                break
            time.sleep(_PAUSE)
    finally:
        ranks.end()
    if ranks.signalled:
        return 128 + ranks.signalled
    return 0 if ranks.ranks - len(ranks.failed) >= least else 1


if __name__ == "__main__":
    sys.exit(main())
