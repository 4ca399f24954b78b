"""Everything that needs a GPU, with one command: tests, sanitizers, benchmarks, profiles.

    python -m bench gpu_all                         # into bench/results/<gpu>
    python -m bench gpu_all --out DIR --seconds 570 --only build,units,kernels
    python -m bench gpu_all --rehearse              # on a CPU: what can be tried without a GPU

Stages run in the order of their value, each for at most its own time; a stage that fails does not
stop the others. A stage's measurements are kept at once, also when the command is stopped.
docs/gpu.md says what each stage shows. The exit code is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import STARTED
from bench.gpu import guard
from bench.gpu.mps import shared_gpus
from bench.gpu.stages import Command, Context, Stage, stages
from bench.measure.benchmark import choose
from bench.report import documents
from bench.report.documents import RESULTS, ROOT
from examples.common.machine import COMMIT_VARIABLE, commit, describe, environment, write_json
from examples.common.ranks import INTERRUPTED, Group, Parser, UsageError, argument
from examples.common.text import render

SHORTEST = 30.0  # seconds: a stage is not begun with less
GRACE = 5.0
SHOWN = 25  # lines of a stage's output that are shown at its end
SUMMARY, PACKED = "summary.json", "all.tar.gz"
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


@dataclass
class Outcome:
    """Outcome of a stage: PASSED, FAILED or SKIPPED, after how many seconds, and why."""

    stage: str
    status: str
    seconds: float = 0.0
    note: str = ""


@dataclass
class Session:
    """One call of the command.

    Attributes:
        keep: folder that results are copied to after each stage; None: nowhere.
        deadline: time on the monotonic clock by which everything must have ended.
        variables: of the environment, for the stages.
        packed: whether only the summary and one file with all results are kept.
        mps: whether stages whose ranks share a GPU may start an MPS daemon.
    """

    context: Context
    keep: Path | None
    deadline: float
    variables: dict[str, str]
    rehearse: bool = False
    packed: bool = False
    mps: bool = True
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the stages that failed."""
        return [outcome.stage for outcome in self.outcomes if outcome.status == FAILED]

    def facts(self) -> dict[str, Any]:
        """Return the machine and versions."""
        return environment(Group(0, 1, torch.device("cuda" if self.context.gpus else "cpu")))


def run_stage(stage: Stage, session: Session) -> Outcome:
    """Run a stage's commands until one fails or the time is over."""
    commands = stage.rehearsal if session.rehearse else stage.commands
    reason = _reason_to_skip(stage, commands, session)
    if reason:
        return Outcome(stage.name, SKIPPED, note=reason)
    start, note = time.monotonic(), ""
    end = min(start + stage.seconds, session.deadline)
    log = session.context.work / "logs" / f"{stage.name}.log"
    together = stage.together and session.mps and not session.rehearse
    with (
        log.open("w", encoding="utf-8") as output,
        shared_gpus(together, output.fileno()) as shared,
    ):
        for command in commands:
            limits, variables = (end - time.monotonic(), stage.quiet), session.variables | shared
            note = note or _run(command, output.fileno(), limits, variables)
    text = log.read_text(encoding="utf-8", errors="replace")
    print("\n".join(text.splitlines()[-SHOWN:]), flush=True)
    if stage.proof and not session.rehearse and not re.search(stage.proof, text):
        note = note or f"its output lacks {stage.proof!r}"
    seconds = round(time.monotonic() - start, 1)
    return Outcome(stage.name, FAILED if note else PASSED, seconds, note)


def _reason_to_skip(stage: Stage, commands: Sequence[Command], session: Session) -> str:
    if not commands:
        return "needs a GPU" if session.rehearse else "needs several GPUs"
    if session.deadline - time.monotonic() < SHORTEST:
        return "no time is left"
    absent = [tool for tool in stage.tools if shutil.which(tool) is None]
    return f"no {', '.join(absent)} on PATH" if absent and not session.rehearse else ""


