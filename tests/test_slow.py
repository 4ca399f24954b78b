"""The choice of slow tests keeps every feature covered and leaves out what costs most."""

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


def test_a_run_writes_the_list_and_the_next_obeys_it(pytester, monkeypatch):
    pytester.makeini("[pytest]\nmarkers = slow: x\n")
    pytester.makepyfile(
        "import time, pytest\n"
        "@pytest.mark.parametrize('wait', [0.0, 0.3])\n"
        "def test_waits(wait): time.sleep(wait)\n"
    )
    monkeypatch.setattr(slow, "LIST", pytester.path / "slow.txt")
    slow.write(())
    plugins = ["-p", "tests.conftest"]
    pytester.inline_run(*plugins, "--choose-slow", "0.2")
    (left_out,) = slow.read()
    assert left_out.endswith("::test_waits[0.3]")
    pytester.inline_run(*plugins, "-m", "not slow").assertoutcome(passed=1)
