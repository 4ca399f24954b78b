"""Breaks the engine in the ways of `planted_faults.py`, one at a time, and runs the test of each.

A fault is planted in a copy of this checkout. If it is in C++, the extension is compiled anew;
ccache saves most of that. A test that still passes does not show what it is there for::

    python -m tests.fuzz.planted                  # all of them: about an hour
    python -m tests.fuzz.planted --only int4      # those with "int4" in their names, or files
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.planted_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
_BUILD_SECONDS = 1800.0
_SECONDS = 240.0  # that a test may take; one that hangs is ended, and has found nothing
_RECIPE = "fastsync/_build/recipe.py"
_QUICK = ('KERNEL_CXX_FLAGS = ("-O3"', 'KERNEL_CXX_FLAGS = ("-O1"')  # compiles in half the time
_PASSED, _FAILED, _NOTHING_RUN = 0, 1, 5  # exit codes of pytest


def main(arguments: list[str] | None = None) -> int:
    """Plant the faults that were asked for; return how the program ends."""
    asked = _parse(arguments)
    wanted = asked.only or [""]
    faults = [f for f in FAULTS if any(text in f.name or text in f.file for text in wanted)]
    if not faults:
        print(f"no fault is called, or changes a file, like that: {wanted}", file=sys.stderr)
        return 1
    if asked.list:
        for fault in faults:
            print(f"{fault.name:<36} {fault.file:<40} {fault.test}")
        return 0
    unfit = [f"{fault.name}: {problem}" for fault in faults if (problem := problem_of(fault))]
    if unfit:
        print("\n".join(unfit), file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # in a shell's background the first is ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with _copy_of_checkout() as copy:
            return _plant_all(faults, copy)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def problem_of(fault: Fault, root: Path = ROOT) -> str:
    """Return why a fault cannot be planted; empty if it can."""
    file = root / fault.file
    count = file.read_text().count(fault.text) if file.exists() else 0
    return "" if count == 1 else f"its text is {count} times in {fault.file}, and not once"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.planted",
        description="Break the engine in known ways, and see that a test finds each.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="faults with TEXT in their names or files; repeats",
    )
    parser.add_argument("--list", action="store_true", help="name the faults, and plant none")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _copy_of_checkout():
    """Copy what git tracks, or would, to a folder that is removed at the end."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
    )
    with tempfile.TemporaryDirectory(prefix="fastsync-planted-") as folder:
        copy = Path(folder, "checkout")
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        yield copy


def _plant_all(faults: list[Fault], copy: Path) -> int:
    tests = sorted({fault.test for fault in faults})
    print(f"{len(tests)} tests without a fault ... ", end="", flush=True)
    code, seconds, output = _run(copy, tests, _SECONDS * len(tests))
    print(f"{'passed' if code == _PASSED else 'FAILED'}, {seconds:.0f} s", flush=True)
    if code != _PASSED:
        print(output)
        return 1
    missed = []
    for number, fault in enumerate(faults, start=1):
        print(f"{number:>3}/{len(faults)} {fault.name:<36} ", end="", flush=True)
        verdict, seconds = _plant(fault, copy)
        print(f"{verdict}, {seconds:.0f} s, {fault.test}", flush=True)
        if verdict != "caught":
            missed.append(fault.name)
    print(f"{len(faults) - len(missed)} of {len(faults)} caught")
    if missed:
        print(f"NOT CAUGHT: {', '.join(missed)}")
    return 1 if missed else 0


def _plant(fault: Fault, copy: Path) -> tuple[str, float]:
    """Return what a fault's test says of it, and the seconds that the test took."""
    changes = {fault.file: (fault.text, fault.instead)}
    if fault.file.startswith("csrc/"):
        changes[_RECIPE] = _QUICK
    before = {name: (copy / name).read_text() for name in changes}
    for name, change in changes.items():
        (copy / name).write_text(before[name].replace(*change))
    try:
        if (error := _build(copy)) is not None:
            return f"NOT CAUGHT: it does not compile: {error}", 0.0
        code, seconds, output = _run(copy, [fault.test], _SECONDS)
    finally:
        for name, text in before.items():
            (copy / name).write_text(text)
    if code == _FAILED:
        return "caught", seconds
    reasons = {None: "the test hangs", _PASSED: "it passes", _NOTHING_RUN: "no such quick test"}
    return f"NOT CAUGHT: {reasons.get(code, output[-1000:])}", seconds


def _environment(copy: Path) -> dict[str, str]:
    """Let processes use the copy. What its C++ is compiled to, if that is changed, goes with it."""
    ours = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    if _QUICK[1] in (copy / _RECIPE).read_text():
        cache = copy.parent / "cache"
        ours |= {"FASTSYNC_CACHE_DIR": str(cache), "CCACHE_BASEDIR": str(copy)}
    return {**os.environ, **ours}


def _build(copy: Path) -> str | None:
    """Compile the copy's extension, unless it has been; return the end of an error."""
    code = "from fastsync._build import extension; extension.load()"
    ended, _, output = _call([sys.executable, "-c", code], copy, _BUILD_SECONDS)
    return None if ended == 0 else output[-1000:]


def _run(copy: Path, tests: list[str], limit: float) -> tuple[int | None, float, str]:
    """Run tests in the copy, as `_call` does."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    return _call(command, copy, limit)


def _call(command: list[str], copy: Path, limit: float) -> tuple[int | None, float, str]:
    """Run a command in the copy; return its exit code (None: too late), seconds, and its output.

    What it has started ends with it.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=_environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code, output = None, ""
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, time.monotonic() - start, output


if __name__ == "__main__":
    sys.exit(main())
