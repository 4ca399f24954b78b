"""`python -m fastsync.elastic` on several machines: here each launcher stands for one."""

import os
import re
import signal
import socket

import pytest

from tests.elastic.test_elastic_launcher import SCRIPT, ask, check_all, says
from tests.helpers.scripts import finish, finish_all, run_module, start

TWO = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--nproc-per-node", 2)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(port, node, *arguments):
    """The launcher of a machine with two of four ranks."""
    place = (*TWO, "--master-port", port, "--node-rank", node)
    return start("fastsync.elastic", *place, *arguments)


def trains(launcher):
    """The processes of its two ranks, once each has made a step."""
    pids = []
    while len(pids) < 2:
        line = launcher.stdout.readline()
        assert line, "the launcher has ended"
        if found := re.search(r"trains (\d+)", line):
            pids.append(int(found.group(1)))
    return pids


@pytest.mark.slow
def test_a_rank_that_dies_comes_back_on_its_machine(port):
    arguments = ("--restarts", 1, *SCRIPT, 100000, 3, "joined")
    here, there = finish_all([launch(port, node, *arguments) for node in (0, 1)])
    assert "rank 3 was ended by SIGKILL; 3 ranks are running; it is started again" in there
    assert "rank 3 is back. Ranks [0, 1, 2, 3] go on with step" in here
    assert "fastsync.elastic" not in here
    check_all(here + there, range(4))


@pytest.mark.slow
def test_a_machine_that_is_lost_comes_back(port):
    arguments = (*SCRIPT, 100000, -1, "joined")
    here, there = (launch(port, node, *arguments) for node in (0, 1))
    _, theirs = (trains(launcher) for launcher in (here, there))
    for process in (there.pid, *theirs):
        os.kill(process, signal.SIGKILL)
    there.wait()
    outputs = finish_all([here, launch(port, 1, *arguments)])
    assert "Ranks [0, 1] go on with step" in outputs[0]
    check_all("".join(outputs), range(4))


@pytest.mark.slow
def test_without_the_first_machine_the_others_say_why_they_end(port):
    here, there = (launch(port, node, *SCRIPT, 100000, -1) for node in (0, 1))
    ours, _ = (trains(launcher) for launcher in (here, there))
    for process in (here.pid, *ours):
        os.kill(process, signal.SIGKILL)
    here.wait()
    output = finish(there, code=1)
    assert "machine 0, whose launcher serves the store, cannot be reached" in output
    assert "cannot meet the survivors: the rendezvous store has gone with them" in output


@pytest.mark.slow
def test_ranks_join_on_any_machine(port):
    arguments = ("--max-ranks", 6, *SCRIPT, 100000, -1, "two")
    launchers = [launch(port, node, *arguments) for node in (0, 1)]
    for launcher in launchers:
        assert says(launcher).startswith("send SIGUSR1")
    for launcher in launchers:
        trains(launcher)
    assert ask(launchers[1]) == "rank 4 joins; 5 are running"
    check_all("".join(finish_all(launchers)), range(5))


@pytest.mark.slow
def test_too_few_ranks_on_all_machines_are_a_failure(port):
    arguments = ("--min-ranks", 4, *SCRIPT, 100000, 3)
    launchers = [launch(port, node, *arguments) for node in (0, 1)]
    outputs = [finish(launcher, code=1) for launcher in launchers]
    assert "rank 3 was ended by SIGKILL" in outputs[1]


@pytest.mark.slow
def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        output = run_module("fastsync.elastic", *TWO, "--master-port", taken, *SCRIPT, 1, 1, code=2)
    assert f"--master-port {taken}: " in output


@pytest.mark.slow
def test_machines_with_other_numbers_of_ranks_are_refused(port):
    here = launch(port, 0, *SCRIPT, 1, -1)
    options = (*TWO[:-1], 3, "--master-port", port, "--node-rank", 1)
    output = run_module("fastsync.elastic", *options, *SCRIPT, 1, -1, code=2)
    here.terminate()
    finish(here, code=128 + signal.SIGTERM)
    assert "was started with --nnodes 2 --nproc-per-node 2" in output
