"""Makes the tables of docs/planner.md: python -m docs.make_planner

Formulas and plans come from the planner; measurements that others have published, from
docs/measured/, whose sources stand there, beside those that docs/measure_planner.py has made. With
--check nothing is written; the exit code is 1 where the page differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.models import WORKLOADS
from docs import planner_peaks, planner_steps
from fastsync.planner.advice import advise
from fastsync.planner.arithmetic import held_rows
from fastsync.planner.compute import from_record
from fastsync.planner.devices import Device, device_named
from fastsync.planner.held import held_by
from fastsync.planner.links import Cluster, Link, collective_seconds
from fastsync.planner.profile import Sample, fit
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario
from fastsync.planner.simulate import job_of, simulate
from fastsync.planner.strategy import Carrier, engine_plan, named
from fastsync.planner.synthetic import adam_by_formula, transformer_of
from fastsync.planner.tracing import trace_model

HERE = Path(__file__).resolve().parent
ROOT, PAGE, SCATTER = HERE.parent, HERE / "planner.md", HERE / "planner-steps.svg"
SCATTER_TEXT = "Chart of planned over measured steps; their errors are in the table below"
VTRAIN = json.loads((HERE / "measured" / "vtrain.json").read_text())
A100 = Link(300e9, None, "nvlink", 0.8)
H100, NDR = Link(450e9, None, "nvlink", 0.82), Link(50e9, None, "net", 0.92)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *(["---:"] * (len(headers) - 1))]
    lines = [headers, aligned, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(error: float) -> str:
    return f"{100 * error:+.0f} %"


def summary(errors: Sequence[float]) -> tuple[str, str, str]:
    """Median and largest of the absolute errors, and the median of the signed ones."""
    sizes = [abs(error) for error in errors]
    return f"{100 * median(sizes):.1f} %", f"{100 * max(sizes):.0f} %", signed(median(errors))


# ---- formulas and plans ----------------------------------------------------------------------


def held() -> str:
    """70 billion parameters in bf16 on 8 GPUs."""
    rows = held_rows(70 * 10**9, held_by(2, 8.0, False), 8, 8, ("0", "1", "2", "3"))
    items = list(rows[0].items)[:3]
    body = [
        (
            row.strategy.name,
            *(gigabytes(row.items[name]) for name in items),
            gigabytes(row.total),
            gigabytes(row.sent),
        )
        for row in rows
    ]
    return markdown(("70 B, 8 GPUs", *items, "total", "sent per step"), body)


def scenario(numel: int, world: int, batch: tuple[int, int]) -> Scenario:
    def trace(samples: int, checkpointing: bool) -> Record:
        return transformer_of(numel, torch.bfloat16, (samples, batch[1]), checkpointing)

    cluster = Cluster(world, 8, H100, NDR)
    device = device_named("h100")
    return Scenario(trace, batch[0], adam_by_formula, device, cluster, masters=True, jitter=0.02)


def which() -> str:
    """What the planner advises, by size of the model and number of GPUs."""
    body = []
    for billions, world in itertools.product((1, 7, 70), (8, 64, 512)):
        asked = scenario(billions * 10**9, world, (2, 4096))
        advice = advise(asked.candidates(world, with_batches=False), asked.device)
        cells = ["nothing fits", "-", "-", "-"]
        if best := advice.best:
            time = best.time
            cells = [best.strategy.name, gigabytes(best.memory.total), shown_seconds(time.mean)]
            cells.append(f"{time.efficiency:.0%}")
        second = advice.second.strategy.name if advice.second else "-"
        body.append((f"{billions} B", str(world), *cells, second))
    headers = ("parameters", "GPUs", "fastest that fits", "memory", "step", "efficiency", "second")
    return markdown(headers, body)


def scaling() -> str:
    """Efficiency of 7 billion parameters by number of GPUs and strategy."""
    worlds = (2, 8, 16, 64, 128, 1024, 8192)
    asked = scenario(7 * 10**9, 8, (2, 4096))
    body = []
    for kind in ("0", "1", "3", "hsdp"):
        times = [asked.time(named(kind, world, 8)) for world in worlds]
        name = "HSDP" if kind == "hsdp" else f"zero={kind}"
        body.append((name, *(f"{time.efficiency:.0%}" for time in times)))
    return markdown(("7 B, efficiency on", *(f"{world} GPUs" for world in worlds)), body)


# ---- what others have measured ---------------------------------------------------------------


def nvlink(world: int, link: Link = A100) -> Cluster:
    return Cluster(world, world, link, NDR)


def all_reduce() -> str:
    """vTrain's all-reduces between A100 GPUs of a node."""
    rows = [(g, size << 20, us * 1e-6) for g, size, us in VTRAIN["all_reduce"]["rows"]]
    latency, rate = fit([Sample(n, t) for g, n, t in rows if g == 4], 4)
    body = []
    for world in (2, 4, 8):
        own = [row for row in rows if row[0] == world]
        tables = [collective_seconds("all_reduce", n, nvlink(world)) / t - 1 for _, n, t in own]
        measured = replace(nvlink(world, Link(rate, latency)), backend="gloo")
        fitted = [collective_seconds("all_reduce", n, measured) / t - 1 for _, n, t in own]
        shown = "(fitted here)" if world == 4 else ", ".join(map(signed, fitted))
        body.append((str(world), ", ".join(map(signed, tables)), summary(tables)[0], shown))
    sizes = ", ".join(str(size) for size in (1, 4, 16, 64, 256, 1024))
    headers = ("GPUs", f"NCCL's tables, error at {sizes} MiB", "median", "fitted on 4 GPUs, error")
    return markdown(headers, body)


