"""What a result was measured on and with: never a host name, a user or a path."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from examples.common.ranks import Group

COMMIT_VARIABLE = "BENCH_COMMIT"  # the commit of a copy without its history
HERE = Path(__file__).resolve().parent


def environment(group: Group) -> dict[str, Any]:
    """Machine, versions and job, ready for JSON."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": round(memory / 2**30, 1),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastsync": _fastsync_version(),
        "commit": _commit(),
        "transport": group.transport,
        "ranks": group.world,
        "threads_per_rank": torch.get_num_threads(),
    }


def describe(facts: dict[str, Any]) -> str:
    """One line for people."""
    device = facts["gpu"] or f"{facts['cpu']}, {facts['cores']} cores"
    threads = f"{facts['threads_per_rank']} thread(s)"
    ranks = f"{facts['ranks']} ranks over {facts['transport']}, {threads} each"
    return (
        f"{f'1 process, {threads}' if facts['ranks'] == 1 else ranks}; {device}, "
        f"{facts['memory_gib']:.0f} GiB; torch {facts['torch']}, Python {facts['python']}; "
        f"commit {facts['commit'] or 'unknown'}"
    )


def command_line(arguments: Sequence[str] | None = None) -> str:
    """This process's command with every path cut down to its last part."""

    def without_path(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        return f"{option}{equals}{os.path.basename(value.rstrip(os.sep))}"

    return " ".join(map(without_path, sys.orig_argv if arguments is None else arguments))


def write_json(result: dict[str, Any], path: Path) -> None:
    """Writes a result, and the folder it belongs into where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _fastsync_version() -> str | None:
    """The version of the package that is imported; a checkout need not be installed."""
    version = getattr(sys.modules.get("fastsync"), "__version__", None)
    if version is not None:
        return str(version)
    try:
        return metadata.version("fastsync")
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout, with "-dirty" where files differ from it."""
    revision = _git("rev-parse", "--short=12", "HEAD")
    if revision is None:
        return os.environ.get(COMMIT_VARIABLE)
    return f"{revision}-dirty" if _git("status", "--porcelain") else revision


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(HERE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
