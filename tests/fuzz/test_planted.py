"""The table of planted faults; `python -m tests.fuzz.planted` plants them."""

import subprocess
import sys

from tests.fuzz.planted import ROOT, problem_of
from tests.fuzz.planted_faults import FAULTS


def collected(tests):
    """Return those of the tests that `make test` runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines())


def test_every_fault_can_be_planted_and_has_a_name():
    assert [f"{f.name}: {problem_of(f)}" for f in FAULTS if problem_of(f)] == []
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60


def test_make_test_runs_the_test_of_every_fault(request):
    wanted = {fault.test for fault in FAULTS}
    here = {item.nodeid for item in request.session.items}  # of all files, unless one was named
    missing = sorted(wanted - here)
    assert not missing or set(missing) <= collected(missing), missing