class Block(nn.Module):
    """A layer as Megatron runs it: attention with a matrix of scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.attend(self.norms[0](x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split
        scores = torch.softmax(query @ key.transpose(-1, -2) / 8, -1)
        x = x + self.out((scores @ value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """Token embedding, layers, and an output tied to it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(51200, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.tokens.weight)


@dataclass(frozen=True)
class Iteration:
    """A row of vTrain's table."""

    gpus: int
    whole: int
    micro: int
    width: int
    layers: int
    milliseconds: float


def predicted(row: Iteration, record: Record, device: Device) -> float:
    """Seconds of an iteration: micro-batches, all-reduce, Adam with fp32 masters."""
    compute = from_record(record, device, 28.0 * record.numel)
    accumulate = row.whole // row.gpus // row.micro
    strategy = replace(named("0", row.gpus, row.gpus), accumulate=accumulate)
    plan, _ = engine_plan(record, strategy, carrier=Carrier.DEVICES)
    cluster = nvlink(row.gpus)
    return simulate(job_of(record, strategy, plan, compute, cluster, device)).mean


def iterations() -> str:
    """Efficiencies fitted to the narrower models, judged on the wider ones."""
    rows = [Iteration(*row) for row in VTRAIN["iterations"]["rows"]]
    keys = {(row.width, row.layers, row.micro) for row in rows}
    records = {
        (w, n, m): trace_model(lambda w=w, n=n: Gpt(w, n), (m, 1024), dtype=torch.float16)
        for w, n, m in sorted(keys)
    }

    def errors(chosen: Sequence[Iteration], device: Device) -> list[float]:
        found = []
        for row in chosen:
            record = records[row.width, row.layers, row.micro]
            found.append(predicted(row, record, device) / (row.milliseconds * 1e-3) - 1)
        return found

    narrow = [row for row in rows if row.width == 1024 and row.gpus == 2]
    grid = itertools.product((0.45, 0.55, 0.65, 0.75), (0.4, 0.6, 0.8), (4e-5, 6e-5, 8e-5, 1e-4))
    devices = [
        replace(device_named("a100"), efficiency=e, streaming=s, overhead=o) for e, s, o in grid
    ]
    best = min(devices, key=lambda d: median(abs(e) for e in errors(narrow, d)))
    body = []
    for name, chosen in (
        ("fitted to: 1,024 wide, 2 GPUs", narrow),
        ("1,024 wide, 4 and 8 GPUs", [r for r in rows if r.width == 1024 and r.gpus > 2]),
        ("2,048 wide, 2 to 8 GPUs", [r for r in rows if r.width == 2048]),
    ):
        found = errors(chosen, best)
        body.append((name, str(len(found)), *summary(found)))
    table = markdown(("iterations", "rows", "median error", "worst", "bias"), body)
    fitted = (
        f"Fitted: {best.efficiency:.0%} of the arithmetic peak, {best.streaming:.0%} of the "
        f"memory's rate, {best.overhead * 1e6:g} us for the launch of an operator."
    )
    return f"{table}\n\n{fitted}"


