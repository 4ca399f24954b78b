"""Loads the compiled extension: prebuilt if it fits this torch, else built once and cached.

[Note: one build for many ranks]
torchrun starts all ranks of a node at once. They meet at a file lock: the first builds into a
temporary folder and renames it into place; the others wait and find it there. The lock is the
kernel's, so a rank that dies releases it, and no process ever sees a half-finished build.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shutil
import stat
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

from fastsync._build import recipe
from fastsync._build.env import Env
from fastsync._build.recipe import BuildError

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPE = recipe.__file__
_TAIL_LINES = 30
_REPORT_SECONDS = 10.0  # between two lines of progress


@cache
def load() -> ModuleType:
    """Return the extension module ``fastsync._C``.

    The first call may compile it, and prints how long that takes.

    Raises:
        BuildError: it has to be compiled and cannot be; the text carries the remedy.
    """
    return _import(find())


def find() -> Path:
    """Return the library that `load` loads. This may compile it.

    Raises:
        BuildError: as `load`.
    """
    return _prebuilt() or _built(Env.read())


def leave_pipelines(seconds: float) -> None:
    """Stop collectives that hang in threads of the extension from ever going on, if it was loaded.

    The threads have `seconds` to return from their waits; see csrc/comm/worker.h.
    """
    if load.cache_info().currsize:
        load().leave_pipelines(seconds)


@dataclass(frozen=True)
class Origin:
    """Origin of this process's extension.

    Attributes:
        prebuilt: ``pip install`` compiled it; else the first import did.
    """

    file: Path
    prebuilt: bool


def origin() -> Origin:
    """Load the extension, and return its origin.

    Raises:
        BuildError: as `load`.
    """
    file = Path(str(load().__file__))
    return Origin(file, file.parent == _PACKAGE)


def _prebuilt() -> Path | None:
    """Return the extension that ``pip install`` compiled, if it fits torch and the sources."""
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
    options = recipe.Options(env.cuda_archs, env.sanitize, env.strict)
    version, digest = torch.__version__.split("+")[0], recipe.fingerprint(toolkit, options)
    folder = _cache_folder(env.cache_dir) / f"torch{version}-{digest}"
    library = folder / f"{recipe.MODULE}.so"
    if not library.exists():
        with _lock(folder.with_name(folder.name + ".lock"), env.rank):
            if not library.exists():
                _compile(env, folder, toolkit is not None)
    for path in (folder, library):
        if reason := _why_not_ours(path):
            raise BuildError(
                f"refusing to load code that others may have written, from {path}: {reason}. "
                f"Delete {folder} to have it built again"
            )
    return library


def _why_not_ours(path: Path) -> str | None:
    """Return why others may write to `path`; None where only this user may."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _cache_folder(wanted: Path) -> Path:
    """Return the cache folder, or else one of our own under the temporary folder.

    Raises:
        BuildError: others own or may write to the latter too.
    """
    wanted = wanted.resolve()
    if (reason := _why_unusable(wanted)) is None:
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
    """Create a cache folder; return the reason where it cannot be used."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _why_not_ours(folder)
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"


@contextlib.contextmanager
def _lock(path: Path, rank: int) -> Iterator[None]:
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for {path.read_text() or 'another process'} to compile the extension")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"rank {rank} (process {os.getpid()} on {os.uname().nodename})")
        file.flush()
        yield


def _compile(env: Env, folder: Path, with_cuda: bool) -> None:
    what = "C++ and CUDA" if with_cuda else "C++ only, without CUDA"
    _say(f"compiling the extension ({what}), once for this environment: some minutes")
    start, log = time.monotonic(), folder.with_name(folder.name + ".log")
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + ".building."))
    command = [sys.executable, _RECIPE, "--out", str(work), "--cuda", env.cuda]
    command += ["--archs", ";".join(env.cuda_archs), "--sanitize", env.sanitize]
    command += ["--strict"] if env.strict else []
    try:
        _run_logged(command, log, env.verbose)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"compiled in {time.monotonic() - start:.0f} s, cached in {folder}")


def _run_logged(command: list[str], log: Path, echo: bool) -> None:
    """Run the build, whose files only this user may write, and print progress."""
    start = time.monotonic()
    with log.open("w") as file:
        output = None if echo else file
        process = subprocess.Popen(command, stdout=output, stderr=output, umask=0o077)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REPORT_SECONDS)
                    break
                _say(f"compiling, {time.monotonic() - start:.0f} s so far")
        finally:
            process.kill()
    if process.wait() != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise BuildError(
            f"compiling the extension failed; the whole log is {log}. It ends:\n{tail}"
        )


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
