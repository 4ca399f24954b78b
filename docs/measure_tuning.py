"""What tune=True gains: beside the default, and the best of a grid of sizes.

    python -m docs.measure_tuning --json bench/results/tune.json
    python -m docs.measure_tuning --links 1gbit,100mbit --json bench/results/tune-links.json

Tuned models make their steps of tuning first, each by itself, as a training would. Then all take
turns. The gap is what the best size of the grid gains over the default. The best of several noisy
medians looks better than it is, so it is chosen by the first half of the rounds and judged by the
second. Further models with the default tell how much models differ that are the same. So does a
tuned one that has stayed with the default.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from bench.commands.buckets import variant
from bench.measure import benchmark as b
from bench.measure.netns import Link, LinkName
from bench.models import WORKLOADS
from bench.models.workload import CPU_SCALE
from examples.common.ranks import Group, argument, whole
from examples.common.rounds import over, time_lanes
from examples.common.text import Spread
from examples.common.training import Lane, make_lanes
from examples.common.variants import OURS, Variant, fast_ddp
from fastsync.tune.policy import TunePolicy

TUNED_STEPS = 60  # ten more than a tuning takes at most
TUNED = "tuned"
DEFAULT = variant(OURS, None)
CONTROLS = tuple(replace(DEFAULT, name=f"again {number}") for number in (1, 2))
LEAST_GAP = 0.01
GAINS = ("tuned gains", "the grid's best gains")


@dataclass(frozen=True)
class Found:
    """Of one model over one link: seconds of each way's steps, by round; and what a way chose."""

    seconds: dict[str, list[float]]
    chosen: dict[str, str]


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_pages() -> None:
    """Has the C library keep what is freed, as the allocators do that torch recommends on CPUs.

    Ways take turns in one process. Otherwise which of them pays for the pages that another one has
    returned to the system is chance, and the same step takes a third longer in another run.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is None or not (tune(M_TRIM_THRESHOLD, 2**31 - 1) and tune(M_MMAP_MAX, 0)):
        raise SystemExit("needs glibc, whose malloc can be told to keep its pages")


def measure(name: str, link: LinkName, args: argparse.Namespace, group: Group) -> Found:
    """Tunes, and then times all ways in turn."""
    here = Link.here(group.world)
    here.shape(None)  # wrapping broadcasts the weights
    grid = tuple(variant(OURS, cap) for cap in args.sizes)
    wrap = fast_ddp(tune=TunePolicy(remember=False))
    tuned = tuple(Variant(f"{TUNED} {number}", wrap) for number in range(args.tunings))
    scale = link.scale if args.scale is None else args.scale
    workload = WORKLOADS[name](scale=scale * (CPU_SCALE if name == "gpt2" else 1.0))
    lanes = make_lanes(workload, (DEFAULT, *CONTROLS, *tuned, *grid), group)
    here.shape(link.rate)
    for each in tuned:
        lanes[each.name].steps(TUNED_STEPS)
    chosen = {each.name: chosen_by(lanes[each.name]) for each in tuned}
    measured = time_lanes(lanes, group, b.settings_of(args))
    return Found({way: found.seconds for way, found in measured.items()}, chosen)


def chosen_by(lane: Lane) -> str:
    """Sizes of the first bucket, of others and of the last, in MiB."""
    sizes = lane.model.reducer.engine.sizing.chosen
    if sizes is None:
        return "default"
    numbers = (sizes.first, sizes.cap, sizes.last or sizes.cap)
    return "/".join(f"{number / 2**20:.2g}" for number in numbers)


def row(name: str, link: LinkName, group: Group, found: Found) -> list[str]:
    """A line of the table; the default's own sizes belong to the grid."""
    seconds = found.seconds
    half = len(seconds[DEFAULT.name]) // 2
    controls = [each.name for each in CONTROLS]
    grid = [way for way in seconds if way not in (*controls, *found.chosen)]
    best = min(grid, key=lambda way: median(seconds[way][:half]))

    def gained(way: str, rounds: slice = slice(None)) -> Spread:
        ratios = over(seconds[way][rounds], seconds[DEFAULT.name][rounds])
        return Spread.of([1 - ratio for ratio in ratios])

    tuned = {way: gained(way) for way in found.chosen}
    gap, own = gained(best, slice(half, None)), median(each.median for each in tuned.values())
    clear = gap.median > max(LEAST_GAP, gap.margin(half))
    closed = f"{own / gap.median:.0%}" if clear else "no gap"
    base = f"{1e3 * median(seconds[DEFAULT.name]):.1f} ms"
    gains = ", ".join(f"{shown(tuned[w], 2 * half)} ({found.chosen[w]})" for w in tuned)
    again = ", ".join(shown(gained(each), 2 * half) for each in controls)
    size = best.partition("|")[2]
    place = [f"{link.name}, {group.world} ranks", name]
    return [*place, base, again, gains, f"{shown(gap, half)} ({size})", closed]


def shown(gain: Spread, rounds: int) -> str:
    return f"{100 * gain.median:+.1f} ± {100 * gain.margin(rounds):.1f} %"


@b.benchmark(
    *(b.models("wide,gpt2,transformer"), b.SCALE, b.links("loopback"), b.ranks()),
    argument("--sizes", "in MiB", "0.5,1,2,4,8,16,50", type=b.numbers(float, unit="MiB")),
    argument("--tunings", "models that are tuned, each by itself", 3, type=whole),
    *(b.rounds(24), b.steps(2), b.warmup(3), b.seconds(25.0)),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """All links and models in one table."""
    keep_pages()
    rows = [
        row(name, link, group, measure(name, link, args, group))
        for link in Link.here(group.world).these(args.links)
        for name in args.models
    ]
    headers = ("link", "model", "default", "the same again", *GAINS, "closed")
    title = (
        f"what {args.tunings} trainings that begin with {TUNED_STEPS} steps of tune=True gain over "
        f"the default sizes, and the best of {len(args.sizes)} others; {b.MARGIN}; closed: by the "
        "median training; no gap: of 1 % and beyond its margin; in brackets MiB of "
        "the first bucket, of others and of the last"
    )
    yield b.table(title, headers, rows)


if __name__ == "__main__":
    raise SystemExit(main())