# torchtitan's Llama 3.1 8B with FSDP, tokens per second and GPU: 8 to 128 H100, 32 to 64 H200.
PUBLISHED = (("H100", 8, 5762, 128, 5605), ("H200", 32, 10938, 64, 10753))


def published() -> str:
    """Published efficiencies: computation fitted at the smaller size, communication predicted."""
    body = []
    for name, few, slow, many, fast in PUBLISHED:
        tokens = 2 * 8192
        asked = scenario(8 * 10**9, few, (2, 8192))
        traced, at = asked.compute, named("3", few, 8)
        seconds = tokens / slow
        measured = traced.scaled(
            (seconds - traced.update / few) / (traced.forward + traced.backward)
        )
        asked = replace(asked, measured=measured, jitter=0.0)
        ratio = asked.time(at).mean / asked.time(named("3", many, 8)).mean
        reported = fast / slow
        cells = (
            f"{few} to {many}",
            f"{reported:.1%}",
            f"{ratio:.1%}",
            signed(ratio / reported - 1),
        )
        body.append((f"Llama 8B, FSDP, {name}", *cells))
    return markdown(("published", "GPUs", "kept throughput", "predicted", "error"), body)


# ---- what this project has measured ----------------------------------------------------------


NOT_MEASURED = "*not measured yet*"


def here() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "measured" / "here.json").read_text())
    return found


def peaks() -> str:
    """Peaks of steps with AdamW, in bytes per byte of parameters."""
    path = HERE / "measured" / "peaks.json"
    if not path.exists():
        return NOT_MEASURED
    found = json.loads(path.read_text())
    errors, cells = [], dict[tuple[str, str], list[str]]()
    for row in found["peaks"]:
        real = row.pop("bytes")
        case = planner_peaks.Case(**row)
        nbytes = planner_peaks.traced(case.model, case.checkpointing, case.masters).nbytes
        plan = planner_peaks.planned(case).total
        errors.append(plan / real - 1)
        shown = f"{plan / nbytes:.2f} / {real / nbytes:.2f} ({100 * errors[-1]:+.1f} %)"
        cells.setdefault((case.model, case.way), []).append(shown)
    stages = (f"zero={stage}" for stage in planner_peaks.STAGES)
    body = [(", ".join(filter(None, names)), *row) for names, row in cells.items()]
    table = markdown(("predicted / measured, per byte of parameters", *stages), body)
    middle = f"{100 * median(map(abs, errors)):.1f} %"
    within = sum(abs(error) <= 0.02 for error in errors)
    worst = f"{100 * max(map(abs, errors)):.1f} %"
    shown = f"Median error {middle}, worst {worst}; {within} of {len(errors)} are within 2 %."
    return f"{table}\n\n{shown} {found['machine']}, buckets of 25 MiB in stages 0 to 2."


def matrix() -> str:
    """Steps on shaped links, of models that nothing was fitted to, and their picture."""
    rows = planner_steps.rows()
    if not rows:
        return NOT_MEASURED
    table = markdown(("median error, worst", "ranks", *planner_steps.WAYS, "all"), rows)
    return f"![{SCATTER_TEXT}]({SCATTER.name})\n\n{table}\n\n{planner_steps.origin()}"


def advised() -> str:
    """What plans call fastest, and what that costs."""
    rows = planner_steps.advised()
    return markdown(("link", "ranks", *planner_steps.JUDGE), rows) if rows else NOT_MEASURED


def steps() -> str:
    """Steps without an optimizer; the computation is the one measured without synchronisation."""
    found = here()
    body, errors = [], []
    for name, step in found["steps"].items():
        alone, real, plan = step["alone"], step["synchronised"], step["predicted"][1]
        errors.append(plan / real - 1)
        body.append((name, f"{alone / real:.2f}", f"{plan / real:.2f}", signed(errors[-1])))
    middle, worst, _ = summary(errors)
    headers = ("over the measured step", "without synchronisation", "predicted", "error")
    shown = f"Median error {middle}, worst {worst}. {found['machine']}."
    return f"{markdown(headers, body)}\n\n{shown}"


