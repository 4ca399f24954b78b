"""What was found, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fastsync.doctor.checks import machines_of, route_of
from fastsync.doctor.drilled import WHAT_HAPPENS, Drill, Outcome, problems
from fastsync.doctor.facts import Facts
from fastsync.doctor.finding import Finding, Level, worst
from fastsync.doctor.rates import Pairs, SizeTime
from fastsync.doctor.schedule import ALL_PAIRS, Pair
from fastsync.doctor.skew import Skew
from fastsync.doctor.slow import RULES, PairTime, Slow
from fastsync.ranks.words import name_ranks

__all__ = ["Measured", "Report", "report_json", "report_text"]

_WIDTH = 110
_WORST = 10  # pairs that are listed where there is no matrix


@dataclass(frozen=True)
class Measured:
    """What the ranks took.

    Attributes:
        compute: by rank, floating-point operations per second of a matrix product.
    """

    sweep: Sequence[SizeTime]
    pairs: Pairs
    slow: Slow
    compute: Sequence[float]


@dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        world: how many ranks there should be.
        ranks: the facts of those that came.
        clocks: by rank; None for those that are gone.
        measured: None where a finding stood against it, or there is one rank.
    """

    world: int
    backend: str
    ranks: Mapping[int, Facts]
    findings: Sequence[Finding]
    clocks: Sequence[Skew | None] = field(default_factory=tuple)
    measured: Measured | None = None
    drill: Drill | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return worst(self.findings) < Level.FAIL


def report_json(report: Report) -> dict[str, object]:
    """Plain values for `json.dump`; seconds, bytes per second."""
    entries = asdict(report)
    entries["passed"] = report.passed
    entries["findings"] = [{**asdict(f), "level": f.level.name} for f in report.findings]
    entries["rules"] = RULES
    if report.measured is not None:
        times = report.measured.pairs.times
        entries["measured"]["pairs"]["times"] = [
            {"ranks": list(pair), **asdict(time)} for pair, time in times.items()
        ]
    return entries


def report_text(report: Report) -> str:
    """What people read; the verdict comes last."""
    parts = [_machines(report)]
    if report.measured is not None:
        parts += [_sweep(report.measured.sweep, report.backend), _pairs(report), _ranks(report)]
    if report.drill is not None:
        parts.append(_drill(report.drill))
    return "\n\n".join([*parts, _verdict(report)])


def _machines(report: Report) -> str:
    ranks = "one process, alone" if report.world == 1 else f"{report.world} ranks"
    lines = [f"fastsync doctor: {ranks}, {report.backend}"]
    for its in machines_of(report.ranks):
        facts = report.ranks[its[0]]
        interface = route_of(facts, report.backend).interface.name
        device = f"{facts.gpus} x {facts.gpu}" if facts.gpu else f"{facts.cores} cores"
        threads = f"{facts.threads} thread{'s'[: facts.threads != 1]} per rank"
        where = f", reached through {interface}" if interface and report.world > 1 else ""
        lines.append(f"  {name_ranks(its)} on {facts.host}: {device}, {threads}{where}")
    variables = report.ranks[min(report.ranks)].variables if report.ranks else {}
    if variables:
        lines.append(_wrapped("set: " + ", ".join(f"{k}={v}" for k, v in variables.items()), "  "))
    return "\n".join(lines)


def _sweep(sizes: Sequence[SizeTime], backend: str) -> str:
    lines = [f"all-reduce of all ranks, {backend:4}       time   bus bandwidth"]
    for it in sizes:
        rate = f"{it.rate / 1e9:8.3f} GB/s" if it.nbytes >= 1024 else ""
        lines.append(f"  {_bytes(it.nbytes):>12} {_time(it.seconds):>25} {rate:>15}".rstrip())
    return "\n".join(lines)


