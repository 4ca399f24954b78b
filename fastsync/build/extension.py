"""Loads the compiled extension: prebuilt if it fits this torch, else built once and cached.

[Note: one build for many ranks]
torchrun starts all ranks of a node at once. They meet at a file lock: the first builds into a
temporary folder and renames it into place; the others wait and find it there. The lock is the
kernel's, so a rank that dies releases it, and a half-finished build is never seen by anyone.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from fastsync.build import recipe
from fastsync.build.env import Env
from fastsync.build.recipe import BuildError

__all__ = ["BuildError", "load"]

_PACKAGE = Path(__file__).resolve().parents[1]
_TAIL_LINES = 30


@cache
def load() -> ModuleType:
    """The extension module ``fastsync._C``. The first call may compile it (about a minute).

    Raises:
        BuildError: it has to be compiled and cannot be; the text carries the remedy.
    """
    return _import(_prebuilt() or _built(Env.read()))


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
    digest = recipe.fingerprint(toolkit, env.cuda_archs, env.sanitize)
    version = torch.__version__.split("+")[0]
    folder = _writable(env.cache_dir) / f"torch{version}-{digest}"
    library = folder / f"{recipe.MODULE}.so"
    if not library.exists():
        with _lock(_beside(folder, ".lock")):
            if not library.exists():
                _compile(env, folder)
    return library


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        fallback = Path(tempfile.gettempdir()) / f"fastsync-{os.getuid()}"
        fallback.mkdir(mode=0o700, exist_ok=True)
        return fallback


def _beside(folder: Path, ending: str) -> Path:
    """A file that goes with `folder`, whose name has dots of its own."""
    return folder.with_name(folder.name + ending)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(env: Env, folder: Path) -> None:
    say = _Reporter(env.rank)
    what = "C++ and CUDA" if recipe.find_toolkit(env.cuda) else "C++ only, no CUDA toolkit found"
    say(f"building the extension ({what}); once per environment, about a minute ...")
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + ".building."))
    log = _beside(folder, ".log")
    command = [sys.executable, recipe.__file__, "--out", str(work), "--cuda", env.cuda]
    command += ["--archs", ";".join(env.cuda_archs), "--sanitize", env.sanitize]
    try:
        _run_logged(command, log, env.verbose and env.rank == 0)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"built in {time.monotonic() - start:.0f} s, cached in {folder}")


def _run_logged(command: list[str], log: Path, echo: bool) -> None:
    with log.open("w") as file:
        code = subprocess.run(
            command, stdout=None if echo else file, stderr=None if echo else subprocess.STDOUT
        ).returncode
    if code == 0:
        return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    raise BuildError(f"compiling the extension failed; the whole log is {log}. It ends:\n{tail}")


class _Reporter:
    """Prints progress on rank 0 only."""

    def __init__(self, rank: int) -> None:
        self._silent = rank != 0

    def __call__(self, text: str) -> None:
        if not self._silent:
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
