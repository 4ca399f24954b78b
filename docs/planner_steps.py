"""Planned steps beside those that docs/measure_steps.py has measured: constants are fitted to some
models, and judged on others."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from bench.report.charts import Labels
from docs.measure_steps import CALIBRATE, JUDGE, WAYS, scaled
from docs.scatter import scatter_chart
from examples.common.machine import describe
from fastsync.planner.compute import Compute, from_record
from fastsync.planner.devices import Device, device_named
from fastsync.planner.links import Cluster, Link
from fastsync.planner.profile import Sample, fit
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario
from fastsync.planner.strategy import Strategy, named
from fastsync.planner.synthetic import adam_by_formula
from fastsync.planner.tracing import trace_model

MEASURED = Path(__file__).resolve().parent / "measured" / "steps.json"
CPU = replace(device_named("cpu"), efficiency=1.0, streaming=1.0, overhead=5e-6)
LOST = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # seconds of computing per second of communication
REACHED = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the rate of bare all-reduces
PASSES = (1e9, 2e9, 3e9, 5e9, 1e10, 2e10)  # bytes per second of a pass of coding
INT8 = "zero=0, int8"


@dataclass(frozen=True)
class Constants:
    """What is fitted on each link, for each number of ranks."""

    lost: float
    reached: float
    coding: float = PASSES[-1]


@cache
def record_of(model: str, scale: float) -> Record:
    workload = scaled(model, scale)
    shape = tuple(workload.batch(0, 0).shape)
    return trace_model(workload.build, shape, loss=lambda output, _: workload.loss(output))


@dataclass(frozen=True)
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

    @cached_property
    def record(self) -> Record:
        return record_of(self.model, self.scale)

    @cached_property
    def compute(self) -> Compute:
        """As measured on ranks that talk to nobody; its parts are as traced."""
        traced = from_record(self.record, CPU, 0.0)
        own = max(self.alone - self.update, 1e-6) / (traced.forward + traced.backward)
        return replace(traced.scaled(own), update=self.update)

    def planned(self, way: str, constants: Constants) -> float:
        """Seconds of a step."""
        latency, rate = fit([Sample(*probe) for probe in self.probes], self.ranks)
        link = Link(rate * constants.reached, latency, "net")
        per_node = self.ranks if self.link == "loopback" else 1
        device: Device = replace(CPU, contention=constants.lost, bandwidth=constants.coding)
        asked = Scenario(
            trace=lambda samples, checkpointing: self.record,
            samples=self.record.samples,
            optimizer=adam_by_formula,
            device=device,
            cluster=Cluster(self.ranks, per_node, link, link, "gloo"),
            measured=self.compute,
        )
        return asked.time(strategy_of(way, self.ranks)).mean

    def error(self, way: str, constants: Constants) -> float:
        return self.planned(way, constants) / self.steps[way] - 1


def strategy_of(way: str, ranks: int) -> Strategy:
    how = WAYS[way]
    return replace(named(str(how.get("zero", 0)), ranks, ranks), wire=how.get("wire", "fp32"))


def found() -> dict[str, Any] | None:
    """The measurement; None: there is none yet."""
    if not MEASURED.exists():
        return None
    document: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return document


def fitted(cells: Iterable[Cell]) -> Constants:
    """Those whose steps come nearest to the calibration models'; codes after everything else."""
    own = [cell for cell in cells if cell.model in CALIBRATE]

    def off(constants: Constants, ways: Iterable[str]) -> float:
        errors = (cell.error(way, constants) for cell in own for way in ways if way in cell.steps)
        return sum(math.log1p(error) ** 2 for error in errors)

    plain = [way for way in WAYS if way != INT8]
    grid = [Constants(lost, reached) for lost, reached in itertools.product(LOST, REACHED)]
    best = min(grid, key=lambda constants: off(constants, plain))
    return min((replace(best, coding=rate) for rate in PASSES), key=lambda c: off(c, [INT8]))


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
    cells = [Cell(**cell) for cell in document["cells"]]
    results = []
    for place in dict.fromkeys((cell.link, cell.ranks) for cell in cells):
        here = [cell for cell in cells if (cell.link, cell.ranks) == place]
        constants = fitted(here)
        results += [
            Judged(cell, way, cell.planned(way, constants))
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
