"""Hardware and software that a result was measured with: never a host name, a user or a path."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import fastsync
from examples.common.ranks import Group

COMMIT_VARIABLE = "BENCH_COMMIT"  # the commit, where the history is not at hand or files change
HERE = Path(__file__).resolve().parent


def environment(group: Group) -> dict[str, Any]:
    """Return the machine, versions and job, ready for JSON."""
    gpu = None
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": round(memory / 2**30, 1),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastsync": fastsync.__version__,
        "commit": commit(),
        "transport": group.transport,
        "ranks": group.world,
        "threads_per_rank": torch.get_num_threads(),
    }


def describe(facts: dict[str, Any]) -> str:
    """Return one line for people; a rank has one thread where it says nothing else."""
    device = facts["gpu"] or f"{facts['cpu']}, {facts['cores']} cores"
    count = facts["threads_per_rank"]
    threads = "" if count == 1 else f", {count} threads each"
    ranks = (
        "1 process" if facts["ranks"] == 1 else f"{facts['ranks']} ranks over {facts['transport']}"
    )
    return (
        f"{ranks}{threads}; {device}; torch {facts['torch']}; commit {facts['commit'] or 'unknown'}"
    )


def command_line() -> str:
    """This process's command with every path cut down to its last part."""

    def without_path(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        return f"{option}{equals}{os.path.basename(value.rstrip(os.sep))}"

    return shlex.join(map(without_path, sys.orig_argv))


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result, and the folder it belongs into where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout, with "-dirty" where files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()

    with suppress(OSError, subprocess.SubprocessError):
        if not os.environ.get(COMMIT_VARIABLE):
            revision = git("rev-parse", "--short=12", "HEAD")
            return f"{revision}-dirty" if git("status", "--porcelain") else revision
    return os.environ.get(COMMIT_VARIABLE)
