"""`python -m fastsync.elastic`, run as a user would."""

import os
import re
import signal
import socket
import time

import pytest

from fastsync import elastic
from tests.helpers.scripts import finish, finish_all, run_module, start

LAUNCH = ("--nproc-per-node", 3)
SCRIPT = ("-m", "tests.elastic.elastic_launched")


@pytest.mark.slow
def test_survivors_end_well_when_rank_0_dies():
    """It serves the store that the others meet through."""
    output = run_module("fastsync.elastic", *LAUNCH, *SCRIPT, 6, 0)
    assert "rank 0 was ended by SIGKILL; 2 ranks are running" in output
    assert "rank 0 was killed by SIGKILL. Ranks [1, 2] go on with step 3" in output
    sums = re.findall(r"rank \d of \(1, 2\): (\S+)", output)
    assert len(sums) == 2 and len(set(sums)) == 1, output


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "+diloco:4"])
def test_a_rank_that_dies_is_started_again_and_catches_up(mode):
    output = run_module("fastsync.elastic", *LAUNCH, "--restarts", 1, *SCRIPT, 100000, 0, mode)
    assert "rank 0 was ended by SIGKILL; 2 ranks are running; it is started again" in output
    assert "rank 0 is back. Ranks [0, 1, 2] go on with step" in output
    sums = re.findall(r"rank \d of \(0, 1, 2\): (\S+)", output)
    assert len(sums) == 3 and len(set(sums)) == 1, output
    assert places(output) == [("0", "3"), ("1", "3"), ("2", "3")], output


def places(output):
    """RANK and WORLD_SIZE of each process that has come to its end."""
    return sorted(re.findall(r"RANK (\d) of WORLD_SIZE (\d)", output))


@pytest.mark.slow
def test_who_is_back_may_be_the_last_to_train():
    output = run_module("fastsync.elastic", *LAUNCH, "--restarts", 1, *SCRIPT, 100000, 0, "last")
    assert "no rank is left that has trained" not in output
    assert re.search(r"rank 0 of \(0,\): ", output), output


@pytest.mark.slow
def test_who_is_back_too_late_ends_and_the_training_has_succeeded():
    output = run_module("fastsync.elastic", *LAUNCH, "--restarts", 1, *SCRIPT, 6, 1)
    assert "the training has ended before it had taken rank 1 in" in output
    assert len(re.findall(r"rank \d of \(0, 2\)", output)) == 2, output


@pytest.mark.slow
def test_without_a_death_all_end_well():
    output = run_module("fastsync.elastic", *LAUNCH, *SCRIPT, 3, -1)
    assert len(set(re.findall(r"rank \d of \(0, 1, 2\): (\S+)", output))) == 1, output
    assert "fastsync.elastic" not in output


@pytest.mark.slow
def test_too_few_ranks_are_a_failure():
    output = run_module("fastsync.elastic", *LAUNCH, "--min-ranks", 3, *SCRIPT, 1000, 1, code=1)
    assert "rank 1 was ended by SIGKILL" in output


HOSTS = ("--nnodes", 2, "--master-addr", "127.0.0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--min-ranks", 4), "--min-ranks must be from 1 to --nproc-per-node, 3, but is 4"),
        (("--restarts", -1), "--restarts must not be negative, but is -1"),
        (("--max-ranks", 2), "--max-ranks must be at least --nproc-per-node, 3, but is 2"),
        (("--nnodes", 2), "--master-addr"),
        ((*HOSTS, "--node-rank", 2), "--node-rank must be from 0 to 1"),
        (("--nnodes", 0), "--nnodes"),
        (
            (*HOSTS, "--min-ranks", 7),
            "--min-ranks must be from 1 to --nnodes x --nproc-per-node, 6",
        ),
    ],
)
def test_options_that_make_no_sense_are_named(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        elastic.main([*map(str, (*LAUNCH, *options, *SCRIPT, 1, 1))])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_all_ranks():
    launcher = start("fastsync.elastic", *LAUNCH, *SCRIPT, 100000, -1)
    pids = trains(launcher)
    launcher.send_signal(signal.SIGTERM)
    finish(launcher, code=128 + signal.SIGTERM, timeout=30)
    assert not left_of(pids)


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher():
    launcher = start("fastsync.elastic", *LAUNCH, *SCRIPT, 100000, -1)
    pids = trains(launcher)
    launcher.kill()
    finish(launcher, code=-signal.SIGKILL, timeout=30)
    assert not left_of(pids)


def left_of(pids):
    """Return the processes that do not end soon."""
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if is_running(pid)]


def trains(launcher, ranks=3):
    """Return the processes of so many ranks of a launcher, once each has made a step."""
    pids = []
    while len(pids) < ranks:
        line = launcher.stdout.readline()
        assert line, "the launcher has ended"
        if found := re.search(r"trains (\d+)", line):
            pids.append(int(found.group(1)))
    return pids


