"""Ctrl-C and SIGTERM under torchrun: every rank ends with one line, wherever it is.

And what that line says of an exception.
"""

import json
import re
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch

import fastsync
from fastsync.faults.exit_reasons import in_words
from tests.faults.launched import launched

RANKS = 3
LINES = {
    signal.SIGINT: "fastsync: KeyboardInterrupt (signal_script.py:",
    signal.SIGTERM: "ends: SIGTERM",
}
PLACES = {"forward": 0, "backward": 1, "vote": 1, "meeting": 0}  # with what zero=


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", LINES, ids=lambda number: number.name)
def test_a_signal_ends_all_ranks_with_a_line_each(number, place, tmp_path):
    """One rank is in that place, and the others wait for it."""
    with launched(tmp_path, RANKS, "tests.faults.signal_script", place, PLACES[place]) as job:
        job.wait_for_files(*(f"comes {rank}" for rank in job.ranks))
        time.sleep(0.5)  # so that the others are in the wait itself
        job.launcher.send_signal(number)
        text = job.end()
    assert text.count(LINES[number]) == RANKS, text
    assert len(re.findall(r"^fastsync: ", text, re.MULTILINE)) == RANKS, text
    assert "terminate called" not in text and "Fatal" not in text, text
    assert "SyncFault" not in text, "they end by the signal, not by each other"


@pytest.mark.slow
def test_the_cause_is_what_torchrun_and_every_rank_say(tmp_path):
    options = ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    with launched(
        tmp_path, RANKS, "tests.faults.signal_script", "raises", 0, options=options
    ) as job:
        text = job.end()
    cause = text.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in cause, text
    for rank in job.ranks:
        (file,) = (tmp_path / "logs").glob(f"**/{rank}/stderr.log")
        lines = file.read_text()
        said = "ValueError: bad batch" if rank == 1 else "rank 1 raised ValueError: bad batch ("
        assert said in lines, lines


def told(path):
    """Return what is said of an exception that code in this file raises."""
    try:
        exec(compile("raise ValueError('bad batch\\nof 8')", path, "exec"), {})
    except ValueError as error:
        return in_words(error)


# Python's own modules that come with the interpreter have no file.
@pytest.mark.parametrize(
    "path",
    ["<frozen os>", torch.__file__, fastsync.__file__, json.__file__, numpy.__file__],
    ids=["frozen", "torch", "fastsync", "json", "numpy"],
)
def test_an_exception_is_where_the_script_met_it(path):
    assert re.fullmatch(r"ValueError: bad batch \(test_signals\.py:\d+ in told\)", told(path))


def test_an_exception_is_in_the_last_of_the_scripts_frames():
    assert told("data/train.py") == "ValueError: bad batch (train.py:1 in <module>)"


def test_an_exception_is_where_the_script_called_a_library():
    """Through frames that Python and numpy make themselves."""
    for calls in (lambda: json.loads("{bad"), lambda: numpy.stack([])):
        try:
            calls()
        except ValueError as error:
            assert re.search(r" \(test_signals\.py:\d+ in <lambda>\)$", in_words(error))


def test_an_exception_of_an_installed_script_is_in_the_last_of_its_frames():
    """Not in torch, which it calls."""
    path = Path(numpy.__file__).with_name("train.py")
    try:
        exec(compile("import torch\ntorch.empty(2, 3).view(7)", path, "exec"), {})
    except RuntimeError as error:
        trace = error.__traceback__.tb_next  # without this file
        assert in_words(error.with_traceback(trace)).endswith(" (train.py:2 in <module>)")


def test_long_texts_of_exceptions_are_cut():
    text = in_words(ValueError("x" * 1000))
    assert text.startswith("ValueError: xxx") and text.endswith("x...") and len(text) == 503
    assert in_words(KeyboardInterrupt()) == "KeyboardInterrupt"
