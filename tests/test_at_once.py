"""Processes that share a run's files: each test runs once, at the same time, and failures count."""

import time
from pathlib import Path

import pytest

from tests.scripts import ROOT

pytest_plugins = ["pytester"]

# Each file waits for the other, so that neither can be run before or behind it.
MEETS = """
import os, time
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def whole():
    yield
    with open("ended.txt", "a") as file:
        file.write("{name}\\n")

@pytest.mark.parametrize("case", [0, 1])
def test_meets(whole, case):
    with open("ran.txt", "a") as file:
        file.write(f"{name}{{case}} {{os.getpid()}}\\n")
    deadline = time.monotonic() + 60
    while "{other}" not in Path("ran.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    {last}
"""


@pytest.fixture
def folder(pytester, monkeypatch):
    pytester.makeini("[pytest]\naddopts = -q\nmarkers = slow: x\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_PLUGINS", "tests.conftest")
    return pytester


def run(folder, last="pass"):
    folder.makepyfile(
        test_one=MEETS.format(name="one", other="two", last=last),
        test_two=MEETS.format(name="two", other="one", last=last),
    )
    return folder.runpytest_subprocess("--at-once", "2", "--seconds-to", "seconds.json")


def test_each_file_is_run_once_and_beside_the_other(folder):
    done = run(folder)
    assert done.ret == 0, done.stdout.str()
    ran = [line.split() for line in (folder.path / "ran.txt").read_text().splitlines()]
    assert sorted(name for name, _ in ran) == ["one0", "one1", "two0", "two1"]
    assert len({pid for _, pid in ran}) == 2
    assert sorted((folder.path / "ended.txt").read_text().split()) == ["one", "two"]
    assert done.stdout.str().count("2 passed") == 2
    noted = [(folder.path / name).read_text() for name in ("seconds.json", "seconds.json.1")]
    assert all(text.count("test_meets") == 2 for text in noted)


OPTIONS = """
from tests.at_once import add_options, register

def pytest_addoption(parser):
    add_options(parser)
    parser.addoption("--seconds-to")

def pytest_configure(config):
    register(config)
"""


def test_the_others_find_the_options_where_no_path_is_given(folder, monkeypatch):
    monkeypatch.delenv("PYTEST_PLUGINS")
    folder.makeini("[pytest]\naddopts = -q\ntestpaths = test_files\n")
    (folder.mkdir("test_files") / "conftest.py").write_text(OPTIONS)
    for name in ("one", "two"):
        (folder.path / "test_files" / f"test_{name}.py").write_text("def test_it(): pass\n")
    done = folder.runpytest_subprocess("--at-once", "2")
    assert done.ret in (0, 5), done.stdout.str()
    assert done.stdout.str().count("1 passed") + 2 * done.stdout.str().count("2 passed") == 2


def test_the_next_file_of_a_folder_may_be_taken_by_another_process(folder):
    """Its folder is then left before a file of another folder is begun."""
    for place in ("inner/test_one.py", "inner/test_two.py", "other/test_three.py"):
        path = folder.path / place
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text("def test_it(): pass\n")
    taken = folder.mkdir("taken")
    (taken / str(folder.path / "inner/test_two.py").replace("/", "-")).touch()
    done = folder.runpytest_subprocess(f"--share-of={taken}", "inner", "other")
    assert done.ret == 0, done.stdout.str()
    assert "2 passed" in done.stdout.str()


@pytest.mark.parametrize("file", ["one", "two"])
def test_a_failure_in_either_process_fails_the_run(folder, file):
    last = f'assert "test_{file}" not in __file__, "as planned"'
    done = run(folder, last)
    assert done.ret == 1
    assert "as planned" in done.stdout.str()


def test_a_process_that_crashes_fails_the_run(folder):
    """Whichever it is: its file is not run by the other, which could not know of it."""
    last = 'os._exit(7) if "test_two" in __file__ else None'
    assert run(folder, last).ret == 7


def test_a_run_that_is_killed_leaves_no_process(folder):
    """The second process kills the first, and would stay."""
    others = 'Path("ran.txt").read_text().split()'
    run(folder, f"str(os.getppid()) in {others} and os.kill(os.getppid(), 9); time.sleep(100)")
    pids = {line.split()[1] for line in (folder.path / "ran.txt").read_text().splitlines()}
    deadline = time.monotonic() + 30
    while any(Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_process_runs_all_unless_asked(folder):
    folder.makepyfile(test_pid="import os\ndef test_pid(): print(os.getpid())\n")
    done = folder.runpytest_subprocess()
    assert done.ret == 0 and "process 1" not in done.stdout.str()
