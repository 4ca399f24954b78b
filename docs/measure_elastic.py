"""What elastic=True costs, how soon a step is finished after a death, and how soon a rank is back.

    python -m docs.measure_elastic --links loopback,10gbit,1gbit --json bench/results/elastic.json
    python -m docs.measure_elastic --only deaths --deaths 20
    python -m docs.measure_elastic --only nodes --schedules 300 --json bench/results/nodes.json

The price: steps of the same model with and without it, in turns. A death: a rank gets SIGKILL in
the middle of a backward, and the survivors' backward returns. A return: from catch_up() of a rank
that has been started again to the end of its first step, how long the others wait for it, and how
fast it gets what they have, next to one plain message of as many bytes between the same ranks, and
to the rate of the link. Links that are shaped need what `bench links` needs. Nodes: of two nodes
that average parameters now and then, one gets SIGKILL at a drawn moment, and comes back after drawn
times; how fast the other trains meanwhile, against the rounds before, and its longest stall.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from bench.measure.netns import Link, LinkName, Seat, missing_rights, network, parse_links
from docs.tables import write_table
from examples.common.text import Row
from fastsync._build import extension
from fastsync._torch import TCPStore
from fastsync.ddp import rejoin
from fastsync.reducer import state_transfer
from fastsync.testing import run_ranks

# Name, width, layers, rows of a batch.
MODELS = {"wide": (1024, 8, 64), "deep": (128, 40, 64)}
HERE = "127.0.0.1"
STEP, ROUND = 0.1, 16  # seconds that a step of nodes computes, by waiting; steps of a round
QUIET = 1  # rounds before a death
AWAY = (2.0, 10.0)  # seconds that a node is dead
LIMIT = 300.0  # seconds that ranks of a return wait for each other
_CLONE_NEWNET = 0x40000000  # for setns(2), which os has from Python 3.12 on


def make(name: str) -> nn.Sequential:
    width, layers, _ = MODELS[name]
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts)


def price(rank: int, world: int, name: str, rounds: int, memory: bool) -> tuple[float, float]:
    """Seconds of a step without elastic=True and with it, medians."""
    torch.set_num_threads(1)
    width, _, rows = MODELS[name]
    models = [
        fastsync.FastDDP(
            make(name),
            faults=fastsync.Faults(elastic=elastic),
            wire=fastsync.Wire(shared_memory=memory),
        )
        for elastic in (False, True)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    x = torch.randn(rows, width)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 5):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            optimizers[which].zero_grad()
            models[which](x).square().mean().backward()
            optimizers[which].step()
            if number >= 5:
                times[which].append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


def survive(rank: int, world: int, folder: str, memory: bool, port: int) -> None:
    """Trains; the last rank dies in its tenth backward."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=TCPStore(HERE, port, is_master=False),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    net = make("deep")
    model = fastsync.FastDDP(
        net,
        faults=fastsync.Faults(elastic=True),
        bucket_cap_mb=0.5,
        wire=fastsync.Wire(shared_memory=memory),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    died = Path(folder, "died")

    def reach(grad: torch.Tensor) -> None:
        if rank == world - 1 and step == 9:
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    middle = next(iter(net[len(net) // 2].parameters()))
    middle.register_hook(reach)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.randn(64, MODELS["deep"][0])).square().mean().backward()
        if step == 9:
            seconds = time.time() - float(died.read_text())
            Path(folder, f"{rank}.json").write_text(str(seconds))
        optimizer.step()


def seconds_of_death(world: int, memory: bool) -> float:
    """From the signal to the end of the step, on the survivor that takes longest."""
    forking = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        here, there = forking.Pipe()
        server = forking.Process(target=serve, args=(there, None))
        server.start()
        port = here.recv()
        ranks = [
            forking.Process(target=survive, args=(rank, world, folder, memory, port))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        server.kill()
        found = [float(file.read_text()) for file in Path(folder).glob("*.json")]
    assert len(found) == world - 1
    return max(found)


def enter(seat: Seat | None) -> None:
    """Has this process, which has one thread so far, live where a seat is."""
    if seat is not None:
        with open(f"/proc/{seat.holder}/ns/net", "rb") as namespace:
            failed = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET)
        if failed:
            raise OSError(ctypes.get_errno(), "setns")


def serve(port: Connection, seat: Seat | None) -> None:
    """A store that outlives every rank."""
    enter(seat)
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        seconds.append(time.perf_counter() - start)
        return result

    return run


def message_seconds(group: dist.ProcessGroup, giver: int, taker: int, size: int) -> float:
    """One plain message between two ranks, the fastest of three."""
    flat, seconds = torch.ones(size, dtype=torch.uint8), []
    for _ in range(3):
        start = time.perf_counter()
        if group.rank() == giver:
            group.send([flat], taker, 1).wait()
        else:
            group.recv([flat], giver, 1).wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Return:
    """A training to which its last rank comes back.

    Attributes:
        folder: that ranks leave their times in.
        seats: of the ranks; None on the loopback device.
    """

    folder: str
    world: int
    link: LinkName
    port: int
    seats: Sequence[Seat | None]

    def begin(self, rank: int, attempt: int) -> None:
        """Has this process be that rank, for the first time or again: then in a group of its own,
        whose store it serves itself."""
        seat = self.seats[rank]
        enter(seat)
        place: dict[str, object] = {"MASTER_ADDR": HERE}
        if seat is not None:
            place = {**seat.placement(0, 1).environment, "FASTSYNC_SHM": 0}
        place |= {"RANK": rank, "WORLD_SIZE": self.world, "MASTER_PORT": self.port}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt}
        if attempt:
            place["FASTSYNC_ELASTIC_STORE"] = f"{place['MASTER_ADDR']}:{self.port}"
            place |= {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": HERE, "MASTER_PORT": 0}
            place["TORCHELASTIC_USE_AGENT_STORE"] = False
        place["FASTSYNC_ELASTIC_RANK"] = f"{rank}/{self.world}"
        os.environ |= {name: str(value) for name, value in place.items()}
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))

    def is_over(self, now: fastsync.Membership | None, done: int) -> bool:
        assert now is not None
        return now.size == self.world and now.since > 1 and done >= now.since + 3

    def write(self, name: str, **seconds: float) -> None:
        Path(self.folder, name).write_text(json.dumps(seconds))

    def read(self, name: str) -> dict[str, float]:
        found: dict[str, float] = json.loads(Path(self.folder, name).read_text())
        return found


def come_back(training: Return, rank: int, attempt: int) -> None:
    """Trains until the last rank, which dies in its sixth step, has been back for three."""
    training.begin(rank, attempt)
    last = training.world - 1
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(int(8 * training.link.scale))])
    model = fastsync.FastDDP(net, faults=fastsync.Faults(elastic=True))
    optimizer = torch.optim.AdamW(model.parameters())
    if not attempt:
        Link.here(training.world).shape(training.link.rate)  # wrapping has broadcast the weights
    transfer: list[float] = []
    vars(rejoin)["receive"] = timed(state_transfer.receive, transfer)
    steps: list[float] = []
    began = time.perf_counter()
    done = model.catch_up(optimizer)
    while not training.is_over(model.elastic, done):
        if rank == last and done == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(8, 2048)).square().mean().backward()
        optimizer.step()
        done += 1
        steps.append(time.perf_counter() - start)
        if attempt and len(steps) == 1:
            back = time.perf_counter() - began
    assert model.elastic is not None
    state = 3 * sum(param.nbytes for param in net.parameters())  # AdamW keeps two numbers for each
    if rank == 0:
        message_seconds(model.elastic.group, 0, last, state)
        training.write("others", waits=max(steps[6:]) - median(steps))
    if attempt:
        message = message_seconds(model.elastic.group, 0, last, state)
        times = {"back": back, "transfer": sum(transfer), "message": message}
        training.write("back", state=state, **times)


