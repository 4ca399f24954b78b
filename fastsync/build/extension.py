"""Loads the compiled extension: prebuilt if it fits this torch, else built once and cached.

[Note: one build for many ranks]
torchrun starts all ranks of a node at once. They meet at a file lock: the first builds into a
temporary folder and renames it into place; the others wait and find it there. The lock is the
kernel's, so a rank that dies releases it, and a half-finished build is never seen by anyone.
Whoever builds reports progress, whatever its rank; one that waits names whom it waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from fastsync.build import recipe
from fastsync.build.env import Env
from fastsync.build.recipe import BuildError
from fastsync.build.trust import make_private, why_not_ours

__all__ = ["BuildError", "Origin", "leave_chains", "load", "origin"]

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPE = recipe.__file__
_GUARD = str(Path(__file__).with_name("guard.py"))
_TAIL_LINES = 30
_REPORT_SECONDS = 5.0  # between two reports of progress at least
_QUIET_SECONDS = 15.0  # without progress that are added to it
_SILENT_SECONDS = 3.0  # that a rank waits before it says so
_POLL_SECONDS = 0.1


@cache
def load() -> ModuleType:
    """The extension module ``fastsync._C``. The first call may compile it, and says how long.

    Raises:
        BuildError: it has to be compiled and cannot be; the text carries the remedy.
    """
    return _import(_prebuilt() or _built(Env.read()))


def leave_chains(seconds: float) -> None:
    """Has collectives that hang in threads of the extension never go on, if it was loaded.

    Their threads have so long to come back from what they wait for; see csrc/comm/worker.h.
    """
    if load.cache_info().currsize:
        load().leave_chains(seconds)


@dataclass(frozen=True)
class Origin:
    """Where the extension of this process has come from.

    Attributes:
        prebuilt: ``pip install`` compiled it; else the first import did.
    """

    file: Path
    prebuilt: bool


def origin() -> Origin:
    """Of the extension, which is loaded first.

    Raises:
        BuildError: as `load`.
    """
    file = Path(str(load().__file__))
    return Origin(file, file.parent == _PACKAGE)


def _prebuilt() -> Path | None:
    """The extension that ``pip install`` compiled, if it was for this torch and these sources."""
    record = _PACKAGE / "_prebuilt.json"
    found = [
        p for s in importlib.machinery.EXTENSION_SUFFIXES if (p := _PACKAGE / f"_C{s}").exists()
    ]
    if not found or not record.exists():
        return None
    return found[0] if json.loads(record.read_text()) == recipe.binary_identity() else None


def _built(env: Env) -> Path:
    recipe.check_compilers()
    toolkit = recipe.find_toolkit(env.cuda)
    digest = recipe.fingerprint(toolkit, _options(env))
    version = torch.__version__.split("+")[0]
    folder = _cache_folder(env.cache_dir) / f"torch{version}-{digest}"
    library = folder / f"{recipe.MODULE}.so"
    if not library.exists():
        with _lock(_beside(folder, ".lock"), env.rank):
            if not library.exists():
                _compile(env, folder, toolkit is not None)
    for path in (folder, library):
        if reason := why_not_ours(path):
            raise BuildError(f"{_REFUSED} {path}: {reason}. Delete {folder} to have it built again")
    return library


def _options(env: Env) -> recipe.Options:
    return recipe.Options(env.cuda_archs, env.sanitize, env.strict)


_REFUSED = "refusing to load code that others may have written, from"


def _cache_folder(wanted: Path) -> Path:
    """The cache folder, or else one of our own under the temporary folder.

    Raises:
        BuildError: others own or may write to the latter too.
    """
    wanted = wanted.resolve()
    reason = _why_unusable(wanted)
    if reason is None:
        return wanted
    fallback = Path(tempfile.gettempdir()) / f"fastsync-{os.getuid()}"
    if (also := _why_unusable(fallback)) is not None:
        raise BuildError(
            f"there is no safe folder for the compiled extension: {reason}; {also}. Point "
            "FASTSYNC_CACHE_DIR at a folder that you own and nobody else may write to"
        )
    _say(
        f"not using the cache folder: {reason}. Using {fallback}; to change that, let nobody else "
        "write there (chmod go-w), or point FASTSYNC_CACHE_DIR at a folder that only you may write"
    )
    return fallback


def _why_unusable(folder: Path) -> str | None:
    """Creates a cache folder; returns the reason where it cannot be used."""
    try:
        make_private(folder)
        reason = why_not_ours(folder)
        if reason is None:
            with tempfile.TemporaryFile(dir=folder):
                pass
        return reason
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"


def _beside(folder: Path, ending: str) -> Path:
    """A file that goes with `folder`, whose name has dots of its own."""
    return folder.with_name(folder.name + ending)


@contextlib.contextmanager
def _lock(path: Path, rank: int) -> Iterator[None]:
    with path.open("a+") as file:
        _acquire(file.fileno(), path)
        file.truncate(0)
        file.write(f"rank {rank} (process {os.getpid()} on {os.uname().nodename})")
        file.flush()
        yield


def _acquire(descriptor: int, path: Path) -> None:
    start, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told and time.monotonic() - start > _SILENT_SECONDS:
                told = True
                who = path.read_text() or "another process"
                _say(f"waiting for {who}, which compiles the extension")
            time.sleep(_POLL_SECONDS)


def _compile(env: Env, folder: Path, with_cuda: bool) -> None:
    cores = recipe.cores()
    what = "C++ and CUDA" if with_cuda else "C++ only, without CUDA"
    about = recipe.estimated_seconds(with_cuda, cores)
    _say(
        f"compiling the extension ({what}), once for this environment: "
        f"about {about} s on {cores} core{'s'[: cores > 1]}"
    )
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + ".building."))
    log = _beside(folder, ".log")
    command = [sys.executable, _RECIPE, "--out", str(work), "--cuda", env.cuda]
    command += ["--archs", ";".join(env.cuda_archs), "--sanitize", env.sanitize]
    command += ["--strict"] if env.strict else []
    try:
        _run_logged(command, log, env.verbose, recipe.count_jobs(with_cuda))
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"compiled in {time.monotonic() - start:.0f} s, cached in {folder}")


def _run_logged(command: list[str], log: Path, echo: bool, jobs: int) -> None:
    """Runs the build, which nobody else may write into, and reports how far it is.

    However this process ends, what it started does too.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, _GUARD, *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
            stdout=None if echo else file,
            stderr=None if echo else subprocess.STDOUT,
            umask=0o077,
        )
        try:
            _report_until_done(process, log, jobs)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and all that it started have ended
                os.killpg(process.pid, signal.SIGKILL)
    if process.wait() == 0:
        return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    raise BuildError(f"compiling the extension failed; the whole log is {log}. It ends:\n{tail}")


def _report_until_done(process: subprocess.Popen[bytes], log: Path, jobs: int) -> None:
    start, told, next_report = time.monotonic(), -1, _REPORT_SECONDS
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
            return
        passed = time.monotonic() - start
        if passed < next_report:
            continue
        done = _count_done(log.read_text(errors="replace"))
        if done != told or passed >= next_report + _QUIET_SECONDS:
            _say(f"compiled {done} of {jobs} parts, {passed:.0f} s so far")
            told, next_report = done, passed + _REPORT_SECONDS


def _count_done(log: str) -> int:
    """The commands that ended, by what ninja and the recipe print after each: "[3/8] c++ ..."."""
    return len(re.findall(r"^\[\d+/\d+\] ", log, re.MULTILINE))


def _say(text: str) -> None:
    print(f"fastsync: {text}", file=sys.stderr, flush=True)


def _import(path: Path) -> ModuleType:
    name = "fastsync._C"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"cannot load the compiled extension {path}: {error}. Delete that file to have it "
            "built again"
        ) from error
    sys.modules[name] = module
    return module
