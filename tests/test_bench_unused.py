"""bench.unused: its arithmetic, and the collectives that it counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.commands.unused import cost

ROOT = Path(__file__).parent.parent


def test_the_cost_is_what_synchronisation_exposes_more():
    floor = {"no_sync, all used": [10.0, 20.0], "no_sync, some unused": [8.0, 16.0]}

    def of(every, some):
        return cost(floor | {"x, all used": every, "x, some unused": some}, "x").median

    assert of([14.0, 24.0], [12.0, 20.0]) == 0.0, "the compute that is saved is no gain"
    assert of([14.0, 28.0], [13.4, 25.4]) == pytest.approx(0.5 * (1.4 / 14 + 1.4 / 28))


def test_unused_parameters_add_no_collective(tmp_path):
    result = tmp_path / "unused.json"
    command = [sys.executable, "-m", "bench", "unused", "--depth", "4", "--width", "16"]
    command += ["--rounds", "1", "--steps", "1", "--warmup", "3", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[-1] for row in json.loads(result.read_text())["rows"]}
    assert rows["no_sync"] == "0 and 0"
    assert rows["fastsync"] == "1 and 1"
    assert rows["ddp, find_unused_parameters=True"] == "2 and 2"
