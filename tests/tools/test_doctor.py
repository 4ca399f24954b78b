"""python -m fastsync.doctor with real ranks: healthy ones, planted faults, and drills."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastsync._torch import group_store
from fastsync.doctor import examine as examination
from fastsync.doctor import facts, rates
from fastsync.doctor.command import main
from fastsync.doctor.drill import FAULTS
from fastsync.doctor.examine import Team, examine
from fastsync.doctor.finding import Level
from fastsync.testing import RankError, run_ranks
from tests.helpers.scripts import ROOT, environment, run_module

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
TOPICS = {
    "versions",
    "build",
    "backend",
    "environment",
    "network",
    "faults",
    "shared memory",
    "links",
    "compute",
}


def nothing():
    pass


def without_memory():
    os.environ["FASTSYNC_SHM"] = "0"


def unwatched():
    os.environ["FASTSYNC_WATCH"] = "0"


def other_torch():
    was = facts._versions
    facts._versions = lambda: {**was(), "torch": "2.99.0"}


def other_machine():
    facts.network_space = lambda: "another machine"


def no_such_interface():
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere7"


def no_compiler():
    def origin():
        raise facts.BuildError("there is no compiler")

    facts.origin = origin


def slow_product():
    rates._SIDE = {"cpu": 2048}  # 64 times the work


def no_group():
    def refuse(*args, **kwargs):
        raise RuntimeError("connection refused")

    examination.dist.init_process_group = refuse


def examined(rank, world, spoil, seconds):
    """The last rank has the fault `spoil`; rank 0 has a report."""
    store, make = group_store(dist.group.WORLD), dist.init_process_group
    dist.destroy_process_group()
    if rank == world - 1:
        spoil()
    team = Team(store, rank, world, 3.0 if spoil is no_group else 20.0)
    report = examine(team, "gloo", seconds)
    team.part()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    make("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for `run_ranks` to destroy
    return report


def examine_ranks(world, spoil=nothing, seconds=0.5):
    first, *others = run_ranks(examined, world, spoil, seconds, timeout=120.0)
    assert others == [None] * (world - 1), "rank 0 alone has a report"
    return first


def found(report, topic, level=None):
    """The texts of a topic's findings."""
    return [f.text for f in report.findings if f.topic == topic and level in (None, f.level)]


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_well_pass(world):
    report = examine_ranks(world)
    assert report.passed
    assert {f.topic for f in report.findings} >= TOPICS
    assert found(report, "shared memory")[0].endswith("memory that the ranks share")
    assert found(report, "faults") == ["the ranks look out for each other"]
    measured = report.measured
    whole = measured.all_reduce
    assert whole.rate == pytest.approx(2 * (world - 1) / world * whole.nbytes / whole.seconds)
    pairs, every = measured.pairs.times, list(combinations(range(world), 2))
    assert measured.pairs.planned == len(every)
    assert pairs and list(pairs) == every[: len(pairs)], "as time allows"
    assert all(it.latency > 0 and it.rate > 0 for it in pairs.values())


def pairs_of_all(rank, world):
    return rates.measure_pairs(torch.device("cpu"), 60.0, 1e9, lambda text: None)


def test_all_ranks_know_all_pairs():
    results = run_ranks(pairs_of_all, 3)
    assert all(its == results[0] for its in results)
    assert list(results[0].times) == [(0, 1), (0, 2), (1, 2)]


def all_reduce_in(rank, world, budget):
    return rates.measure_all_reduce(torch.device("cpu"), budget)


@pytest.mark.slow
def test_the_size_of_an_all_reduce_follows_from_the_time():
    brief, longer = (run_ranks(all_reduce_in, 2, budget) for budget in (1e-4, 60.0))
    assert brief[0] == brief[1] and longer[0] == longer[1], "alike on all ranks"
    assert (brief[0].nbytes, longer[0].nbytes) == (1 << 17, 1 << 26)


def test_another_variable_is_found():
    report = examine_ranks(2, without_memory)
    assert found(report, "environment", Level.WARN) == [
        "FASTSYNC_SHM is not set on rank 0; 0 on rank 1"
    ]
    assert "rank 1, FASTSYNC_SHM is 0" in found(report, "shared memory", Level.OK)[0]
    assert report.passed and report.measured


