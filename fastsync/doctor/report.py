"""The report, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastsync.doctor.checks import machines_of
from fastsync.doctor.facts import Facts
from fastsync.doctor.finding import Finding, Level
from fastsync.doctor.rates import RULES, Measured
from fastsync.faults.wording import name_ranks
from fastsync.planner.quantities import shown_seconds
from fastsync.timeline.moves import size_text

_WIDTH = 110
_SHOWN = 10  # pairs


@dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        world: how many ranks there should be.
        ranks: the facts of those that came.
        measured: None where a finding stood against it, or there is one rank.
    """

    world: int
    backend: str
    ranks: Mapping[int, Facts]
    findings: Sequence[Finding]
    measured: Measured | None = None

    @property
    def passed(self) -> bool:
        """Return whether nothing failed."""
        return all(finding.level < Level.FAIL for finding in self.findings)


def report_text(report: Report) -> str:
    """Return what people read; the verdict comes last."""
    parts = [_machines(report)]
    if report.measured is not None:
        whole = report.measured.all_reduce
        size, time = size_text(whole.nbytes), shown_seconds(whole.seconds)
        rate = f"{whole.rate / 1e9:.3f} GB/s bus bandwidth"
        parts += [f"all-reduce of {size} among all ranks: {time}, {rate}", _pairs(report.measured)]
    lines = ["verdict"]
    for it in report.findings:
        lines.append(_wrapped(f"{it.level.name:<5} {it.topic}: {it.text}", "  "))
        if it.remedy:
            lines.append(_wrapped(f"-> {it.remedy}", " " * 8))
    counts = [f"{sum(f.level == v for f in report.findings)} {v.name}" for v in Level]
    return "\n\n".join([*parts, "\n".join([*lines, f"  {', '.join(counts)}"])])


def _machines(report: Report) -> str:
    ranks = "one process, alone" if report.world == 1 else f"{report.world} ranks"
    lines = [f"fastsync doctor: {ranks}, {report.backend}"]
    for its in machines_of(report.ranks):
        facts = report.ranks[its[0]]
        interface = facts.interface(report.backend).name
        device = f"{facts.gpus} x {facts.gpu}" if facts.gpu else f"{facts.cores} cores"
        threads = f"{facts.threads} thread{'s'[: facts.threads != 1]} per rank"
        where = f", reached through {interface}" if interface and report.world > 1 else ""
        lines.append(f"  {name_ranks(its)} on {facts.host}: {device}, {threads}{where}")
    variables = report.ranks[min(report.ranks)].variables if report.ranks else {}
    if variables:
        lines.append(_wrapped("set: " + ", ".join(f"{k}={v}" for k, v in variables.items()), "  "))
    return "\n".join(lines)


def _pairs(measured: Measured) -> str:
    times, slow = measured.pairs.times, measured.slow
    missed = measured.pairs.planned - len(times)
    left = f"; no time for {missed}: more --seconds" if missed else ""
    lines = [
        f"exchanges of two ranks, both directions at once: the slowest of {len(times)} pairs{left}"
    ]
    for pair in sorted(times, key=lambda pair: times[pair].rate)[:_SHOWN]:
        marked = pair in slow.pairs or not set(slow.ranks).isdisjoint(pair)
        latency, rate = 1e6 * times[pair].latency, times[pair].rate / 1e9
        ranks = f"{pair[0]:>5} - {pair[1]:<5}"
        lines.append(f"  {'*' if marked else ' '} {ranks} {latency:>8.0f} us {rate:>8.2f} GB/s")
    return "\n".join([*lines, _wrapped(f"* is slow. {RULES}", "  ")])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
