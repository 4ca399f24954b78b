"""Runs schedules on forked ranks, one after the other, and says what is wrong with how they end."""

import atexit
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.fuzz.random_faults.rank import run
from tests.fuzz.random_faults.schedule import AFTER, FAULTS, PLACES, STEPS, Schedule
from tests.helpers.served_store import end_store, serve_store

__all__ = ["Runner", "Tally"]

LIMIT = 40.0  # seconds for a training
BEAT = 0.005
HANGS, OTHER_WEIGHTS = "hangs", "other weights"
SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
}


@dataclass
class Tally:
    """Record of the schedules that have been run.

    Attributes:
        numbers: schedules that have passed.
        waits: seconds until survivors had their error, by fault.
        wrong: what was wrong, by the number of a schedule that has failed.
    """

    numbers: list[int] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path):
        """Return what `write` has kept; empty where there is no such file."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path):
        path.write_text(json.dumps(asdict(self)))

    @property
    def count(self):
        return len(self.numbers)

    def has(self, number):
        """Return whether it has been run."""
        return number in self.numbers or str(number) in self.wrong

    def rows(self):
        """For each fault: schedules by place, what was wrong, and how soon others knew."""
        run = [Schedule.draw(n) for n in {*self.numbers, *map(int, self.wrong)}]
        for fault in dict.fromkeys(FAULTS):
            mine = [schedule for schedule in run if schedule.fault == fault]
            places = [sum(s.place == place for s in mine) for place in (*PLACES, AFTER)]
            wrong = [w for s in mine for w in self.wrong.get(str(s.number), ())]
            hang, other = ([w for w in wrong if words in w] for words in (HANGS, OTHER_WEIGHTS))
            rest = len(wrong) - len(hang) - len(other)
            counts = (len(mine), *places, len(hang), len(other), rest)
            yield [fault, *map(str, counts), *_spread(self.waits.get(fault, ()))]

    def __str__(self):
        rows = [f"{self.count} schedules"]
        for fault, waits in sorted(self.waits.items()):
            middle, nearly, most = _spread(waits)
            rows.append(
                f"  {fault}: {len(waits)} errors, median after {middle} s, 95 % within "
                f"{nearly} s, the last after {most} s"
            )
        return "\n".join(rows)


def _spread(waits):
    """Median, what 95 % stay within, and the longest."""
    if not waits:
        return ["-"] * 3
    ordered = sorted(waits)
    nearly = math.ceil(0.95 * len(ordered)) - 1
    return [f"{ordered[place]:.2f}" for place in (len(ordered) // 2, nearly, -1)]


class Job:
    """The ranks of one training, in forked processes."""

    def __init__(self, prefix, schedule, wrapper, world):
        self.prefix, self.schedule, self.world = prefix, schedule, world
        self.children = {}
        port, self._server = serve_store()
        for rank in range(world):
            child = os.fork()
            if child == 0:
                _become_rank(prefix, schedule, wrapper, world, rank, port)
            self.children[rank] = child
        self.struck = None  # when a signal from outside was sent

    def lines(self, rank):
        path = Path(f"{self.prefix}-{rank}.log")
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def wait(self):
        """Wait until all have ended, or have had their time. Return those that had to be killed."""
        left, deadline, began = dict(self.children), time.monotonic() + LIMIT, None
        while left and time.monotonic() < deadline:
            left = {rank: pid for rank, pid in left.items() if not os.waitpid(pid, os.WNOHANG)[0]}
            if began is None and all(self._has_wrapped(rank) for rank in range(self.world)):
                began = time.monotonic()
            self._strike(left, began)
            if self.schedule and self.schedule.fault == "stop" and set(left) <= {self._victim}:
                break
            time.sleep(BEAT)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        end_store(self._server)
        return set(left)

    def _has_wrapped(self, rank):
        return any("wrapped" in line for line in self.lines(rank))

    @property
    def _victim(self):
        return self.schedule.victim

    def _strike(self, left, began):
        """Send the signal when it is due, and end a pause."""
        schedule = self.schedule
        outside = schedule is not None and schedule.place == AFTER
        if schedule is None or self._victim not in left or (outside and began is None):
            return
        now = time.monotonic()
        if outside and self.struck is None and now >= began + schedule.seconds:
            os.kill(left[self._victim], SIGNALS[schedule.fault])
            self.struck = now
        struck = self.struck if outside else self.fault_time()
        if schedule.passes and struck is not None and now >= struck + schedule.lasts:
            os.kill(left[self._victim], signal.SIGCONT)

    def fault_time(self):
        """When the fault happened; None where it has not."""
        times = [line["at"] for line in self.lines(self._victim) if "fault" in line]
        return times[0] if times else self.struck


def _become_rank(*job):
    """Run a rank and end this process as a script would end."""
    code = 1
    try:
        run(*job)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


class Runner:
    """Runs schedules by number.

    Args:
        folder: for what ranks write.
        tally: to add to.
    """

    def __init__(self, folder, tally):
        self.folder, self.tally = Path(folder), tally
        self._sound = {}

    def check(self, number):
        """Raise AssertionError that tells what is wrong."""
        schedule = Schedule.draw(number)
        wanted = self._weights(schedule)
        prefix = self.folder / str(number)
        job = Job(prefix, schedule, schedule.wrapper, schedule.world)
        stuck = job.wait()
        allowed = {schedule.victim} if schedule.fault == "stop" else set()
        seen = [job.lines(rank) for rank in range(schedule.world)]
        wrong = [f"rank {rank} {HANGS}" for rank in sorted(stuck - allowed)]
        if schedule.place != AFTER and job.fault_time() is None:  # a signal may come too late
            wrong.append("the fault did not happen")
        for rank, lines in enumerate(seen):
            wrong += _other_weights(rank, lines, wanted[rank])
            if rank != schedule.victim or schedule.passes:
                wrong += self._wrong_end(schedule, job, rank, lines)
        if wrong:
            self.tally.wrong[str(number)] = wrong
            logs = "".join(
                f"\n{p.read_text()}" for p in sorted(self.folder.glob(f"{number}-*.txt"))
            )
            raise AssertionError(f"{schedule}\n" + "\n".join(wrong) + logs)
        self.tally.numbers.append(number)
        for path in self.folder.glob(f"{number}[-.]*"):
            path.unlink()

    def _weights(self, schedule):
        """By rank and step, those of the training without a fault."""
        name = schedule.sound
        if name not in self._sound:
            job = Job(self.folder / name, None, schedule.wrapper, schedule.world)
            assert not job.wait(), f"{name} hangs"
            lines = [job.lines(rank) for rank in range(schedule.world)]
            self._sound[name] = [
                {x["step"]: x["weights"] for x in of if "step" in x} for of in lines
            ]
            assert all(len(of) == STEPS for of in self._sound[name]), (
                f"{name}\n{self._printed(name)}"
            )
        return self._sound[name]

    def _printed(self, name):
        """Return what the ranks of a training have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"{name}-?.txt")))

    def _wrong_end(self, schedule, job, rank, lines):
        """Return what is wrong with the end of a live rank: it finishes, or names the one that does
        not.
        """
        ends = [line for line in lines if "end" in line]
        if not ends:
            return [f"rank {rank} ended without a word"]
        end, struck = ends[0], job.fault_time()
        if end["end"] == "finished":
            return []
        if schedule.passes or struck is None:
            return [f"rank {rank} ended by {end['end']}: {end.get('text')}"]
        self.tally.waits.setdefault(schedule.fault, []).append(end["at"] - struck)
        victim, text = schedule.victim, end["text"]
        # One that gave up earlier is named, and what it says names the rank.
        quoted = " gave up " in text and f"SyncFault: fastsync: rank {victim} " in text
        if end["end"] != "SyncFault" or not (end["ranks"] == [victim] or quoted):
            return [f"rank {rank}'s {end['end']} does not name the rank: {end.get('text')}"]
        if schedule.fault == "raise" and "BadBatch: bad batch (rank.py:" not in end["text"]:
            return [f"rank {rank} does not say why: {end['text']}"]
        return []


def _other_weights(rank, lines, wanted):
    """Steps after which the rank held others than without a fault."""
    steps = {line["step"]: line["weights"] for line in lines if "step" in line}
    return [
        f"rank {rank} has {OTHER_WEIGHTS} after step {step}"
        for step, weights in steps.items()
        if weights != wanted[step]
    ]