@pytest.mark.slow
def test_torchrun_fails_where_a_check_does(tmp_path):
    """Its second rank is told of an interface that it does not have."""
    script = tmp_path / "rank.sh"
    lines = ['[ "$RANK" = 1 ] && export GLOO_SOCKET_IFNAME=nowhere7']
    lines += [f'exec "{sys.executable}" -m fastsync.doctor --seconds 1']
    script.write_text("\n".join(lines))
    command = [sys.executable, "-m", *TORCHRUN, "2", "--no-python", "sh", str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "FAIL  network: there is no address for rank 1" in done.stdout
    assert "the launcher will call that a failure" in done.stdout


def test_that_nobody_looks_out_is_found():
    report = examine_ranks(2, unwatched)
    assert found(report, "faults", Level.WARN) == [
        "nobody looks out for them: on rank 1, FASTSYNC_WATCH is 0"
    ]


@pytest.mark.slow(but=("other_torch-versions-2.99.0 on rank 2",))
@pytest.mark.parametrize(
    ("spoil", "topic", "text"),
    [
        (other_torch, "versions", "2.99.0 on rank 2"),
        (other_machine, "network", "at 127.0.0.1, which no other machine can reach"),
        (no_such_interface, "network", "no address for rank 2"),
        (no_compiler, "build", "rank 2: there is no compiler"),
    ],
)
def test_what_stands_against_measuring_is_found_before(spoil, topic, text):
    """A process group of such ranks might not come about at all."""
    if spoil is other_machine and facts.gloo_address("", ()) != "127.0.0.1":
        pytest.skip("this machine's name stands for an address that others can reach")
    report = examine_ranks(3, spoil)
    assert not report.passed
    assert text in " ".join(found(report, topic, Level.FAIL))
    assert report.measured is None


@pytest.mark.slow
def test_a_group_that_cannot_be_made_is_told_on_rank_0():
    report = examine_ranks(2, no_group)
    ours, theirs = found(report, "process group", Level.FAIL)
    assert theirs == "rank 1: connection refused"
    assert ours.startswith("rank 0: "), "which has waited for it in vain"
    assert report.measured is None


def ends_in_between(*args):
    os._exit(7)


def leaving():
    rates.measure_pairs = ends_in_between


def test_a_rank_that_dies_meanwhile_is_named():
    # The exit status is known as long as the process has not been waited for.
    named = r"SyncFault: fastsync: rank 1 (exited with code 7|ended) without a word"
    with pytest.raises(RankError, match=named):
        examine_ranks(2, leaving)


@pytest.mark.slow
def test_a_slow_rank_is_found():
    report = examine_ranks(2, slow_product)
    assert found(report, "compute", Level.WARN)[0].endswith("as rank 1")


def absent(rank, world):
    """Rank 1 does not come; the others have a second for that."""
    store = group_store(dist.group.WORLD)
    dist.barrier()
    if rank == 1:
        return None
    return examine(Team(store, rank, world, 1.0), "gloo", 1.0)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_and_not_waited_for():
    """Facts have ten minutes, but rank 0 does not wait for a rank that missed the roll call."""
    report, _, third = run_ranks(absent, 3, timeout=60.0)
    assert found(report, "ranks", Level.FAIL) == ["rank 1 did not come"]
    assert sorted(report.ranks) == [0, 2]
    assert report.measured is None and third is None


@pytest.mark.slow
def test_alone_it_checks_this_process():
    output = run_module("fastsync.doctor")
    assert "one process, alone" in output
    assert "0 FAIL" in output
    assert all(f"OK    {topic}:" in output for topic in ("versions", "build", "network"))


def test_the_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    output = capsys.readouterr().out
    assert "--drill {kill,stop,raise,exit}" in output and "torchrun" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--drill", "flood"], "invalid choice"),
        (["--seconds", "0"], "0 is not above 0"),
    ],
)
def test_what_makes_no_sense_is_an_error(arguments, text, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert text in capsys.readouterr().err


def run_job(ranks, *arguments, code=0):
    command = [sys.executable, "-m", *TORCHRUN, str(ranks), "-m", "fastsync.doctor", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_torchrun_prints_one_report():
    done = run_job(2, "--seconds", "1")
    assert done.stdout.count("verdict") == 1
    assert "ranks 0, 1 on " in done.stdout
    assert "measuring, about 1 s" in done.stderr, "progress is told"
    assert "measuring" not in done.stdout
    assert "bus bandwidth" in done.stdout and "0 FAIL" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_drill_shows_that_ranks_name_the_one_that_fails(fault):
    done = run_job(2, "--drill", fault)
    said = r"OK    drill: rank 0 said within (\d+\.\d+) s that rank 1 "
    seconds = float(re.search(said, done.stdout)[1])
    assert seconds < 30, "from the fault, not from the start of the process"
    assert (seconds > 3) == (fault == "stop")
    assert "0 FAIL" in done.stdout, "the last rank ended as asked"
    assert "ChildFailedError" not in done.stderr, "the job itself ends cleanly"


@pytest.mark.slow
def test_a_drill_fails_where_nobody_looks_out(monkeypatch):
    monkeypatch.setenv("FASTSYNC_WATCH", "0")
    output = run_job(3, "--drill", "kill", code=1).stdout
    assert "FAIL  drill: rank 0 " in output and "FAIL  drill: rank 1 " in output
    assert "2 FAIL" in output, "rank 2 ended as asked"


def test_a_drill_needs_ranks(capsys):
    assert main(["--drill", "kill"]) == 1
    assert "start it with torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_it_with_a_line():
    """In a drill, whose ranks end too; rank 0 serves the store itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "fastsync.doctor", "--drill", "stop"]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        while "drill" not in (line := processes[0].stderr.readline()):
            assert line, "it has ended"
        time.sleep(1)
        tasks = [Path("/proc", str(process.pid), "task") for process in processes]
        files = [file for folder in tasks for file in folder.glob("*/children")]
        children = " ".join(file.read_text() for file in files).split()
        assert len(children) == 2
        for process in processes:
            process.send_signal(signal.SIGINT)
        assert [process.wait(timeout=60) for process in processes] == [130, 130]
    finally:
        for process in processes:
            process.kill()
    printed = [process.stderr.read().strip() for process in processes]
    assert printed == ["fastsync doctor: interrupted", ""]
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]