def _run(
    command: Command, output: int, limits: tuple[float, float], variables: Mapping[str, str]
) -> str:
    """Run one command under a guard, which ends it and its children when this process ends.

    Returns:
        What went wrong; empty if nothing did.
    """
    shown = " ".join(command[:5])
    if shutil.which(command[0]) is None:
        return f"{shown}: there is no such program"
    process = subprocess.Popen(
        (sys.executable, guard.__file__, *command),
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    (seconds, quiet), said, until = limits, -1, math.inf
    end = time.monotonic() + max(seconds, 1.0)
    try:
        while time.monotonic() < min(end, until):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"{shown}: exit code {process.returncode}" if process.wait(0.2) else ""
            if (size := os.fstat(output).st_size) > said:
                said, until = size, time.monotonic() + quiet
    finally:
        if process.poll() is None:
            _end(process)
    return f"{shown}: " + ("its time was over" if until > end else f"silent for {quiet:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command, which then writes its results, and kill the rest of its group."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(chosen_stages: Sequence[Stage], session: Session) -> int:
    """Run stage after stage, keep the results after each, and return an exit code."""
    code = 0
    for number, stage in enumerate(chosen_stages, 1):
        print(f"\n=== {stage.name} ({number} of {len(chosen_stages)}): {stage.summary}", flush=True)
        try:
            outcome = run_stage(stage, session)
        except KeyboardInterrupt:
            outcome, code = Outcome(stage.name, FAILED, note="interrupted"), INTERRUPTED
        session.outcomes.append(outcome)
        took = f"{outcome.status}, {outcome.seconds:.0f} s {outcome.note}".rstrip()
        print(f"--- {stage.name}: {took}")
        outcomes = [asdict(outcome) for outcome in session.outcomes]
        front = {"kind": "gpu_all", "environment": session.facts(), "rehearsal": session.rehearse}
        write_json({**front, "stages": outcomes}, session.context.results / SUMMARY)
        if session.keep is not None:
            _keep(session, session.keep)
        if code:
            break
    return code or (1 if session.failed else 0)


def _keep(session: Session, folder: Path) -> None:
    """Copy the results, and pack them with traces and logs into one file beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(session.context.results.glob(SUMMARY if session.packed else "*.json")):
        shutil.copy(path, folder / path.name)
    if not folder.resolve().is_relative_to(RESULTS):  # not among what is committed
        unfinished = session.context.work / PACKED
        with tarfile.open(unfinished, "w:gz") as packed:
            for name in ("logs", "results"):
                packed.add(session.context.work / name, arcname=name)
        # A run that is stopped meanwhile leaves the file of the stage before.
        shutil.copy(unfinished, folder / f".{PACKED}")
        os.replace(folder / f".{PACKED}", folder / PACKED)


def _session(args: argparse.Namespace) -> Session:
    gpus = torch.cuda.device_count()
    if not gpus and not args.rehearse:
        raise UsageError("torch sees no GPU here; --rehearse tries what can be tried without one")
    gpu = "rehearsal" if args.rehearse else torch.cuda.get_device_name(0)
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    work = ROOT / "out" / "gpu" / name
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("logs", "results"):
        (work / folder).mkdir(parents=True)
    # The commit of the start: the results themselves change the checkout.
    variables = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    os.environ[COMMIT_VARIABLE] = args.commit or commit() or ""
    if gpus and "FASTSYNC_CUDA_ARCHS" not in os.environ:
        # Those of this machine's GPUs: compiling for others only takes time.
        found = {torch.cuda.get_device_capability(index) for index in range(gpus)}
        variables["FASTSYNC_CUDA_ARCHS"] = ";".join(f"{a}{b}" for a, b in sorted(found))
    context = Context(work, work / "results", 0 if args.rehearse else gpus)
    keep = args.out or (None if args.rehearse else RESULTS / name)
    deadline = STARTED + args.seconds
    options = {"rehearse": args.rehearse, "packed": args.packed, "mps": not args.no_mps}
    return Session(context, keep, deadline, variables, **options)


def _start(args: argparse.Namespace) -> int:
    if args.list:
        every = stages(Context(Path("out"), Path("out"), 8))
        for stage in choose("stage", every, args.only, args.skip):
            print(f"{stage.name:10} at most {stage.seconds:4.0f} s  {stage.summary}")
        return 0
    session = _session(args)
    code = run_all(choose("stage", stages(session.context), args.only, args.skip), session)
    rows = [(o.stage, o.status, f"{o.seconds:.0f}", o.note) for o in session.outcomes]
    print(f"\n{describe(session.facts())}\n{render(('stage', 'result', 's', ''), rows)}")
    where = session.keep or session.context.results
    print(f"failed: {', '.join(session.failed) or 'none'}; results in {where}")
    if where.resolve().is_relative_to(RESULTS):
        documents.main([])
    return code


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "bench gpu_all",
        __doc__,
        argument("--only", "these stages, in this order", "all"),
        argument("--skip", "leave these out", ""),
        argument("--list", "only say what there is to run", action="store_true"),
        argument("--out", "folder for results; unset: bench/results/<gpu>", type=Path),
        argument("--packed", "only summary.json and all.tar.gz into --out", action="store_true"),
        argument("--seconds", "for everything, from the start of this process", 3600.0, type=float),
        argument("--no-mps", "have ranks that share a GPU take turns", action="store_true"),
        argument("--commit", "of this checkout, where its history is not at hand"),
        argument("--rehearse", "in tiny form, on a CPU", action="store_true"),
    )
    return parser.run(_start, argv)
