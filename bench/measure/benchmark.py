"""The one way to declare a benchmark: its options, what each rank does, and what is written.

    @benchmark(models("wide"), SCALE, ranks(), rounds(9), kind="sizes")
    def main(args, group):
        yield Shown("what is printed", {"points": [...]})

declares a command of that module's name. Its help is the module's text. Its result, which the main
rank writes anew whenever something is yielded, is what was yielded so far by all jobs, with
command, settings and environment in front.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.measure.jobs import Job, number_of_job, run_jobs
from bench.measure.netns import LinkName, parse_links
from bench.models import WORKLOADS
from bench.report.tables import LAYOUTS, Point, Result
from examples.common.machine import command_line, describe, environment, write_json
from examples.common.ranks import Argument, Group, Parser, UsageError, argument, whole
from examples.common.rounds import SCHEMA, Settings
from examples.common.text import Progress, Row, Spread, render
from examples.common.training import Workload
from examples.common.variants import VARIANTS, Variant, select

TABLE = "table"

T = TypeVar("T")


def numbers(kind: type, above: float = 0, unit: str = "") -> Callable[[str], tuple[Any, ...]]:
    """Return an argparse type: numbers with commas between them, all greater than `above`."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(part) for part in text.split(","))
        except ValueError:
            found = (above,)
        if min(found) <= above:
            least = f"whole numbers, at least {above + 1:g}"
            about = least if kind is int else f"numbers above {above:g}"
            raise UsageError(f"expects {about}{unit and ' ' + unit}, such as 2,4, not {text!r}")
        return found

    return parse


