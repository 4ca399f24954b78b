"""examples/ copied out of the repository: it runs with an installed fastsync, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = {
    "custom_codec": (),
    "demo": ("--help",),
    "limited_memory": ("--help",),
    "manual_parallel": ("--help",),
    "mpi": ("--help",),
    "ring_allreduce": ("--ranks", "2", "--numel", "10"),
    "training": ("--help",),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with examples/ in it, and one that stands for site-packages: fastsync alone."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copytree(ROOT / "examples", folder / "here" / "examples")
    (folder / "site").mkdir()
    (folder / "site" / "fastsync").symlink_to(ROOT / "fastsync")
    return folder


@pytest.mark.parametrize("name", TINY)
def test_a_copied_example_runs(alone, name):
    command = [sys.executable, "-m", f"examples.{name}", *TINY[name]]
    variables = os.environ | {"PYTHONPATH": str(alone / "site"), "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        command, cwd=alone / "here", env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_every_example_is_tried():
    started = {p.stem for p in ROOT.glob("examples/*.py") if "__main__" in p.read_text()}
    assert started == set(TINY)
