"""Records a window of training steps on every rank, and brings the ranks' marks together.

What travels goes through the rendezvous store, not through a collective: it works while ranks
leave, on any backend, and a rank that is gone costs the others a deadline.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import socket
import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import backend_name, group_store, resolvable_name
from fastsync.faults.clocks import ClockOffset, Mailbox, align_clocks
from fastsync.reducer import core
from fastsync.reducer.buckets import BucketPlan
from fastsync.timeline.data import BucketInfo, RankRecord, RankStep, Run, in_rounds, steps_of
from fastsync.timeline.moves import Event, UnitInfo

if TYPE_CHECKING:
    from fastsync.reducer.engine import Engine

_EXIT_TIMEOUT = 10.0  # seconds to wait for other ranks where this one is about to exit


@dataclass(frozen=True)
class TimelinePolicy:
    """The steps that a timeline records, and where they are written.

    Attributes:
        path: the JSON file that rank 0 writes once the window is full, or at exit where training
            ends earlier. None: written on demand only, by `write_timeline`.
        skip: synchronised backwards before the window; the first steps are not like the others.
        steps: synchronised backwards in the window, after which recording ends. None: never ends.
        capacity: marks that each rank keeps, the latest ones; 5 a step, 4 a bucket, and with units
            4 for each gather and each reduction.
    """

    path: str | None = None
    skip: int = 3
    steps: int | None = 20
    capacity: int = 1 << 15

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ValueError(f"timeline: skip must not be negative, but is {self.skip}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"timeline: steps must be at least 1 or None, but is {self.steps}")
        if self.capacity < 1:
            raise ValueError(f"timeline: capacity must be at least 1, but is {self.capacity}")

    @classmethod
    def of(cls, wanted: str | os.PathLike[str] | bool | TimelinePolicy) -> TimelinePolicy | None:
        """Return the policy for an argument: a path, True (record, write on demand), a policy, or
        False."""
        if isinstance(wanted, TimelinePolicy):
            return wanted
        if isinstance(wanted, bool):
            return cls(steps=None) if wanted else None
        return cls(path=os.fspath(wanted))


@dataclass(frozen=True)
class RecordedModel:
    """The model, as a recording describes it.

    Attributes:
        name: of its class.
        parameters: names, in the order that plans refer to.
        plans: every plan so far; the list grows with new ones.
        units: those of a model whose parameters are shared; the list is filled in time.
    """

    name: str
    parameters: Sequence[str]
    device: torch.device
    plans: Sequence[BucketPlan] = ()
    units: Sequence[UnitInfo] = ()


class Steps(Protocol):
    """An engine that makes the steps and marks them."""

    def steps(self) -> int:
        """Return the number of steps that have been made."""

    def set_timeline(self, timeline: core.Timeline | None) -> None:
        """Record there from now on."""


class Recorder:
    """One rank's part of a recording. Holds neither the model nor its gradients.

    Args:
        policy: which steps, and where they are written.
        model: what is recorded.
        group: the ranks that are recorded together.

    Attributes:
        sizes: fp32 bytes of the parameters that averages may be of, by name.
    """

    def __init__(
        self, policy: TimelinePolicy, model: RecordedModel, group: dist.ProcessGroup
    ) -> None:
        self._policy = policy
        self._model = model
        self._rank, self._world = group.rank(), group.size()
        self._backend = backend_name(group)
        self._store = group_store(group)
        names = zlib.crc32("\n".join(model.parameters).encode())
        self._place = f"timeline/{resolvable_name(group)}/{names}"
        self._timeline = core.Timeline(policy.capacity, str(model.device))
        self._rounds: deque[Event] = deque(maxlen=policy.capacity)  # marks of averages, by sync=
        self._fragments: dict[tuple[str, ...], int] = {}
        self.sizes: Mapping[str, int] = {}
        self._writes = 0
        self._state = "waiting"  # then "recording", then "finished"

    def before_step(self, source: Steps) -> None:
        """Begin or end the window, at the same step on all ranks. Called before every forward.

        Args:
            source: whose steps these are.
        """
        if self._state == "finished":
            return
        steps, policy = source.steps(), self._policy
        if self._state == "waiting" and steps >= policy.skip:
            source.set_timeline(self._timeline)
            self._state = "recording"
            if policy.path is not None:
                atexit.register(self._at_exit)
        elif policy.steps is not None and steps >= policy.skip + policy.steps:
            source.set_timeline(None)
            self._state = "finished"
            if policy.path is not None:
                self.write(policy.path, Env.read().agree_timeout)

    def note(self, mark: str, names: Sequence[str], nbytes: int, time: int) -> None:
        """Record a mark of an average of parameters, as `Exchange.note` is told of it."""
        if self._state == "recording":
            number = self._fragments.setdefault(tuple(names), len(self._fragments)) if names else 0
            self._rounds.append((0, mark, number, nbytes, time))

    def _events(self) -> list[Event]:
        events = self._timeline.events()
        ended = any(mark == "round_end" for _, mark, *_ in self._rounds)
        return in_rounds(events, self._rounds) if ended else events

    def steps(self, last: int = 50) -> list[RankStep]:
        """This rank's latest complete steps, at most `last` of them."""
        events = self._events()
        newest = events[-1][0] if events else 0
        recent = (event for event in events if event[0] >= newest - last)
        return list(steps_of(self._rank, recent).values())[-last:]

    def write(self, path: str, timeout: float) -> None:
        """Write the marks of all ranks; every rank calls it.

        Args:
            path: rank 0 writes this file.
            timeout: seconds to wait for the other ranks. A rank that does not come is left out.
        """
        atexit.unregister(self._at_exit)
        self._writes += 1
        records = [self._record(timeout)]
        if self._store is not None and self._world > 1:
            mail = Mailbox(self._store, f"{self._place}/{self._writes}", timeout)
            if self._rank > 0:
                mail.put(f"marks/{self._rank}", _packed(records[0]))
            offsets = self._offsets(mail)
            records += self._others(mail, offsets) if self._rank == 0 else []
        if self._rank == 0:
            self._dump(path, records)

    def _offsets(self, mail: Mailbox) -> Sequence[ClockOffset | None]:
        try:
            return align_clocks(mail, self._rank, self._world)
        except RuntimeError as error:
            _say(f"rank {self._rank} could not align its clock with rank 0's: {error}")
            return [None] * self._world

    def _others(self, mail: Mailbox, offsets: Sequence[ClockOffset | None]) -> list[RankRecord]:
        records = []
        for rank, offset in enumerate(offsets):
            if rank == 0:
                continue
            if offset is None:
                _say(f"the timeline lacks rank {rank}, which did not come in time")
                continue
            try:
                records.append(_on_clock(_unpacked(mail.take(f"marks/{rank}")), offset))
            except RuntimeError as error:
                _say(f"the timeline lacks rank {rank}: {error}")
        return records

    def _record(self, timeout: float) -> RankRecord:
        """Wait for the device, which may be behind by steps, and half of the time at most: the
        others wait for this rank."""
        unfinished = self._timeline.await_events(timeout / 2)
        events, dropped = tuple(self._events()), self._timeline.dropped()
        return RankRecord(self._rank, socket.gethostname(), 0, dropped, events, unfinished)

    def _dump(self, path: str, records: Sequence[RankRecord]) -> None:
        run = Run(
            model=self._model.name,
            world_size=self._world,
            backend=self._backend,
            device=self._model.device.type,
            torch=torch.__version__,
            plans=tuple(self._plan(plan) for plan in self._model.plans),
            ranks=tuple(records),
            missing=tuple(sorted(set(range(self._world)) - {r.rank for r in records})),
            units=tuple(self._model.units) or tuple(map(self._fragment, self._fragments)),
        )
        try:
            run.dump(Path(path))
        except OSError as error:
            _say(f"rank {self._rank} could not write the timeline: {error}")
        else:
            _say(f"wrote {path}; look at it with: python -m fastsync.timeline {path}")

    def _fragment(self, names: tuple[str, ...]) -> UnitInfo:
        size = sum(self.sizes[name] for name in names)
        return UnitInfo(f"fragment of {names[0]}", names, size, "fp32")

    def _plan(self, plan: BucketPlan) -> tuple[BucketInfo, ...]:
        names = self._model.parameters
        return tuple(
            BucketInfo(
                parameters=tuple(names[i] for i in bucket.params),
                bytes=bucket.nbytes,
                wire=bucket.format_name,
            )
            for bucket in plan.buckets
        )

    def _at_exit(self) -> None:
        if self._policy.path is not None:
            try:
                self.write(self._policy.path, _EXIT_TIMEOUT)
            except RuntimeError as error:  # the store may be gone already
                _say(f"rank {self._rank} could not hand over its timeline: {error}")


