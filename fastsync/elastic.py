"""Starts a training whose ranks may die: the others go on.

torchrun ends all ranks when one dies. This leaves the others alone, and serves the rendezvous store
itself, so that rank 0 may die as well::

    python -m fastsync.elastic --nproc-per-node 4 train.py --lr 0.1

The script wraps its model with `FastDDP(model, faults=fastsync.Faults(elastic=True))`. With
`--restarts` ranks that die are started again, and `model.catch_up(optimizer)` brings them back into
the training. It also brings in the ranks that join with `--max-ranks`, one for each SIGUSR1.

On several machines it runs on each, with the number of the machine; the first serves the store::

    python -m fastsync.elastic --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 ...
    python -m fastsync.elastic --nnodes 2 --node-rank 1 --master-addr host0 --nproc-per-node 4 ...

A rank that dies is started again on its machine. If a whole machine is lost, the others go on, and
its launcher, started again, brings its ranks back. The first machine must not be lost: the others
could not meet.
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
from datetime import timedelta
from functools import partial
from types import FrameType

from fastsync._build.env import NCCL_LETS_LIVE, inherited, path_with_startup
from fastsync._torch import PrefixStore, Store, TCPStore, connect_store
from fastsync.ddp.rank_identity import ELASTIC_STORE
from fastsync.faults.launchers import Launchers, Machine
from fastsync.faults.stores import limit_silence

__all__ = ["main"]

_PAUSE = 0.05
_GRACE = 2.5  # seconds between SIGTERM and SIGKILL
_PATIENCE = timedelta(seconds=60)  # for machine 0 to be there
_HERE = "127.0.0.1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.elastic",
        description="Starts PROGRAM on several ranks, and leaves the others alone when one dies.",
    )
    number = partial(parser.add_argument, type=int, metavar="N")
    number("--nproc-per-node", required=True, help="ranks of this machine, and of each other one")
    number("--nnodes", default=1, help="machines (default: 1)")
    number("--node-rank", default=0, help="which of them this is, from 0 (default: 0)")
    parser.add_argument(
        "--master-addr", metavar="HOST", help="machine 0, as all others reach it, with --nnodes"
    )
    number("--master-port", default=29500, help="of its store, with --nnodes (default: 29500)")
    parser.add_argument(
        "--min-ranks",
        type=int,
        default=1,
        metavar="N",
        help="end all ranks, and fail, when fewer are left on all machines (default: 1)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start ranks that die again, N times in all on this machine; the script calls "
        "catch_up() (default: 0)",
    )
    parser.add_argument(
        "--max-ranks",
        type=int,
        metavar="N",
        help="start a rank more on each SIGUSR1, while fewer are running on all machines; the "
        "script calls catch_up() (default: those of the start)",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module's name")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    return parser


@dataclass
class _Ranks:
    """Processes of this machine, by rank.

    Args:
        command: what each runs.
        world: how many ranks begin, on all machines.
        each: on each of them.
        place: host and port of the store that they meet in.
        launchers: of all machines.
        restarts: of ranks that end badly, in all.
        most: that run at once on all machines; more may join than have begun.

    Attributes:
        ranks: how many there have been here, with those that have joined.
        requested: how often another one has been requested; written by a signal's handler alone.
        running: those that have not ended.
        failed: exit codes of those that have ended badly for good; negative: the signal.
    """

    command: Sequence[str]
    world: int
    each: int
    place: tuple[str, int]
    launchers: Launchers
    restarts: int = 0
    most: int = 0
    ranks: int = 0
    requested: int = 0
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    signalled: int = 0  # this process
    _handled: int = 0  # of what has been requested
    _restarted: int = 0
    _again: dict[int, int] = field(default_factory=dict)  # running ranks, and the how manieth
    _alone: dict[int, TCPStore] = field(default_factory=dict)  # the stores of their groups
    _local: dict[int, int] = field(default_factory=dict)  # their numbers on this machine
    _ends: bool = False  # a rank has come to its end

    def start(self) -> None:
        """Start the ranks; if an earlier launcher of this machine has had ranks, they come back."""
        first = self.launchers.node * self.each
        begins_again = self.launchers.begin()
        for rank in range(first, first + self.each):
            self._local[rank] = rank - first
            if begins_again:
                self._start_later(rank)
            else:
                self.running[rank] = self._process(rank, self.place, 0)
        self.ranks = self.each

    def _process(self, rank: int, place: tuple[str, int], later: int) -> subprocess.Popen[bytes]:
        """
        Args:
            place: host and port of the store of the default group.
            later: the number of a process that is started after the others; 0: of none such. Its
                default group has one rank (see fastsync/ddp/rank_identity.py), whatever RANK says.
        """
        world = max(self.world, rank + 1)  # a rank that joins has the next number
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": self._local[rank]}
        numbers |= {"LOCAL_WORLD_SIZE": self.each, "GROUP_RANK": self.launchers.node}
        numbers |= {"MASTER_PORT": place[1], "TORCHELASTIC_RESTART_COUNT": later}
        variables = {name: str(value) for name, value in numbers.items()}
        # As torchrun tells its ranks that the store is there already.
        variables |= {"MASTER_ADDR": place[0], "TORCHELASTIC_USE_AGENT_STORE": "True"}
        variables["FASTSYNC_ELASTIC_RANK"] = f"{rank}/{self.world}"
        if later:
            variables["FASTSYNC_ELASTIC_STORE"] = f"{self.place[0]}:{self.place[1]}"
            variables["PYTHONPATH"] = path_with_startup()
        environment = {**NCCL_LETS_LIVE, **inherited(variables)}
        return subprocess.Popen(self.command, env=environment)

    def look(self, restarts: bool = True) -> None:
        """Note which ranks have ended, say which have failed, and start those again that may come
        back.
        """
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[rank]
            self._again.pop(rank, None)
            self._alone.pop(rank, None)
            if code == 0 and not self._ends:
                self._ends = True
                self.launchers.end_training()
            if code != 0:
                self._note(rank, code, restarts and self._restarted < self.restarts)
        self.launchers.tell(self.machine())
        self._ends = self._ends or self.launchers.ends

    def machine(self, done: bool = False) -> Machine:
        """Return the state of this machine's ranks."""
        trains = sum(map(self._trains, self.running))
        return Machine(self.ranks, len(self.running), trains, len(self.failed), done)

    @property
    def everywhere(self) -> int:
        """Return how many ranks are running, on all machines."""
        return len(self.running) + sum(other.running for other in self.launchers.others)

    @property
    def left(self) -> int:
        """Return how many ranks run or have ended well, on all machines."""
        return self.machine().left + sum(other.left for other in self.launchers.others)

    def are_enough(self, least: int) -> bool:
        """Return whether as many ranks are left. A launcher that cannot reach the others counts its
        own.
        """
        return not self.failed if self.launchers.cut else self.left >= least

    def take_in(self) -> None:
        """Start the ranks that are to join."""
        while self._handled < self.requested:
            self._handled += 1
            left = self.everywhere
            if left >= self.most or self._ends or self.launchers.cut:
                why = "the training ends" if self._ends else f"{left} of {self.most} are running"
                why = "machine 0 cannot be reached" if self.launchers.cut else why
                print(f"fastsync.elastic: no rank joins: {why}", file=sys.stderr)
                continue
            rank, self.ranks = self.launchers.next_rank(), self.ranks + 1
            self._local[rank] = self.ranks - 1
            self._start_later(rank)
            print(f"fastsync.elastic: rank {rank} joins; {left + 1} are running", file=sys.stderr)

    def _note(self, rank: int, code: int, restarts: bool) -> None:
        left = f"{self.everywhere} ranks are running"
        again = restarts and not self._ends and not self.launchers.cut and self.goes_on
        restart = "; it is started again" if again else ""
        print(f"fastsync.elastic: rank {rank} {_exit_text(code)}; {left}{restart}", file=sys.stderr)
        if not again:
            self.failed[rank] = code
            return
        self._restarted += 1
        self._start_later(rank)

    def _start_later(self, rank: int) -> None:
        later = self._again[rank] = self.launchers.next_process()
        # It is the only rank of its default group, whose keys would be those of the others' rank 0.
        alone = self._alone[rank] = _serve()
        self.running[rank] = self._process(rank, (_HERE, alone.port), later)

    def _trains(self, rank: int) -> bool:
        again = self._again.get(rank, 0)
        return not again or self.launchers.is_back(again)

    @property
    def goes_on(self) -> bool:
        """Return whether any process has what all need; processes that wait to
        come back have not.
        """
        here = any(map(self._trains, self.running))
        return self._ends or here or any(other.trains for other in self.launchers.others)

    @property
    def is_through(self) -> bool:
        """Return whether nothing runs here, and nothing more will."""
        return not self.running and (self._ends or not self.launchers.others or not self.goes_on)

    def end(self) -> None:
        """Return when no process is running."""
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
        self.requested += 1