def measure_return(world: int, link: LinkName) -> dict[str, Any]:
    """Seconds of a return, the bytes of its state, and their rate beside others."""
    forking = multiprocessing.get_context("fork")
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        seats = opened.enter_context(network(world)) if link.on_links else [None] * world
        here, there = forking.Pipe()
        server = forking.Process(target=serve, args=(there, seats[0]))
        server.start()
        training = Return(folder, world, link, here.recv(), seats)

        def start(rank: int, attempt: int) -> BaseProcess:
            process = forking.Process(target=come_back, args=(training, rank, attempt))
            process.start()
            return process

        ranks = [start(rank, 0) for rank in range(world)]
        ranks[-1].join(LIMIT)
        ranks[-1] = start(world - 1, 1)
        for process in ranks:
            process.join(LIMIT)
        server.kill()
        found = training.read("back") | training.read("others")
    rate = link.bits_per_second
    shares = {"of_message": found["message"] / found["transfer"]}
    shares |= {"of_link": 8 * found["state"] / found["transfer"] / rate} if rate else {}
    return {"link": link.name, "ranks": world, **found, **shares}


@dataclass(frozen=True)
class Step:
    """A step of a rank: when it ended, its number, and how many ranks there were."""

    end: float
    number: int
    ranks: int


def train_in_rounds(training: Return, rank: int, attempt: int) -> None:
    """Trains with `sync` until it is killed, and writes when each step has ended."""
    training.begin(rank, attempt)
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(2)])
    model = fastsync.FastDDP(net, sync=fastsync.DiLoCo(ROUND), faults=fastsync.Faults(elastic=True))
    optimizer = torch.optim.AdamW(model.parameters())
    with open(Path(training.folder, f"{rank}-{attempt}"), "w", buffering=1) as log:
        print(time.monotonic(), 0, 0, file=log)  # when it is ready to take part
        step = model.catch_up(optimizer)
        while True:
            optimizer.zero_grad()
            model(torch.ones(1, 256)).square().mean().backward()
            time.sleep(STEP)
            optimizer.step()
            step += 1
            assert model.elastic is not None
            print(time.monotonic(), step, model.elastic.size, file=log)


