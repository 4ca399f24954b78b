"""What parameters without gradient cost, in time and in collectives.

    python -m bench.unused --share 0.25 --rounds 100 --json bench/results/unused.json

The model is a stack of residual blocks, of which every n-th is left out of the forward. Leaving it
out saves its compute, whatever wraps the model; so each wrapper is compared with the bare model of
the same control flow. The cost of unused parameters is what synchronisation exposes with them, less
what it exposes without them, in the same round; it is given relative to the step of the model that
uses all. Collectives are counted by torch's profiler, in a step after the timed ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from bench import cli
from bench.harness import Progress, Settings, make_lanes, time_lanes
from bench.launch import Group, launch
from bench.models import WEIGHT_SEED, Workload
from bench.models.workload import mean_square, normal_batch
from bench.record import add_json_argument, publish
from bench.stats import Spread
from bench.training import Lane
from bench.wrappers import Variant

HEADERS = ("wrapper", "step, all used", "step, some unused", "cost of unused", "collectives")
# Left to itself, fastsync cuts buckets as the network allows, and not twice alike.
BUCKET_MIB = 25
# What the backends call their collectives in a profile.
COLLECTIVES = ("gloo:", "nccl:", "c10d::allreduce_", "c10d::broadcast_", "c10d::allgather_")


class Blocks(nn.Module):
    """Residual blocks; those whose turn it is are left out where `skip` is set."""

    def __init__(self, depth: int, width: int, every: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.every = every
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if not (self.skip and index % self.every == 0):
                x = x + block(x)
        return x


@dataclass(frozen=True)
class Wrapper:
    """One way to handle parameters without gradient."""

    name: str
    wrap: Callable[[nn.Module, list[int] | None], nn.Module]


def _torch(module: nn.Module, device_ids: list[int] | None) -> nn.Module:
    return DistributedDataParallel(
        module, device_ids=device_ids, find_unused_parameters=True, bucket_cap_mb=BUCKET_MIB
    )


def _fastsync(module: nn.Module, device_ids: list[int] | None) -> nn.Module:
    from fastsync import FastDDP

    wrapped: nn.Module = FastDDP(
        module, device_ids=device_ids, find_unused_parameters=True, bucket_cap_mb=BUCKET_MIB
    )
    return wrapped


WRAPPERS = (
    Wrapper("no_sync", lambda module, device_ids: module),
    Wrapper("ddp, find_unused_parameters=True", _torch),
    Wrapper("fastsync", _fastsync),
)


def workload(depth: int, width: int, every: int) -> Workload:
    """The stack of blocks; widths and batch such that a step is mostly compute."""

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return Blocks(depth, width, every)

    return Workload("blocks", build, normal_batch(32, width), mean_square)


def variants() -> tuple[Variant, ...]:
    """Each wrapper twice: with all parameters used, then with some unused."""
    return tuple(
        Variant(f"{wrapper.name}, {kind}", "", _wrap(wrapper, kind == "some unused"))
        for wrapper in WRAPPERS
        for kind in ("all used", "some unused")
    )


def _wrap(wrapper: Wrapper, skip: bool) -> Callable[[nn.Module, torch.device], nn.Module]:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        module.skip = skip  # type: ignore[assignment]
        ids = None if device.type == "cpu" else [torch.cuda.current_device()]
        return wrapper.wrap(module, ids)

    return wrap


def collectives(lane: Lane) -> int:
    """Collectives of one step on this rank."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        lane.step()
    names = [event.name for event in profiler.events() or []]
    backend = [name for name in names if name.startswith(COLLECTIVES[:2])]
    return len(backend) or sum(name in COLLECTIVES for name in names)


def costs(rounds: list[list[float]]) -> list[Spread]:
    """The relative cost of unused parameters, by wrapper.

    Args:
        rounds: seconds per step, by lane in the order of `variants()` and by round.
    """
    floor_all, floor_some = rounds[0], rounds[1]
    result = []
    for place in range(0, len(rounds), 2):
        every, some = rounds[place], rounds[place + 1]
        rows = zip(every, some, floor_all, floor_some, strict=True)
        result.append(Spread.of([((s - fs) - (e - fe)) / e for e, s, fe, fs in rows]))
    return result


def run(args: argparse.Namespace, group: Group) -> int:
    every = max(1, round(1 / args.share))
    lanes = make_lanes(workload(args.depth, args.width, every), variants(), group, None)
    settings = Settings(args.rounds, args.steps, args.warmup, check_steps=0)
    progress = Progress(group)
    measured = time_lanes(lanes, group, settings, progress)
    progress.clear()
    seconds = [lane.seconds for lane in measured]
    counts = [collectives(lane) for lane in lanes]
    rows = []
    for index, cost in enumerate(costs(seconds)):
        both = [f"{1e3 * Spread.of(s).median:.1f} ms" for s in seconds[2 * index : 2 * index + 2]]
        all_used, some = counts[2 * index : 2 * index + 2]
        spread = f"{100 * cost.median:+.1f} % ± {100 * cost.margin(args.rounds):.1f}"
        rows.append((WRAPPERS[index].name, *both, spread, f"{all_used} and {some}"))
    title = (
        f"cost of {100 / every:.0f} % unused parameters, relative to the step that uses all, and "
        f"collectives per step without and with them; median of {args.rounds} rounds ± half its "
        "95 % interval"
    )
    publish(title, HEADERS, rows, group, args)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.unused",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--share", type=float, default=0.25, help="of the blocks to leave out (default: 0.25)")
    add("--depth", type=int, default=16, help="blocks (default: 16)")
    add("--width", type=int, default=512, help="of each block (default: 512)")
    add("--rounds", type=int, default=100, help="bursts of each variant (default: 100)")
    add("--steps", type=int, default=4, help="timed steps in a burst (default: 4)")
    add("--warmup", type=int, default=4, help="steps before the first round (default: 4)")
    add("--ranks", type=int, default=2, help="processes to start; torchrun's wins (default: 2)")
    add("--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add_json_argument(parser)
    args = parser.parse_args()
    if not 0 < args.share <= 0.5:
        parser.error("--share must be above 0 and at most 0.5")
    return cli.guarded(lambda: launch(lambda group: run(args, group), args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