def _bytes(number: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number // size} {unit}"
    return f"{number} B"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def _pairs(report: Report) -> str:
    assert report.measured is not None
    pairs, slow = report.measured.pairs, report.measured.slow
    which = "all pairs" if report.world <= ALL_PAIRS else "each rank with those 1, 2, 4, ... on"
    missed = pairs.planned - len(pairs.times)
    left = f"; no time for {missed} of {pairs.planned}: more --seconds" if missed else ""
    what = f"exchanges of two ranks, both directions at once, best of several: {which}{left}"
    if report.world > ALL_PAIRS:
        return "\n".join([what, *_slowest(pairs.times, slow), _wrapped(RULES, "  ")])
    legend = f"  right of the diagonal: us for 8 B; left: GB/s each way for {_bytes(pairs.nbytes)}"
    marked = "; * is slow" if slow.pairs or slow.ranks else ""
    matrix = _matrix(report.world, pairs.times, slow)
    return "\n".join([what, legend + marked, *matrix, _wrapped(RULES, "  ")])


def _matrix(world: int, times: Mapping[Pair, PairTime], slow: Slow) -> Iterable[str]:
    yield "  rank" + "".join(f"{rank:>9}" for rank in range(world))
    for row in range(world):
        cells = (_cell(row, column, times, slow) for column in range(world))
        yield f"  {row:>4}" + "".join(f"{cell:>9}" for cell in cells)


def _cell(row: int, column: int, times: Mapping[Pair, PairTime], slow: Slow) -> str:
    pair = (min(row, column), max(row, column))
    if row == column:
        return "."
    if pair not in times:
        return "?"
    mark = "*" if _is_marked(pair, slow) else ""
    time = times[pair]
    return mark + (f"{1e6 * time.latency:.0f}" if row < column else f"{time.rate / 1e9:.2f}")


def _is_marked(pair: Pair, slow: Slow) -> bool:
    return pair in slow.pairs or not set(slow.ranks).isdisjoint(pair)


def _slowest(times: Mapping[Pair, PairTime], slow: Slow) -> Iterable[str]:
    yield f"  the slowest of {len(times)}:"
    for pair in sorted(times, key=lambda pair: times[pair].rate)[:_WORST]:
        time, mark = times[pair], "*" if _is_marked(pair, slow) else " "
        yield (
            f"  {mark} {pair[0]:>5} - {pair[1]:<5} {1e6 * time.latency:>8.0f} us "
            f"{time.rate / 1e9:>8.2f} GB/s"
        )


def _ranks(report: Report) -> str:
    assert report.measured is not None
    lines = ["by rank: speed of a matrix product, all at once; time of day beside rank 0's"]
    shown = range(report.world) if report.world <= ALL_PAIRS else _extremes(report.measured.compute)
    for rank in shown:
        skew = report.clocks[rank] if rank < len(report.clocks) else None
        clock = "unknown" if skew is None else f"{1e3 * skew.seconds:+.2f} ms"
        speed = f"{report.measured.compute[rank] / 1e9:.1f} GFLOP/s"
        lines.append(f"  {rank:>4} {speed:>18} {clock:>16}")
    return "\n".join(lines)


def _extremes(compute: Sequence[float]) -> list[int]:
    """The slowest and the fastest, where there are too many to list."""
    ordered = sorted(range(len(compute)), key=lambda rank: compute[rank])
    return [*ordered[: _WORST - 1], ordered[-1]]


def _drill(drill: Drill) -> str:
    text = f"drill: rank {drill.rank} of a small training {WHAT_HAPPENS[drill.fault]}"
    lines = [f"{text}, in the middle of a backward"]
    wrong = problems(drill)
    shown = sorted(range(len(wrong)), key=lambda rank: not wrong[rank])[:ALL_PAIRS]
    for rank in sorted(shown):
        said = wrong[rank] or (_said(drill.outcomes[rank]) if rank != drill.rank else "as asked")
        lines.append(_wrapped(f"{'FAIL' if wrong[rank] else 'PASS'}  rank {rank}: {said}", "  "))
    return "\n".join(lines)


def _said(outcome: Outcome) -> str:
    warned = ", after a warning" if outcome.warned else ""
    return f"after {outcome.seconds:.2f} s{warned}: {outcome.text}"


def _verdict(report: Report) -> str:
    lines = ["verdict"]
    for it in report.findings:
        lines.append(_wrapped(f"{it.level.name:<5} {it.topic + ': '}{it.text}", "  "))
        if it.remedy:
            lines.append(_wrapped(f"-> {it.remedy}", " " * 8))
    counts = [f"{sum(f.level == v for f in report.findings)} {v.name}" for v in Level]
    return "\n".join([*lines, f"  {', '.join(counts)}"])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
