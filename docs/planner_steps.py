"""Planned steps beside those that docs/measure_steps.py has measured: constants are fitted to some
models, and judged on others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure.netns import LinkName
from bench.report.charts import Labels
from docs.measure_steps import CALIBRATE, JUDGE, WAYS, scaled
from docs.scatter import scatter_chart
from examples.common.machine import describe
from fastsync.planner.compute import Compute, from_record
from fastsync.planner.devices import device_named
from fastsync.planner.links import Cluster, Link
from fastsync.planner.profile import Sample, fit
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario
from fastsync.planner.simulate import Job, simulate
from fastsync.planner.strategy import Strategy, named
from fastsync.planner.synthetic import adam_by_formula
from fastsync.planner.tracing import trace_model

MEASURED = Path(__file__).resolve().parent / "measured" / "steps.json"
CPU = replace(device_named("cpu"), efficiency=1.0, streaming=1.0, overhead=5e-6)
SENDING = (0.0, 2e-10, 4e-10, 8e-10, 1.2e-9, 1.6e-9, 2.4e-9, 3.2e-9)  # s of computing per byte
LAUNCHING = (0.0, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 4.8e-3)  # and per collective
HANDLING = (0.0, 5e-6, 1e-5, 2e-5, 4e-5)  # and per tensor
HOST = (SENDING, LAUNCHING, HANDLING)
REACHED = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the rate of bare all-reduces
SCATTER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)  # of that, where it is no all-reduce
PASSES = (1e9, 2e9, 3e9, 5e9, 1e10, 2e10)  # bytes per second of a pass of coding
RING, CODED = ["zero=0"], [way for way in WAYS if "wire" in WAYS[way]]
PLAIN = [way for way in WAYS if way not in CODED]


@dataclass(frozen=True)
class Constants:
    """What is fitted.

    Attributes:
        reached, scatter: on each link, for each number of ranks.
        sending, launching, handling: seconds of computing per byte sent, per collective, and per
            tensor; `coding`: bytes per second of a pass. For each number of ranks, on all links
            between machines, and inside one.
    """

    sending: float = 0.0
    launching: float = 0.0
    handling: float = 0.0
    coding: float = PASSES[-1]
    reached: float = 1.0
    scatter: float = 1.0


@cache
def record_of(model: str, scale: float) -> Record:
    workload = scaled(model, scale)
    shape = tuple(workload.batch(0, 0).shape)
    return trace_model(workload.build, shape, loss=lambda output, _: workload.loss(output))


def burst_seconds(link: str) -> float:
    """What a shaped link takes off the time of what is sent after a pause."""
    name = LinkName(link)
    return 0.0 if name.bits_per_second is None else 8 * name.burst / name.bits_per_second


@dataclass(frozen=True, eq=False)
class Cell:
    """What was measured of one model on one link; see docs/measure_steps.py."""

    link: str
    ranks: int
    model: str
    scale: float
    probes: Sequence[tuple[int, float]]
    alone: float
    update: float
    steps: dict[str, float]
    network: tuple[float, float] = (0.0, 1.0)  # latency and rate: of the link, by all its probes
    _jobs: dict[tuple[str, Constants], Job] = field(default_factory=dict, init=False)

    @property
    def inside(self) -> bool:
        """The ranks share a machine, and memory."""
        return self.link == "loopback"

    @cached_property
    def record(self) -> Record:
        return record_of(self.model, self.scale)

    @cached_property
    def compute(self) -> Compute:
        """As measured on ranks that talk to nobody; its parts are as traced."""
        traced = from_record(self.record, CPU, 0.0)
        own = max(self.alone - self.update, 1e-6) / (traced.forward + traced.backward)
        return replace(traced.scaled(own), update=self.update)

    def job(self, way: str, constants: Constants) -> Job:
        """A step that only coding costs the processor anything."""
        rates = replace(constants, sending=0.0, launching=0.0, handling=0.0)
        if (way, rates) not in self._jobs:
            self._jobs[way, rates] = self._job(way, rates)
        return self._jobs[way, rates]

    def _job(self, way: str, constants: Constants) -> Job:
        latency, rate = self.network
        link = Link(rate * constants.reached, latency, "net", scatter=constants.scatter)
        per_node = self.ranks if self.inside else 1
        asked = Scenario(
            trace=lambda samples, checkpointing: self.record,
            samples=self.record.samples,
            optimizer=adam_by_formula,
            device=replace(CPU, coding=constants.coding),
            cluster=Cluster(self.ranks, per_node, link, link, "gloo"),
            measured=self.compute,
        )
        return asked.job(strategy_of(way, self.ranks))

    def planned(self, way: str, constants: Constants) -> float:
        """Seconds of a step."""
        job = self.job(way, constants)
        host = constants.sending * job.sent + constants.launching * job.launched
        packing = constants.handling * job.handled
        time = simulate(replace(job, host=job.host + host, packing=packing))
        return time.mean - min(time.exposed, burst_seconds(self.link))

    def error(self, way: str, constants: Constants) -> float:
        return self.planned(way, constants) / self.steps[way] - 1


def cells_of(document: dict[str, Any]) -> list[Cell]:
    """Those of a measurement."""
    probed: dict[tuple[str, int], dict[int, list[float]]] = {}
    for cell in document["cells"]:
        sizes = probed.setdefault((cell["link"], cell["ranks"]), {})
        for size, seconds in cell["probes"]:
            sizes.setdefault(size, []).append(seconds)

    def network(cell: dict[str, Any]) -> tuple[float, float]:
        return network_of(cell["link"], cell["ranks"], probed[cell["link"], cell["ranks"]])

    return [Cell(**cell, network=network(cell)) for cell in document["cells"]]


def network_of(link: str, ranks: int, probes: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Latency and rate, from the seconds of all-reduces of each size."""
    burst = LinkName(link).burst
    samples = [
        Sample(size, median(times) + (burst_seconds(link) if size > burst else 0.0))
        for size, times in probes.items()
    ]
    return fit(samples, ranks)