def names(kind: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse type: names of a kind, or "all", with commas between them."""
    every = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        found = every if text == "all" else [name.strip() for name in text.split(",")]
        unknown = [name for name in found if name and name not in every]
        if unknown:
            expected = f"expects some of {', '.join(every)}"
            raise UsageError(f"unknown {kind} {unknown}; {expected}")
        return tuple(filter(None, found))

    return parse


def _wrappers(text: str) -> str:
    select(text)
    return text


def positive(text: str) -> float:
    """Return an argparse type: a number above 0."""
    return float(numbers(float)(text)[0])


def _option(name: str, meaning: str, kind: Callable[[str], Any]) -> Callable[..., Argument]:
    return lambda default=None: argument(name, meaning, default, type=kind)


_count = partial(whole, least=0)
# Options that several benchmarks have; called with the default.
rounds = _option("--rounds", "at most so many bursts of each way", whole)
steps = _option("--steps", "timed steps in a burst", whole)
warmup = _option("--warmup", "steps of each variant before the first round", _count)
check_steps = _option("--check-steps", "steps of the correctness check; 0: none", _count)
seconds = _option("--seconds", "that the rounds of one table may take, about", positive)
links = _option("--links", "rates such as 100mbit, veth, loopback", parse_links)
wrappers = _option("--wrappers", f"all, or of {', '.join(VARIANTS)}", _wrappers)
PER_NODE = argument("--per-node", "ranks behind each link, as on one machine", 1, type=whole)
RANKS = argument("--ranks", "processes to start; torchrun's wins", 2, type=whole)
_SHARE = "share of a model's parameters, 1: its true size; unset: what suits machine and link"
SCALE = argument("--scale", _SHARE, type=positive)
LINK = argument("--link", "loopback, veth or a rate, see links", "loopback", type=LinkName)
SOCKETS = argument(
    "--sockets",
    "ranks on GPUs talk over loopback sockets, as on hosts of their own, and may share a GPU",
    action="store_true",
)
COMMON = (
    argument("--threads", "torch CPU threads per rank", 1, type=whole),
    argument("--json", "write the result to this file", type=Path),
)


def models(default: str, known: Sequence[str] = tuple(WORKLOADS)) -> Argument:
    """--models"""
    return argument("--models", f"of {', '.join(known)}", default, type=names("model", known))


def ranks(default: str = "2", least: int = 2) -> Argument:
    """--ranks, one job for each number."""
    text = "processes to start, one number or several, such as 2,4; torchrun's wins"
    return argument("--ranks", text, default, type=numbers(int, above=least - 1, unit="rank(s)"))


def workload(name: str, args: argparse.Namespace) -> Workload:
    """Return the model of that name, at the scale asked for: by default 1 where there is a GPU."""
    scale = 1.0 if args.scale is None and torch.cuda.is_available() else args.scale
    return WORKLOADS[name]() if scale is None else WORKLOADS[name](scale=scale)


@dataclass(frozen=True)
class Shown:
    """A finding of a benchmark: a text to print, and the part that it adds to the result."""

    text: str
    part: Result


def table(title: str, headers: Row, rows: Sequence[Row], **more: Any) -> Shown:
    """Return a result that is one table."""
    part = {"title": title, "headers": list(headers), "rows": [list(row) for row in rows]}
    return Shown(f"{title}\n{render(headers, rows)}", {**part, **more})


def by_variant(
    title: str, args: argparse.Namespace, cell: Callable[[Workload, Variant], str]
) -> Shown:
    """Return a table with a cell for each variant of --wrappers and each model."""
    rows = [
        (variant.name, *(cell(workload(name, args), variant) for name in args.models))
        for variant in select(args.wrappers).variants
    ]
    return table(title, ("variant", *args.models), rows)


MARGIN = "median of the rounds ± half its 95 % interval"  # what `with_margin` shows


def with_margin(ratios: Sequence[float]) -> str:
    """Return a cell for the ratios of all rounds."""
    spread = Spread.of(ratios)
    return f"{spread.median:.3f} ± {spread.margin(len(ratios)):.3f}"


def points(title: str, found: list[Point], kind: str) -> Shown:
    """Return a result made of points: those of a scene, as the table of their kind."""
    return Shown(f"{title}\n{LAYOUTS[kind].table(found, False)}", {"points": found})


def default_jobs(args: argparse.Namespace) -> list[Job]:
    """Return a job for each number of --ranks, and for those of --link or --links that need one."""
    wanted = getattr(args, "links", None) or [getattr(args, "link", LinkName("loopback"))]
    kinds = [k for k in (True, False) if any(link.on_links == k for link in wanted)]
    sockets = getattr(args, "sockets", False)
    worlds = args.ranks if isinstance(args.ranks, tuple) else (args.ranks,)
    per_node = getattr(args, "per_node", 1)
    for world in worlds:
        if world % per_node:
            raise UsageError(f"--ranks {world} cannot be divided into nodes of {per_node}")
    return [Job(world, on_links, sockets, per_node) for world in worlds for on_links in kinds]


def one_process(args: argparse.Namespace) -> list[Job]:
    """No ranks: the process that the user started does all."""
    return [Job(0)]


Run = Callable[[argparse.Namespace, Group], Iterator[Shown]]


@dataclass(frozen=True)
class Benchmark:
    """A command that measures.

    Attributes:
        run: yields what it finds, on every rank alike; the main rank's counts.
        arguments: its options, to which COMMON are added.
        jobs: which ranks to start.
        kind: of the result.
    """

    name: str
    text: str | None
    run: Run
    arguments: tuple[Argument, ...]
    jobs: Callable[[argparse.Namespace], list[Job]]
    kind: str

    def parser(self) -> Parser:
        """Return the command line."""
        return Parser(f"bench {self.name}", self.text, *self.arguments, *COMMON)

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command and returns its exit code."""

        def start(args: argparse.Namespace) -> int:
            return run_jobs(partial(self.on_rank, args), self.jobs(args), args.threads)

        return self.parser().run(start, argv)

    def on_rank(self, args: argparse.Namespace, group: Group) -> int:
        """Run the benchmark on one rank; the main rank prints, and writes the result so far."""
        result = self.begun(args, group)
        if group.is_main:
            print(describe(environment(group)), flush=True)
            skipped = select(args.wrappers).skipped if "wrappers" in args else {}
            for name, reason in skipped.items():
                print(f"skipped {name}: {reason}")
        for shown in self.run(args, group):
            result = merged(result, shown.part)
            if group.is_main:
                Progress(group).clear()
                print(f"\n{shown.text}", flush=True)
                if args.json:
                    write_json(result, args.json)
        return 0

    def begun(self, args: argparse.Namespace, group: Group) -> Result:
        """Return the result before a job: its head, and the findings of earlier jobs."""
        if args.json and number_of_job() > 0:
            result: Result = json.loads(args.json.read_text(encoding="utf-8"))
            ranks = str(result["environment"]["ranks"]).split(" and ")
            if str(group.world) not in ranks:
                result["environment"]["ranks"] = " and ".join((*ranks, str(group.world)))
            return result
        simple = {
            k: v for k, v in vars(args).items() if v is None or isinstance(v, int | float | str)
        }
        head = {"kind": self.kind, "schema": SCHEMA, "command": command_line()}
        return {**head, "settings": simple, "environment": environment(group)}


def merged(part: Result, added: Result) -> Result:
    """`part` with what is added: to its lists and dictionaries, else instead of what it holds."""
    both = dict(part)
    for key, value in added.items():
        if key in both and isinstance(value, list):
            both[key] = both[key] + value
        elif key in both and isinstance(value, dict):
            both[key] = both[key] | value
        else:
            both[key] = value
    return both


def benchmark(
    *arguments: Argument,
    kind: str = TABLE,
    jobs: Callable[[argparse.Namespace], list[Job]] = default_jobs,
) -> Callable[[Run], Benchmark]:
    """Declare the function it stands above as the benchmark that its module is named after."""

    def declare(run: Run) -> Benchmark:
        name, text = run.__module__.rpartition(".")[2], sys.modules[run.__module__].__doc__
        return Benchmark(name, text, run, arguments, jobs, kind)

    return declare


def choose(kind: str, known: Mapping[str, T], only: str, skip: str) -> list[T]:
    """Return the choices to run, in the order of `only`, or of `known` if that is "all".

    Raises:
        UsageError: a name is unknown, or nothing is left.
    """
    parse = names(kind, known)
    left = [known[name] for name in parse(only) if name not in parse(skip)]
    if not left:
        raise UsageError("nothing is left to run")
    return left


def settings_of(args: argparse.Namespace) -> Settings:
    """Return how long to measure, by those options that the command has."""
    asked = {f.name: getattr(args, f.name) for f in fields(Settings) if f.name in args}
    return Settings(**asked)
