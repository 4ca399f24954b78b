"""What elastic=True costs, how soon a step is finished after a death, and how soon a rank is back.

    python -m docs.measure_elastic --rounds 60 --deaths 5

The price: steps of the same model with and without it, in turns. A death: a rank gets SIGKILL in
the middle of a backward, and the survivors' backward returns. A return: from catch_up() of a rank
that has been started again to the end of its first step, how long the others wait for it, and how
fast it gets what they have, next to one plain message of as many bytes between the same ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.engine import handover
from fastsync.front import returning
from fastsync.testing import run_ranks
from fastsync.torch_private import TCPStore

# Name, width, layers, rows of a batch.
MODELS = {"wide": (1024, 8, 64), "deep": (128, 40, 64)}


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
        fastsync.FastDDP(make(name), elastic=elastic, shared_memory=memory)
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


def survive(rank: int, world: int, folder: str, memory: bool) -> None:
    """Trains; the last rank dies in its tenth backward."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    net = make("deep")
    model = fastsync.FastDDP(net, elastic=True, bucket_cap_mb=0.5, shared_memory=memory)
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
        ranks = [
            forking.Process(target=survive, args=(rank, world, folder, memory))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        found = [float(file.read_text()) for file in Path(folder).glob("*.json")]
    assert len(found) == world - 1
    return max(found)


def serve(port: Connection) -> None:
    """A store that outlives every rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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


def come_back(folder: str, port: int, rank: int, attempt: int, world: int) -> None:
    """Trains until the last rank, which dies in its sixth step, has been back for three."""
    place = {"RANK": 0, "WORLD_SIZE": 1} if attempt else {"RANK": rank, "WORLD_SIZE": world}
    place |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": attempt}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["FASTSYNC_ELASTIC_RANK"] = f"{rank}/{world}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    model = fastsync.FastDDP(net, elastic=True)
    optimizer = torch.optim.AdamW(model.parameters())
    transfer: list[float] = []
    vars(returning)["receive"] = timed(handover.receive, transfer)
    steps: list[float] = []
    began = time.perf_counter()
    done = model.catch_up(optimizer)
    while not is_over(model.elastic, world, done):
        if rank == world - 1 and done == 5:
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
    group = model.elastic.group
    if rank == 0:
        message_seconds(group, 0, world - 1, 3 * bytes_of(net))
        Path(folder, "steps").write_text(json.dumps([max(steps[6:]), median(steps)]))
    if attempt:
        message = message_seconds(group, 0, world - 1, 3 * bytes_of(net))
        Path(folder, "back").write_text(json.dumps([back, sum(transfer), message, bytes_of(net)]))


def is_over(now: fastsync.Membership | None, world: int, done: int) -> bool:
    assert now is not None
    return now.size == world and now.since > 1 and done >= now.since + 3


def bytes_of(net: nn.Module) -> int:
    return sum(param.nbytes for param in net.parameters())


def report_return(world: int) -> None:
    forking = multiprocessing.get_context("fork")
    here, there = forking.Pipe()
    server = forking.Process(target=serve, args=(there,))
    server.start()
    port = here.recv()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            forking.Process(target=come_back, args=(folder, port, rank, 0, world))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        ranks[-1].join(120)
        ranks[-1] = forking.Process(target=come_back, args=(folder, port, world - 1, 1, world))
        ranks[-1].start()
        for process in ranks:
            process.join(120)
        server.kill()
        back, transfer, message, size = json.loads(Path(folder, "back").read_text())
        longest, usual = json.loads(Path(folder, "steps").read_text())
    state = 3 * size  # AdamW keeps two numbers for each
    print(
        f"{world} ranks: {back:.2f} s from catch_up() to the end of the first step; the others "
        f"wait {longest - usual:.2f} s of them. {state / 2**20:.0f} MiB in {transfer:.2f} s: "
        f"{1e-9 * state / transfer:.2f} GB/s, {message / transfer:.0%} of the rate of one message"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="steps of each kind")
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4, help="of the trainings with a death")
    parser.add_argument("--returns", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(asked.returns):
        report_return(asked.ranks)
    for memory in (True, False):
        way = "shared memory" if memory else "Gloo"
        deaths = [seconds_of_death(asked.ranks, memory) for _ in range(asked.deaths)]
        print(
            f"{asked.ranks} ranks, {way}: step finished {median(deaths):.2f} s after SIGKILL "
            f"(median of {len(deaths)}; longest {max(deaths):.2f} s)"
        )
        for name in MODELS:
            without, with_it = run_ranks(price, 2, name, asked.rounds, memory, timeout=300)[0]
            print(
                f"2 ranks, {way}, {name}: {1e3 * without:.2f} ms per step, with elastic=True "
                f"{1e3 * with_it:.2f} ms ({with_it / without - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