def _serve(port: int = 0) -> TCPStore:
    """Serve a store on all of this machine's addresses; 0: at a free port."""
    return TCPStore(_HERE, port, is_master=True, wait_for_workers=False)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the process where options make no sense."""
    if args.nnodes < 1 or args.nproc_per_node < 1:
        parser.error("--nnodes and --nproc-per-node must be at least 1")
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node-rank must be from 0 to {args.nnodes - 1}, but is {args.node_rank}")
    if args.nnodes > 1 and not args.master_addr:
        parser.error("--master-addr: name machine 0 as all others reach it")
    world = args.nnodes * args.nproc_per_node
    of = "--nproc-per-node" if args.nnodes == 1 else "--nnodes x --nproc-per-node"
    if not 1 <= args.min_ranks <= world:
        parser.error(f"--min-ranks must be from 1 to {of}, {world}, but is {args.min_ranks}")
    if args.restarts < 0:
        parser.error(f"--restarts must not be negative, but is {args.restarts}")
    most = world if args.max_ranks is None else args.max_ranks
    if most < world:
        parser.error(f"--max-ranks must be at least {of}, {world}, but is {most}")
    if most > world == 1:
        parser.error("--max-ranks: ranks join a training that has begun with at least 2")


def _meet(args: argparse.Namespace) -> tuple[Store, tuple[str, int]]:
    """The store that ranks meet in, and its host and port. As long as what serves it, so does it.

    Raises:
        RuntimeError: it cannot be reached, or not be served.
    """
    if args.nnodes == 1:
        served = _serve()
        return served, (_HERE, served.port)
    place = (args.master_addr, args.master_port)
    if args.node_rank == 0:
        return _serve(args.master_port), place
    store = connect_store(*place, _PATIENCE)
    limit_silence(store, _PATIENCE.total_seconds())
    return store, place


def _run(ranks: _Ranks, least: int) -> None:
    """Watch the ranks until none is running."""
    while not ranks.is_through and not ranks.signalled and ranks.are_enough(least):
        ranks.look()
        ranks.take_in()
        if not ranks.goes_on:
            print("fastsync.elastic: no rank is left that has trained", file=sys.stderr)
            break
        time.sleep(_PAUSE)


def _see_out(ranks: _Ranks) -> None:
    """Wait for the other machines, which need the store: it ends with the launcher of machine 0."""
    ranks.launchers.tell(ranks.machine(done=True), at_once=True)
    while ranks.launchers.node == 0 and ranks.launchers.busy and not ranks.signalled:
        ranks.launchers.tell(ranks.machine(done=True))
        time.sleep(_PAUSE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        The exit status: 0 if at least `--min-ranks` ranks have ended well.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    each, world = args.nproc_per_node, args.nnodes * args.nproc_per_node
    most = world if args.max_ranks is None else args.max_ranks
    try:
        store, place = _meet(args)
    except RuntimeError as error:
        host = f"--master-addr {args.master_addr} --master-port {args.master_port}"
        parser.error(f"{host}: {error}")
    launchers = Launchers(PrefixStore(ELASTIC_STORE, store), args.node_rank, args.nnodes, each)
    shape = f"--nnodes {args.nnodes} --nproc-per-node {each}"
    if (others := launchers.agreed(shape)) != shape:
        parser.error(f"{shape}: the launcher of machine 0 was started with {others}")
    command = [sys.executable, *(["-m"] if args.module else []), args.program, *args.arguments]
    ranks = _Ranks(command, world, each, place, launchers, args.restarts, most)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ranks.on_signal)
    signal.signal(signal.SIGUSR1, ranks.on_request)
    try:
        ranks.start()
        if most > world:
            remedy = f"send SIGUSR1 to process {os.getpid()} for each rank that is to join"
            print(f"fastsync.elastic: {remedy}", file=sys.stderr)
        _run(ranks, args.min_ranks)
    finally:
        ranks.end()
    _see_out(ranks)
    if ranks.signalled:
        return 128 + ranks.signalled
    return 0 if ranks.are_enough(args.min_ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
