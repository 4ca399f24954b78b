"""Published scaling of image classifiers, of Horovod and of torch's DDP, beside plans for them.

One GPU computes as fast as was published. What more GPUs keep of that is planned twice: from data
sheets alone, and with constants that are fitted to some rows and judged on the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from docs.planner_networks import IMAGES, NETWORKS
from docs.planner_tables import markdown, signed, summary
from fastsync.planner.compute import Compute, from_record
from fastsync.planner.devices import Device, device_named
from fastsync.planner.links import Cluster, Link, collective_seconds
from fastsync.planner.record import Record
from fastsync.planner.simulate import Message, job_of, job_of_messages, simulate
from fastsync.planner.strategy import Carrier, engine_plan, named
from fastsync.planner.tracing import trace_model

PUBLISHED = json.loads(
    (Path(__file__).resolve().parent / "measured" / "published.json").read_text(encoding="utf-8")
)
V100 = device_named("v100")
P100 = replace(V100, name="p100", narrow=21.2e12, wide=10.6e12, bandwidth=732e9, memory=16e9)
SGD = 20.0  # bytes that a step with momentum reads and writes, per parameter
PCI, CUBE = Link(16e9, None, "pci", 0.8), Link(150e9, None, "nvlink", 0.8)
INFINIBAND = Link(4 * 12.5e9 / 8, None, "net", 0.92)
SERVER = 4  # GPUs of Horovod's servers
FUSED, CYCLE = 64 << 20, 5e-3  # of Horovod: bytes of its buffer, and seconds of its loop
JITTERS = [n / 200 for n in range(15)]
REACHES = [n / 20 for n in range(8, 21)]
SENDING = [n * 2.5e-12 for n in range(17)]


@cache
def traced(network: str, batch: int) -> Record:
    side = IMAGES.get(network, 224)
    return trace_model(NETWORKS[network], (batch, 3, side, side))


def computing(record: Record, device: Device, seconds: float) -> Compute:
    """The trace's computation, scaled to what a step takes on one GPU."""
    compute = from_record(record, device, SGD * record.numel)
    return compute.scaled((seconds - compute.update) / (compute.forward + compute.backward))


# ---- Horovod ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """A row of Horovod's: images per second of one GPU, and the share of it that each of all keeps.

    Attributes:
        gbit: per second, of a server's link.
        transport: "RDMA" or "TCP".
    """

    network: str
    gpus: int
    gbit: float
    transport: str
    alone: float
    kept: float


@dataclass(frozen=True)
class Fit:
    """Deviation of the GPUs' speeds, and what each transport reaches of its link."""

    jitter: float = 0.0
    rdma: float = 0.92
    tcp: float = 0.92


def horovod_rows() -> Iterator[Scaled]:
    for network, gpus, gbit, transport, alone, found in PUBLISHED["horovod"]["rows"]:
        kept = found if found <= 1 else found / (gpus * alone)
        yield Scaled(network, gpus, gbit, transport, alone, kept)


def fused(record: Record, compute: Compute) -> Iterator[Message]:
    """What Horovod reduces at once: its loop takes what has become ready, up to its buffer."""
    turns: dict[int, list[int]] = {}
    for index in sorted(range(len(record.params)), key=compute.ready.__getitem__):
        turns.setdefault(math.ceil(compute.ready[index] / CYCLE), []).append(index)
    for turn, ready in turns.items():
        held = 0
        for index in ready:
            size = record.params[index].nbytes
            if held and held + size > FUSED:
                yield Message(turn * CYCLE, float(held))
                held = 0
            held += size
        yield Message(turn * CYCLE, float(held))


def horovod_keeps(row: Scaled, constants: Fit) -> float:
    """Planned share of one GPU's throughput. Rings alone, as NCCL had them until version 2.4."""
    record = traced(row.network, 64)
    seconds = 64 / row.alone
    compute = computing(record, P100, seconds)
    reach = constants.rdma if row.transport == "RDMA" else constants.tcp
    link = Link(row.gbit * 1e9 / 8 / SERVER, None, "net", reach)
    cluster = Cluster(row.gpus, SERVER, PCI, link)
    messages = list(fused(record, compute))
    job = job_of_messages(messages, named("0", row.gpus, SERVER), compute, cluster)
    rings = (2 * collective_seconds("reduce_scatter", m.nbytes, cluster) for m in messages)
    return seconds / simulate(replace(job, costs=tuple(rings)), constants.jitter).mean


def off(rows: Sequence[Scaled], constants: Fit) -> list[float]:
    return [horovod_keeps(row, constants) / row.kept - 1 for row in rows]


def closest(rows: Sequence[Scaled], tried: Sequence[Fit]) -> Fit:
    return min(tried, key=lambda constants: sum(error**2 for error in off(rows, constants)))