@dataclass(frozen=True)
class _LocalSteps:
    """Steps of optimizers, where gradients may stay local."""

    made: Callable[[], int]
    inner: Steps

    def steps(self) -> int:
        return self.made()

    def set_timeline(self, timeline: core.Timeline | None) -> None:
        self.inner.set_timeline(timeline)


def record_steps(
    policy: TimelinePolicy | None,
    model: str,
    engine: Engine,
    group: dist.ProcessGroup,
    made: Callable[[], int] | None,
) -> Recorder | None:
    """Record every step of an engine, if there is a policy.

    Args:
        model: its name.
        group: the ranks that are recorded.
        made: returns how many steps optimizers have made, where gradients may stay local.
    """
    if policy is None:
        return None
    names = tuple(param.name for param in engine.params)
    device = engine.params[0].tensor.device
    recorder = Recorder(policy, RecordedModel(model, names, device, engine.plans), group)
    recorder.sizes = {param.name: 4 * param.tensor.numel() for param in engine.params}
    if made is None:
        engine.on_step = recorder.before_step
    else:
        engine.on_step = lambda inner: recorder.before_step(_LocalSteps(made, inner))
    return recorder


def _on_clock(record: RankRecord, clock: ClockOffset) -> RankRecord:
    """Return the record on rank 0's clock."""
    events = tuple((s, m, i, b, time + clock.offset_ns) for s, m, i, b, time in record.events)
    return replace(record, clock_error_ns=clock.error_ns, events=events)


def _packed(record: RankRecord) -> str:
    return base64.b85encode(zlib.compress(json.dumps(asdict(record)).encode())).decode("ascii")


def _unpacked(message: bytes) -> RankRecord:
    return RankRecord.of(json.loads(zlib.decompress(base64.b85decode(message))))


def _say(text: str) -> None:
    print(f"fastsync: {text}", file=sys.stderr, flush=True)
