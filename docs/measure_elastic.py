"""What elastic=True costs, and how soon a step is finished after a death.

    python -m docs.measure_elastic --rounds 60 --deaths 5

The price: steps of the same model with and without it, in turns. A death: a rank gets SIGKILL in
the middle of a backward, and the survivors' backward returns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.testing import run_ranks

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="steps of each kind")
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4, help="of the trainings with a death")
    asked = parser.parse_args()
    torch.set_num_threads(1)
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