@cache
def horovod_fit() -> Fit:
    """Fitted to 16 GPUs: first with RDMA, then what TCP reaches."""
    few = [row for row in horovod_rows() if row.gpus == 16]
    rdma = [row for row in few if row.transport == "RDMA"]
    best = closest(rdma, [Fit(jitter, reach) for jitter, reach in product(JITTERS, REACHES)])
    tcp = [row for row in few if row.transport == "TCP"]
    return closest(tcp, [replace(best, tcp=reach) for reach in REACHES])


@cache
def horovod_errors() -> tuple[float, ...]:
    """Of the rows that nothing was fitted to."""
    return tuple(off([row for row in horovod_rows() if row.gpus > 16], horovod_fit()))


def horovod() -> str:
    """Horovod's published scaling, on servers of 4 P100."""
    best, body = horovod_fit(), []
    for row in horovod_rows():
        where = f"{row.gpus}, {row.gbit} Gbit/s {row.transport}"
        plans = [horovod_keeps(row, constants) for constants in (Fit(), best)]
        body.append(
            (row.network, where, f"{row.kept:.0%}", *_cells(plans, row.kept, row.gpus == 16))
        )
    headers = ("Horovod", "GPUs", "kept throughput", "data sheets alone", "fitted to 16 GPUs")
    fitted = (
        f"{judged(horovod_errors())} Fitted: speeds that differ by {best.jitter:.1%}, RDMA at "
        f"{best.rdma:.0%} and TCP at {best.tcp:.0%} of the link's rate. VGG-16 on 64 GPUs would by "
        f"itself be met with TCP at {tcp_of_faster_link():.0%}."
    )
    return f"{markdown(headers, body)}\n\n{fitted}"


def tcp_of_faster_link() -> float:
    """The share of its rate at which the plan for VGG-16 on 64 GPUs would be right."""
    rows = [row for row in horovod_rows() if (row.network, row.gpus) == ("VGG-16", 64)]
    tried = [replace(horovod_fit(), tcp=n / 100) for n in range(30, 100)]
    return closest(rows, tried).tcp


def judged(errors: Sequence[float]) -> str:
    middle, worst, bias = summary(errors)
    return f"Rows that nothing was fitted to: median error {middle}, worst {worst}, bias {bias}."


def _cells(plans: Sequence[float], kept: float, fitted_here: bool) -> list[str]:
    shown = [f"{plan:.0%} ({signed(plan / kept - 1)})" for plan in plans]
    return [*shown[:-1], f"{shown[-1]}, fitted here" if fitted_here else shown[-1]]


# ---- torch's DDP -----------------------------------------------------------------------------


def ddp_keeps(network: str, gpus: int, alone: float, sending: float) -> float:
    """Planned share of the throughput of one GPU that steps in `alone` seconds."""
    record, device = traced(network, 32), replace(V100, sending=sending)
    strategy = named("0", gpus, 8)
    plan, _ = engine_plan(record, strategy, carrier=Carrier.DEVICES)
    cluster = Cluster(gpus, min(8, gpus), CUBE, INFINIBAND)
    compute = computing(record, device, alone)
    return alone / simulate(job_of(record, strategy, plan, compute, cluster, device)).mean


Iterations = dict[tuple[str, int], float]  # seconds, by network and number of GPUs
FITTED = {("ResNet-50", gpus) for gpus in (2, 4, 8)}


def ddp_iterations() -> Iterations:
    return {(network, gpus): seconds for network, gpus, seconds in PUBLISHED["ddp"]["rows"]}


def ddp_error(found: Iterations, case: tuple[str, int], sending: float) -> float:
    alone = found[case[0], 1]
    return ddp_keeps(*case, alone, sending) / (alone / found[case]) - 1


@cache
def ddp_fit() -> float:
    """Seconds of computing that a byte sent beside it costs, by one network on one machine."""
    found = ddp_iterations()
    return min(SENDING, key=lambda cost: sum(ddp_error(found, at, cost) ** 2 for at in FITTED))


@cache
def ddp_errors() -> tuple[float, ...]:
    """Of the iterations that nothing was fitted to."""
    found, best = ddp_iterations(), ddp_fit()
    return tuple(ddp_error(found, at, best) for at in found if at[1] > 1 and at not in FITTED)


def ddp() -> str:
    """Published iterations of torch's DDP, on machines of 8 V100."""
    found, best, body = ddp_iterations(), ddp_fit(), []
    for case in (at for at in found if at[1] > 1):
        network, gpus = case
        alone = found[network, 1]
        kept = alone / found[case]
        plans = [ddp_keeps(network, gpus, alone, cost) for cost in (0.0, best)]
        body.append((network, str(gpus), f"{kept:.1%}", *_cells(plans, kept, case in FITTED)))
    headers = ("DDP", "GPUs", "kept throughput", "data sheets alone", "fitted to ResNet-50")
    fitted = f"Fitted: {best * 1e9:.2g} s of computing lost per GB sent beside it."
    return f"{markdown(headers, body)}\n\n{judged(ddp_errors())} {fitted}"
