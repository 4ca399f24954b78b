"""The choice of slow tests keeps every feature covered and leaves out what costs most."""

import json
import sys

import pytest

from tests import slow

pytest_plugins = ["pytester"]

SECONDS = {
    "tests/a.py::one[x]": 9.0,
    "tests/a.py::one[y]": 1.0,
    "tests/a.py::two": 5.0,
    "tests/b.py::only": 20.0,
}


def test_nothing_is_left_out_where_all_fit():
    assert slow.choose(SECONDS, 35.0) == set()


def test_the_dearest_case_of_a_function_goes_first():
    assert slow.choose(SECONDS, 30.0) == {"tests/a.py::one[x]"}


def test_then_whole_functions_go():
    assert slow.choose(SECONDS, 22.0) == {"tests/a.py::one[x]", "tests/a.py::two"}


def test_a_file_keeps_its_cheapest_test():
    left_out = slow.choose(SECONDS, 0.0)
    assert set(SECONDS) - left_out == {"tests/a.py::one[y]", "tests/b.py::only"}


def test_what_is_cheap_is_never_left_out():
    cheap = {f"tests/a.py::lines[{n}]": 0.9 * slow.CHEAP for n in range(1000)}
    assert slow.choose(SECONDS | cheap, 0.0).isdisjoint(cheap)


def test_the_list_is_written_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(slow, "LIST", tmp_path / "slow.txt")
    slow.write({"b", "a[1]"})
    assert slow.read() == {"a[1]", "b"}
    assert (tmp_path / "slow.txt").read_text() == f"{slow.HEADER}a[1]\nb\n"


def test_listed_tests_exist():
    """A test that was renamed must not linger in the list."""
    root = slow.LIST.parent
    for name in slow.read():
        function = slow.function_of(name).partition("::")[2].split("::")[-1]
        assert f"def {function}(" in (root.parent / slow.file_of(name)).read_text(), name


TIMED = """
import time, pytest

@pytest.fixture(scope="module")
def costly():
    time.sleep(0.6)

@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_waits(wait):
    time.sleep(wait)

@pytest.mark.parametrize("case", [0, 1, 2])
def test_shares(costly, case):
    pass

@pytest.mark.slow
def test_marked():
    time.sleep(0.4)
"""


@pytest.fixture
def timed(pytester, monkeypatch):
    """A folder with tests of known times, and a list that names none of them."""
    pytester.makeini("[pytest]\nmarkers = slow: x\n")
    pytester.makepyfile(test_timed=TIMED)
    monkeypatch.setattr(slow, "LIST", pytester.path / "slow.txt")
    slow.write(())
    return pytester


def noted(pytester, *arguments):
    path = pytester.path / "out" / "seconds.json"
    pytester.inline_run("-p", "tests.conftest", *arguments, "--seconds-to", path)
    return path, json.loads(path.read_text())


def test_a_run_notes_what_tests_take(timed):
    _, seconds = noted(timed)
    assert set(seconds) == {
        *(f"test_timed.py::test_waits[{wait}]" for wait in (0.0, 0.3)),
        *(f"test_timed.py::test_shares[{case}]" for case in range(3)),
    }
    assert seconds["test_timed.py::test_waits[0.3]"] >= 0.3


def test_what_a_fixture_takes_is_shared_by_its_users(timed):
    _, seconds = noted(timed)
    shares = [seconds[f"test_timed.py::test_shares[{case}]"] for case in range(3)]
    assert all(share >= 0.2 for share in shares), "which nobody bears alone"


def test_the_list_is_chosen_from_several_runs_and_the_next_obeys_it(timed, monkeypatch, capsys):
    path, _ = noted(timed, "-k", "waits")
    others = path.with_name("others.json")
    others.write_text(json.dumps({"test_other.py::test_cheap": 0.001}))
    monkeypatch.setattr(sys, "argv", ["slow", "0.2", str(path), str(others)])
    slow.main()
    assert slow.read() == {"test_timed.py::test_waits[0.3]"}
    assert "1 of 3 tests" in capsys.readouterr().out
    timed.inline_run("-p", "tests.conftest", "-m", "not slow").assertoutcome(passed=4)