class Nodes:
    """Two nodes of two ranks, of which one at a time is killed and started again.

    Args:
        training: in which no rank is on a shaped link.
    """

    def __init__(self, training: Return) -> None:
        self._training, self._started = training, 0
        self._running: dict[int, tuple[int, BaseProcess]] = {}
        for rank in range(training.world):
            self._start(rank, 0)

    def _start(self, rank: int, attempt: int) -> None:
        forking = multiprocessing.get_context("fork")
        process = forking.Process(target=train_in_rounds, args=(self._training, rank, attempt))
        process.start()
        self._running[rank] = (attempt, process)

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._running[rank][1].kill()
        for rank in ranks:
            self._running[rank][1].join()

    def steps(self, rank: int) -> list[Step]:
        """The steps of a rank's process, after the moment when it was ready to take part."""
        file = Path(self._training.folder, f"{rank}-{self._running[rank][0]}")
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [Step(float(end), int(step), int(n)) for end, step, n in map(str.split, lines)]

    def until_whole(self, rounds: int) -> None:
        """Return once all ranks have ended so many rounds together."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            ends = (rounds_of(self.steps(rank))[-rounds:] for rank in self._running)
            if all(len(its) == rounds and min(s.ranks for s in its) == 4 for its in ends):
                return
            time.sleep(0.1)
        raise TimeoutError("the ranks have not come together")

    def lose_one(self, drawn: random.Random) -> list[Cost]:
        """Return what the death and the return of a node cost the ranks of the other."""
        lost = drawn.choice([(0, 1), (2, 3)])
        self.until_whole(QUIET + 1)
        time.sleep(drawn.uniform(0, ROUND * STEP))
        killed = time.monotonic()
        self.kill(lost)
        time.sleep(drawn.uniform(*AWAY))
        for rank in lost:
            self._started += 1
            self._start(rank, self._started)
            time.sleep(drawn.choice([0.0, 0.1]))
        self.until_whole(1)
        ready = max(self.steps(rank)[0].end for rank in lost)
        left = [rank for rank in self._running if rank not in lost]
        return [Cost.of(self.steps(rank), killed, ready) for rank in left]


def rounds_of(steps: Sequence[Step]) -> list[Step]:
    """The last step of each round."""
    return [step for step in steps if step.number and step.number % ROUND == 0]


@dataclass(frozen=True)
class Cost:
    """What a death and a return cost a rank of the other node.

    Attributes:
        usual: seconds of a step, on average over the rounds before.
        steps: from the end of the last round before the death to that of the first one that has all
            ranks again.
        seconds: of these steps.
        stall: the longest of them, less a usual one.
        before: the longest of the steps before, less a usual one.
        missed: rounds that began when the others were ready to take part, and ended without them.
    """

    usual: float
    steps: int
    seconds: float
    stall: float
    before: float
    missed: int

    @property
    def throughput(self) -> float:
        """Return the rate of steps, of that before."""
        return self.usual * self.steps / self.seconds

    @classmethod
    def of(cls, steps: Sequence[Step], killed: float, ready: float) -> Cost:
        ends = rounds_of(steps)
        last = max(i for i, step in enumerate(ends) if step.end < killed)
        alone = next(i for i in range(last, len(ends)) if ends[i].ranks < 4)
        whole = next(i for i in range(alone, len(ends)) if ends[i].ranks == 4)
        before, begin, end = ends[last - QUIET], ends[last], ends[whole]
        usual = (begin.end - before.end) / (begin.number - before.number)

        def longest(first: Step, last: Step) -> float:
            ends = [step.end for step in steps if first.number <= step.number <= last.number]
            return max(b - a for a, b in pairwise(ends)) - usual

        rounds = pairwise(ends[last : whole + 1])
        missed = sum(a.end > ready and b.ranks < 4 for a, b in rounds)
        taken = (end.number - begin.number, end.end - begin.end)
        return cls(usual, *taken, longest(begin, end), longest(before, begin), missed)


def rows_of_nodes(asked: argparse.Namespace) -> Iterator[Row]:
    """What the death and the return of a node cost the other one."""
    extension.load()  # which a node of its own would do on its own processors
    importlib.import_module("torch._dynamo")
    forking = multiprocessing.get_context("fork")
    drawn, costs = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory() as folder:
        here, there = forking.Pipe()
        server = forking.Process(target=serve, args=(there, None))
        server.start()
        nodes = Nodes(Return(folder, 4, LinkName("loopback"), here.recv(), [None] * 4))
        for number in range(asked.schedules):
            costs.append(nodes.lose_one(drawn))
            print(number, *costs[-1], file=sys.stderr, flush=True)
        nodes.kill(range(4))
        server.kill()
    slowest = [min(pair, key=lambda cost: cost.throughput) for pair in costs]
    whole = sum(c.usual * c.steps for c in slowest) / sum(c.seconds for c in slowest)
    shares = sorted(cost.throughput for cost in slowest)
    yield (
        "steps a second of a node while the other is dead and comes back, of those before",
        "4",
        f"{whole:.1%} in all; of single deaths: {median(shares):.1%}, least {shares[0]:.1%}",
    )
    lost = sum(c.seconds - c.usual * c.steps for c in slowest) / len(slowest)
    yield "what a death and a return cost it", "4", f"{lost:.2f} s"
    stalls = [max(cost.stall for cost in pair) for pair in costs]
    quiet = [max(cost.before for cost in pair) for pair in costs]
    yield (
        "its longest step meanwhile, less a usual one",
        "4",
        f"{median(stalls):.2f} s, longest of {len(stalls)}: {max(stalls):.2f} s; without a death "
        f"{median(quiet):.2f} s, longest {max(quiet):.2f} s",
    )
    missed = Counter(max(cost.missed for cost in pair) for pair in costs)
    counts = ", ".join(f"{rounds} in {number}" for rounds, number in sorted(missed.items()))
    yield "rounds that a node misses which is ready when they begin", "4", counts


def rows_of_returns(asked: argparse.Namespace) -> Iterator[Row]:
    """One for each return."""
    missing = missing_rights() if any(link.on_links for link in asked.links) else None
    if missing:
        raise SystemExit(f"cannot run here: {missing}")
    for link in asked.links:
        for _ in range(asked.returns):
            it = measure_return(asked.ranks, link)
            shares = [f"{it['of_link']:.0%} of the link's rate"] if "of_link" in it else []
            shares.append(f"{it['of_message']:.0%} of the rate of one message")
            state = f"{it['state'] / 2**20:.0f} MiB in {it['transfer']:.2f} s"
            yield (
                f"a return over {link.name}, from catch_up() to the end of the first step",
                str(it["ranks"]),
                f"{it['back']:.2f} s; the others wait {it['waits']:.2f} s; state: {state}, "
                + ", ".join(shares),
            )


def rows_of_deaths(asked: argparse.Namespace) -> Iterator[Row]:
    """How soon a step is finished without the dead rank, and what it costs to survive."""
    for memory in (True, False):
        way = "in shared memory" if memory else "over Gloo"
        deaths = [seconds_of_death(asked.ranks, memory) for _ in range(asked.deaths)]
        found = f"{median(deaths):.2f} s, longest of {len(deaths)}: {max(deaths):.2f} s"
        yield f"from SIGKILL to the finished step, {way}", str(asked.ranks), found
        for name in MODELS:
            without, with_it = run_ranks(price, 2, name, asked.rounds, memory, timeout=300)[0]
            found = f"{1e3 * without:.2f} ms, with elastic=True {with_it / without - 1:+.1%}"
            yield f"a step of `{name}` {way}", "2", found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--rounds", type=int, default=60, help="steps of each kind")
    made.add_argument("--deaths", type=int, default=5)
    made.add_argument("--ranks", type=int, default=4, help="of the trainings with a death")
    made.add_argument("--returns", type=int, default=3, help="over each link")
    made.add_argument("--schedules", type=int, default=20, help="deaths and returns of a node")
    made.add_argument("--seed", type=int, default=0, help="of those")
    made.add_argument("--links", type=parse_links, default="loopback", help="see bench links")
    made.add_argument("--json", type=Path, help="write what was found to this file")
    made.add_argument("--only", choices=("returns", "deaths", "nodes"), help="default: all")
    return made


def main() -> None:
    asked = parser().parse_args()
    torch.set_num_threads(1)
    kinds = {"deaths": rows_of_deaths, "returns": rows_of_returns, "nodes": rows_of_nodes}
    rows: list[Row] = []
    for name, measured in kinds.items():
        if asked.only in (None, name):
            for row in measured(asked):
                print("; ".join(row), flush=True)
                rows.append(row)
    if asked.json:
        title = "steps after deaths, returns, and what elastic=True costs when nothing happens"
        if asked.only == "nodes":
            title = (
                f"two nodes of two ranks in `DiLoCo({ROUND})`, with steps that wait "
                f"{1e3 * STEP:.0f} ms; a node is dead for {AWAY[0]:.0f} to {AWAY[1]:.0f} s"
            )
        write_table(asked.json, title, ["", "ranks", "measured"], rows, ranks=asked.ranks)


if __name__ == "__main__":
    main()