# Of bench links, all on the model called wide; the first link fits two constants.
LINKS = ("links", "links-slow", "links-four")
FITTED_ON = "veth"
WIRES = {"fp32": "fastsync", "bf16": "fastsync_bf16", "int8": "fastsync_int8"}


@dataclass(frozen=True)
class Shaped:
    """A link of bench links, with steps in seconds: without synchronisation, and by wire."""

    name: str
    ranks: int
    rate: float
    record: Record
    alone: float
    steps: dict[str, float]


def shaped_links() -> list[Shaped]:
    found = []
    for name in LINKS:
        result = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        for scene in result["links"]:
            workload = WORKLOADS[scene["model"]](scene["scale"])
            shape = tuple(workload.batch(0, 0).shape)
            record = trace_model(workload.build, shape)
            medians = {v: found["step"]["median"] for v, found in scene["variants"].items()}
            steps = {wire: medians[variant] for wire, variant in WIRES.items()}
            rate = scene["rate_bytes_per_second"]
            alone = medians["no_sync"]
            found.append(Shaped(scene["link"], scene["ranks"], rate, record, alone, steps))
    return found


def shaped_step(link: Shaped, wire: str, device: Device) -> float:
    """Predicted seconds: computation as measured without synchronisation."""
    at = Link(link.rate, 50e-6, "net")
    asked = Scenario(
        trace=lambda samples, checkpointing: link.record,
        samples=link.record.samples,
        optimizer=adam_by_formula,
        device=device,
        cluster=Cluster(link.ranks, link.ranks, at, at, "gloo"),
    )
    traced = from_record(link.record, device, 0.0)
    measured = traced.scaled(link.alone / (traced.forward + traced.backward))
    strategy = replace(named("0", link.ranks, link.ranks), wire=wire)
    return replace(asked, measured=measured).time(strategy).mean


def shaped() -> str:
    """Steps on shaped links, which bench links has measured."""
    links = shaped_links()
    grid = itertools.product(planner_steps.SENDING, (5e9, 1e10, 1.5e10, 2e10, 3e10))
    cpu = replace(device_named("cpu"), efficiency=1.0, streaming=1.0)
    devices = [replace(cpu, sending=lost, bandwidth=rate) for lost, rate in grid]

    def errors(link: Shaped, device: Device) -> list[float]:
        return [shaped_step(link, w, device) / step - 1 for w, step in link.steps.items()]

    first = next(link for link in links if link.name == FITTED_ON)
    best = min(devices, key=lambda device: max(map(abs, errors(first, device))))
    body, judged = [], []
    for link in links:
        found = errors(link, best)
        pairs = zip(link.steps.values(), found, strict=True)
        cells = [
            f"{1e3 * step * (1 + e):.0f} / {1e3 * step:.0f} ms ({signed(e)})" for step, e in pairs
        ]
        name = f"{link.name} (fitted here)" if link is first else link.name
        body.append((name, str(link.ranks), *cells))
        judged += [] if link is first else found
    middle, worst, bias = summary(judged)
    fitted = (
        f"Predicted / measured. Of the links that nothing was fitted to: median error {middle}, "
        f"worst {worst}, bias {bias}. Fitted: {best.sending * 1e9:.2g} s of computing "
        f"lost per GB sent beside it, {best.bandwidth / 1e9:g} GB/s for each pass of coding."
    )
    return f"{markdown(('link', 'ranks', *WIRES), body)}\n\n{fitted}"


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        *(held, which, scaling, all_reduce, iterations, published),
        *(shaped, peaks, steps, matrix, advised),
    )
}


def main() -> int:
    """Fills the page's tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = text
    for name, table in TABLES.items():
        mark = re.compile(rf"(<!-- planner:{name} -->\n).*?(<!-- /planner:{name} -->)", re.S)
        if not mark.search(made):
            print(f"{PAGE.name} has no place for {name}", file=sys.stderr)
            return 1
        shown = table()
        made = mark.sub(lambda found, shown=shown: f"{found[1]}{shown}\n{found[2]}", made)
    picture = planner_steps.scatter()
    if args.check:
        drawn = SCATTER.read_text(encoding="utf-8") if SCATTER.exists() else None
        return int(made != text or drawn != picture)
    PAGE.write_text(made, encoding="utf-8")
    if picture is not None:
        SCATTER.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
