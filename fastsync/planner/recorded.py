"""What --from asks for: a recorded run, followed over numbers of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from fastsync.planner.asked import cluster_of, device_of, profile_of, scenario_of
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster, Link, collective_seconds, sent_bytes
from fastsync.planner.plan import Plan, make_plan_of, plan_of_run
from fastsync.planner.profile import Sample, fit
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.runs import Recorded, Travel, from_run, travels
from fastsync.planner.scenario import Scenario
from fastsync.timeline.data import Run, load

__all__ = ["link_of_run", "recorded_plan"]

_APART = 4  # times the smallest size, which the largest has where a latency can be told
_FASTEST = 1e13  # bytes per second; what is above comes from a line that falls


def recorded_plan(args: argparse.Namespace) -> Plan:
    """What --from asks for. Links that are not given are as fast as the recorded ones were."""
    run, recorded = _read(args)
    profile = profile_of(args)
    on_cpu = run.device.startswith("cpu")
    if profile is not None and on_cpu != (not profile.machine.gpu):
        raise ValueError(
            f"--profile {args.profile} was measured on {profile}, but the run of --from was "
            f"recorded on {run.device}"
        )
    if profile is not None:
        device = device_of(args, profile)
        cluster, source = cluster_of(args, device, profile), f"profile: {profile}"
    else:
        device = device_of(args, None, "cpu" if on_cpu else "h100")
        cluster, source = _as_recorded(args, run, cluster_of(args, device, None))
    if args.model:
        plan = make_plan_of(_scenario(args, run, recorded, device, cluster), args.gpus)
    else:
        title = f"{run.model}, recorded on {run.world_size} ranks"
        plan = plan_of_run(recorded, title, device, cluster, args.gpus)
    return replace(plan, sources=(source,) if source else ())


def _scenario(
    args: argparse.Namespace, run: Run, recorded: Recorded, device: Device, cluster: Cluster
) -> Scenario:
    """What --model is, with the computing times of its recorded run.

    Raises:
        ValueError: the run is of another model.
    """
    asked = scenario_of(args, device, cluster)
    trained, planned = len(asked.first.params), len(_parameters(run))
    # Units hold what is frozen, too.
    if trained > planned or (trained < planned and not run.units):
        raise ValueError(
            f"--from: {args.run} is a run of {run.model} with {planned} parameters that are "
            f"trained, but --model {args.model} has {trained}"
        )
    measured = asked.compute.as_recorded(recorded.compute)
    straggler = recorded.straggler if args.straggler == 1 else args.straggler
    jitter = args.jitter or recorded.jitter
    return replace(asked, measured=measured, jitter=jitter, straggler=straggler)


def _parameters(run: Run) -> list[str]:
    parts = run.units or run.plans[-1]
    return [name for part in parts for name in part.parameters]


def _read(args: argparse.Namespace) -> tuple[Run, Recorded]:
    try:
        run = load(args.run)
        return run, from_run(run)
    except OSError as error:
        raise ValueError(f"--from: {args.run} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--from: {error}") from error


def _as_recorded(args: argparse.Namespace, run: Run, given: Cluster) -> tuple[Cluster, str]:
    """Links that are not given are those of the recording; in words where they come from."""
    if None not in (args.intra, args.inter):
        return given, ""
    backend = args.backend or ("gloo" if run.device.startswith("cpu") else "nccl")
    link, words = link_of_run(run, replace(given, backend=backend))
    if args.latency is not None:
        link, words = replace(link, latency=args.latency), f"{words}, but for --latency"
    intra = link if args.intra is None else given.intra
    inter = link if args.inter is None else given.inter
    return replace(given, intra=intra, inter=inter, backend=backend), words


def link_of_run(run: Run, cluster: Cluster) -> tuple[Link, str]:
    """Latency and rate of the recorded collectives, and in words where they come from.

    Args:
        cluster: whose latencies count where collectives of about one size do not tell them.

    Raises:
        ValueError: nothing has travelled.
    """
    seen = travels(run)
    if not seen or run.world_size < 2:
        raise ValueError("--from: the recording has no collectives; give --intra and --inter")
    sizes = [travel.nbytes for travel in seen]
    if max(sizes) >= _APART * min(sizes):
        # A gather or a reduction makes half of the hops of an all-reduce, with half of its bytes.
        samples = [Sample(t.nbytes, (1 if t.kind == "all_reduce" else 2) * t.seconds) for t in seen]
        latency, rate = fit(samples, run.world_size)
        if latency > 0 and rate < _FASTEST:
            words = (
                f"links: {gigabytes(rate)}/s and {shown_seconds(latency)} a hop, fitted to "
                f"{_described(run, seen)} of {gigabytes(min(sizes))} to {gigabytes(max(sizes))}"
            )
            return Link(rate, latency, "net"), words
    return _by_tables(run, seen, cluster)


def _described(run: Run, seen: Sequence[Travel]) -> str:
    return f"{len(seen)} recorded {'collectives of units' if run.units else 'buckets'}"


def _by_tables(run: Run, seen: Sequence[Travel], cluster: Cluster) -> tuple[Link, str]:
    """The rate that is left where a hop takes what the tables say."""
    world = run.world_size
    known = Link(_FASTEST, cluster.inter.latency, "net")
    at = Cluster(world, world, known, known, cluster.backend)
    waiting = sum(collective_seconds(travel.kind, 1.0, at) for travel in seen)
    busy = sum(travel.seconds for travel in seen)
    sent = sum(sent_bytes(travel.kind, float(travel.nbytes), world) for travel in seen)
    rate = sent / max(busy - waiting, busy / 2)
    hop = "NCCL's tables" if known.latency is None else f"the usual {shown_seconds(known.latency)}"
    words = (
        f"links: {gigabytes(rate)}/s as recorded, and for a hop {hop}: the sizes and times of "
        f"{_described(run, seen)} do not tell a latency"
    )
    return replace(known, rate=rate), words
