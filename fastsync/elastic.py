"""Starts a training whose ranks may die: the others go on.

torchrun ends all ranks when one dies. This leaves the others alone, and serves the rendezvous store
itself, so that rank 0 may die as well::

    python -m fastsync.elastic --nproc-per-node 4 train.py --lr 0.1

The script wraps its model with `FastDDP(model, elastic=True)`. All ranks run on this machine.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from fastsync.build.env import inherited
from fastsync.torch_private import TCPStore

__all__ = ["main"]

_PAUSE = 0.05
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
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
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module's name")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    return parser


@dataclass
class _Ranks:
    """Processes, by rank.

    Attributes:
        running: those that have not ended.
        failed: exit codes of those that have ended badly; negative: the signal.
    """

    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    signalled: int = 0  # this process

    def start(self, command: Sequence[str], world: int, port: int) -> None:
        for rank in range(world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            place |= {"LOCAL_WORLD_SIZE": world, "MASTER_PORT": port, "GROUP_RANK": 0}
            variables = {name: str(value) for name, value in place.items()}
            # As torchrun tells its ranks that the store is there already.
            served = {"MASTER_ADDR": _HERE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            served["TORCHELASTIC_RESTART_COUNT"] = "0"
            self.running[rank] = subprocess.Popen(command, env=inherited(variables | served))

    def look(self) -> None:
        """Notes who has ended, and says who has badly."""
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[rank]
            if code != 0:
                self.failed[rank] = code
                left = f"{len(self.running)} ranks are running"
                print(f"fastsync.elastic: rank {rank} {_words(code)}; {left}", file=sys.stderr)

    def end(self) -> None:
        """Returns when none is running."""
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE
        while self.running and time.monotonic() < deadline:
            self.look()
            time.sleep(_PAUSE)
        for process in self.running.values():
            process.kill()
            process.wait()
        self.look()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number


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
    # As long as this process lives, so does the store.
    store = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, *(["-m"] if asked.module else []), asked.program, *asked.arguments]
    ranks = _Ranks()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ranks.on_signal)
    try:
        ranks.start(command, world, store.port)
        while ranks.running and not ranks.signalled and world - len(ranks.failed) >= least:
            ranks.look()
            time.sleep(_PAUSE)
    finally:
        ranks.end()
    if ranks.signalled:
        return 128 + ranks.signalled
    return 0 if world - len(ranks.failed) >= least else 1


if __name__ == "__main__":
    sys.exit(main())