def joinable(most, *arguments):
    """A launcher that takes in ranks, once it has started those of the start."""
    launcher = start("fastsync.elastic", *LAUNCH, "--max-ranks", most, *arguments)
    assert says(launcher) == f"send SIGUSR1 to process {launcher.pid} for each rank that is to join"
    return launcher


def says(launcher):
    """Return what the launcher itself says next."""
    lines = iter(launcher.stdout.readline, "")
    return next(line for line in lines if "fastsync.elastic: " in line).split(": ", 1)[1].strip()


def ask(launcher):
    launcher.send_signal(signal.SIGUSR1)
    return says(launcher)


def check_all(output, ranks):
    """All end with the same."""
    sums = re.findall(rf"rank \d of {re.escape(str(tuple(ranks)))}: (\S+)", output)
    assert len(sums) == len(ranks) and len(set(sums)) == 1, output


@pytest.mark.slow
def test_a_signal_has_a_rank_join_a_training_that_goes_on():
    launcher = joinable(4, *SCRIPT, 100000, -1, "joined")
    trains(launcher)
    assert ask(launcher) == "rank 3 joins; 4 are running"
    output = finish(launcher)
    assert "rank 3 has joined. Ranks [0, 1, 2, 3] go on with step" in output
    check_all(output, range(4))
    assert places(output) == [("0", "3"), ("1", "3"), ("2", "3"), ("3", "4")], output


@pytest.mark.slow
def test_a_rank_that_joins_does_not_take_the_place_of_one_that_still_begins(tmp_path):
    """Rank 3 makes its process group while rank 0 waits for ranks 1 and 2 in that of the start."""
    launcher = joinable(4, *SCRIPT, 100000, -1, "early", tmp_path)
    assert ask(launcher) == "rank 3 joins; 4 are running"
    assert ask(launcher) == "no rank joins: 4 of 4 are running"
    check_all(finish(launcher), range(4))


@pytest.mark.slow
def test_two_ranks_join_at_once():
    launcher = joinable(5, *SCRIPT, 100000, -1, "two")
    assert [ask(launcher), ask(launcher)] == [
        f"rank {r} joins; {r + 1} are running" for r in (3, 4)
    ]
    check_all(finish(launcher), range(5))


@pytest.mark.slow
def test_a_rank_that_joins_and_dies_is_started_again():
    launcher = joinable(4, "--restarts", 1, *SCRIPT, 100000, -1, "dies")
    assert ask(launcher) == "rank 3 joins; 4 are running"
    output = finish(launcher)
    assert "rank 3 was ended by SIGKILL; 3 ranks are running; it is started again" in output
    assert len(re.findall("rank 3 has joined. Ranks \\[0, 1, 2, 3\\] go on", output)) == 2, output
    check_all(output, range(4))


@pytest.mark.slow
def test_a_rank_joins_while_one_comes_back():
    launcher = joinable(4, "--restarts", 1, *SCRIPT, 100000, 1, "joined")
    assert ask(launcher) == "rank 3 joins; 4 are running"
    output = finish(launcher)
    assert "rank 1 was ended by SIGKILL" in output
    check_all(output, range(4))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- `python -m fastsync.elastic` on several machines: here each launcher stands for one


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


@pytest.mark.slow
def test_a_rank_that_dies_comes_back_on_its_machine(port):
    arguments = ("--restarts", 1, *SCRIPT, 100000, 3, "joined")
    here, there = finish_all([launch(port, node, *arguments) for node in (0, 1)])
    assert "rank 3 was ended by SIGKILL; 3 ranks are running; it is started again" in there
    assert "rank 3 is back. Ranks [0, 1, 2, 3] go on with step" in here
    assert "fastsync.elastic" not in here
    check_all(here + there, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "+diloco:4"])
def test_a_machine_that_is_lost_comes_back(port, mode):
    arguments = (*SCRIPT, 100000, -1, f"joined{mode}")
    here, there = (launch(port, node, *arguments) for node in (0, 1))
    _, theirs = (trains(launcher, ranks=2) for launcher in (here, there))
    for process in (there.pid, *theirs):
        os.kill(process, signal.SIGKILL)
    there.wait()
    outputs = finish_all([here, launch(port, 1, *arguments)])
    assert "Ranks [0, 1] go on with step" in outputs[0]
    check_all("".join(outputs), range(4))


@pytest.mark.slow
def test_without_the_first_machine_the_others_say_why_they_end(port):
    here, there = (launch(port, node, *SCRIPT, 100000, -1) for node in (0, 1))
    ours, _ = (trains(launcher, ranks=2) for launcher in (here, there))
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
        trains(launcher, ranks=2)
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