def strategy_of(way: str, ranks: int) -> Strategy:
    how = WAYS[way]
    return replace(named(str(how.get("zero", 0)), ranks, ranks), wire=how.get("wire", "fp32"))


def found() -> dict[str, Any] | None:
    """The measurement; None: there is none yet."""
    if not MEASURED.exists():
        return None
    document: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return document


def fitted(cells: Iterable[Cell]) -> dict[str, Constants]:
    """Those of each link that come nearest to the steps of the calibration models.

    Args:
        cells: of links that cost the processor alike per byte.
    """
    own = [cell for cell in cells if cell.model in CALIBRATE]
    names = dict.fromkeys(cell.link for cell in own)
    links = {link: [cell for cell in own if cell.link == link] for link in names}

    def off(link: str, constants: Constants, ways: Iterable[str]) -> float:
        errors = (c.error(way, constants) for c in links[link] for way in ways if way in c.steps)
        return sum(abs(math.log1p(error)) for error in errors)

    def best(host: tuple[float, ...]) -> tuple[float, dict[str, Constants]]:
        found = {}
        for link in links:
            grid = [Constants(*host, reached=reached) for reached in REACHED]
            ring = min(grid, key=lambda c, link=link: off(link, c, RING))
            grid = [replace(ring, scatter=scatter) for scatter in SCATTER]
            found[link] = min(grid, key=lambda c, link=link: off(link, c, PLAIN))
        return sum(off(link, c, PLAIN) for link, c in found.items()), found

    _, plain = min(map(best, product(*HOST)), key=lambda each: each[0])

    def coded(rate: float) -> float:
        return sum(off(link, replace(c, coding=rate), CODED) for link, c in plain.items())

    rate = min(PASSES, key=coded)
    return {link: replace(c, coding=rate) for link, c in plain.items()}


@dataclass(frozen=True)
class Judged:
    """A step that nothing was fitted to, in seconds."""

    cell: Cell
    way: str
    planned: float

    @property
    def measured(self) -> float:
        return self.cell.steps[self.way]

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@cache
def judged() -> tuple[Judged, ...]:
    """All of them, link by link."""
    document = found()
    if document is None:
        return ()
    cells = cells_of(document)
    results = []
    for place in dict.fromkeys((cell.inside, cell.ranks) for cell in cells):
        here = [cell for cell in cells if (cell.inside, cell.ranks) == place]
        constants = fitted(here)
        results += [
            Judged(cell, way, cell.planned(way, constants[cell.link]))
            for cell in here
            if cell.model in JUDGE
            for way in cell.steps
        ]
    return tuple(results)


def summary(steps: Sequence[Judged]) -> str:
    sizes = [abs(step.error) for step in steps]
    return f"{100 * median(sizes):.1f} %, {100 * max(sizes):.0f} %"


def rows() -> list[tuple[str, ...]]:
    """Median and largest error by link, number of ranks and way; the last row: of all."""
    steps = judged()
    places = dict.fromkeys((s.cell.link, s.cell.ranks) for s in steps)
    made = []
    for link, ranks in places:
        here = [s for s in steps if (s.cell.link, s.cell.ranks) == (link, ranks)]
        cells = (summary([s for s in here if s.way == way]) for way in WAYS)
        made.append((link, str(ranks), *cells, summary(here)))
    every = (summary([s for s in steps if s.way == way]) for way in WAYS)
    return [*made, ("all", "", *every, summary(steps))] if steps else []


def advised() -> list[tuple[str, ...]]:
    """By link, number of ranks and model, the way that plans call fastest, and by how much its
    step was longer than that of the fastest, both as measured. The last row: of all."""
    places: dict[tuple[str, int], dict[str, list[Judged]]] = {}
    for step in judged():
        models = places.setdefault((step.cell.link, step.cell.ranks), {})
        models.setdefault(step.cell.model, []).append(step)
    made, lost = [], []
    for (link, ranks), models in places.items():
        cells = []
        for ways in models.values():
            called = min(ways, key=lambda step: step.planned)
            lost.append(called.measured / min(step.measured for step in ways) - 1)
            cells.append(f"{called.way} ({100 * lost[-1]:+.1f} %)")
        made.append((link, str(ranks), *cells))
    right = sum(each <= 0.03 for each in lost)
    return [*made, (f"within 3 %: {right} of {len(lost)}", *[""] * 4)] if made else []


def origin() -> str:
    document = found()
    if document is None:
        return ""
    return f"{describe(document['environment'])}. Measured by `{document['command']}`."


def scatter() -> str | None:
    """The picture, as SVG: every judged step, planned over measured."""
    steps = judged()
    if not steps:
        return None
    links = list(dict.fromkeys(step.cell.link for step in steps))
    pairs = {
        link: [(1e3 * s.measured, 1e3 * s.planned) for s in steps if s.cell.link == link]
        for link in links
    }
    title = "Steps of models that nothing was fitted to"
    return scatter_chart(Labels(title, "measured, ms", "planned, ms"), pairs, band=0.15)
