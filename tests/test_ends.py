"""Ctrl-C and SIGTERM under torchrun: every rank ends with one line, wherever it is."""

import signal
import subprocess
import sys
import time

import pytest

from tests.scripts import ROOT, environment

RANKS = 2
LINES = {
    signal.SIGINT: "fastsync: KeyboardInterrupt (ending_script.py:",
    signal.SIGTERM: "ends: SIGTERM",
}


@pytest.mark.parametrize("number", LINES, ids=lambda number: number.name)
def test_a_signal_ends_all_ranks_with_a_line_each(number, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", "tests.ending_script"]
    output = tmp_path / "output"
    with output.open("w") as file:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 120
        while output.read_text().count("waiting") < RANKS and time.monotonic() < deadline:
            assert launcher.poll() is None, output.read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # so that rank 0 is in the wait itself
        launcher.send_signal(number)
        # torchrun kills ranks that have not ended after 30 seconds.
        launcher.wait(timeout=100)
    finally:
        launcher.kill()
    text = output.read_text()
    assert text.count(LINES[number]) == RANKS, text
    assert "terminate called" not in text
    assert "SyncFault" not in text, "they end by the signal, not by each other"
