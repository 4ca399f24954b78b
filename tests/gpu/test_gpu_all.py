"""The command that runs everything on a GPU: its stages, what it computes, and that it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.__main__ import module_of
from bench.gpu import all as gpu_all
from bench.gpu import mps
from bench.gpu.stages import Context, Stage, stages
from bench.measure.benchmark import choose
from bench.measure.gpu import Kernel, exposed, launches, length, summary
from bench.report import documents as report
from examples.common.ranks import Group, UsageError, over_sockets
from tests.helpers.devices import CUDA_TIMEOUT

ROOT = Path(__file__).parents[2]


def context(folder, gpus=1):
    return Context(folder, folder / "results", gpus)


def session(folder, seconds=1000.0, keep=None):
    for name in ("logs", "results"):
        (folder / name).mkdir(exist_ok=True)
    deadline = time.monotonic() + seconds
    return gpu_all.Session(context(folder), keep, deadline, {"SAID": "hello"})


def python(code):
    return (sys.executable, "-c", code)


def test_a_stage_that_fails_does_not_stop_the_others(tmp_path):
    """In whatever way a stage fails, its output is kept, and so are results."""
    writes = f"open({str(tmp_path / 'results' / 'a.json')!r}, 'w').write('[]')"
    some = [
        Stage("wrong", "", 60, (python("print('why'); raise SystemExit(3)"), python(writes))),
        Stage("absent", "", 60, (("/no/such/program",),)),
        Stage("slow", "", 1, (python("import time; time.sleep(100)"),)),
        Stage("toolless", "", 60, (python("pass"),), tools=("no-such-tool",)),
        Stage("right", "", 60, (python("import os; print(os.environ['SAID'])"), python(writes))),
        Stage("elsewhere", "", 60, ()),
    ]
    mine = session(tmp_path, keep=tmp_path / "kept")
    gpu_all.run_all(some, mine)
    found = {o.stage: o.status for o in mine.outcomes}
    assert found == {
        **dict.fromkeys(("wrong", "absent", "slow"), "FAILED"),
        **dict.fromkeys(("toolless", "elsewhere"), "skipped"),
        "right": "passed",
    }
    assert mine.failed == ["wrong", "absent", "slow"]
    notes = {o.stage: o.note for o in mine.outcomes}
    assert "exit code 3" in notes["wrong"] and "time was over" in notes["slow"]
    assert (tmp_path / "logs" / "wrong.log").read_text() == "why\n"
    assert (tmp_path / "logs" / "right.log").read_text() == "hello\n"
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"a.json", "summary.json", "all.tar.gz"}
    written = json.loads((tmp_path / "kept" / "summary.json").read_text())
    assert [s["stage"] for s in written["stages"]] == [s.name for s in some]
    assert str(tmp_path) not in (tmp_path / "kept" / "summary.json").read_text()


def test_a_stage_whose_tests_were_all_skipped_has_failed(tmp_path):
    for text, status in (("3 skipped in 0.1s", "FAILED"), ("1 passed, 2 skipped", "passed")):
        stage = replace(EVERY["smoke"], commands=(python(f"print({text!r})"),))
        mine = session(tmp_path)
        gpu_all.run_all([stage], mine)
        assert [o.status for o in mine.outcomes] == [status]


@pytest.mark.slow
def test_what_a_command_started_ends_with_this_one(tmp_path):
    """Even where it is killed: the guard of the command notices."""
    told = tmp_path / "told"
    child = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    starts = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {child!r}])"
    code = (
        "import pathlib, sys; sys.path.insert(0, '.'); from tests.gpu import test_gpu_all as t\n"
        f"stage = t.Stage('slow', '', 90, (t.python({starts!r}),))\n"
        f"t.gpu_all.run_all([stage], t.session(pathlib.Path({str(tmp_path)!r})))"
    )
    process = subprocess.Popen(python(code), cwd=ROOT)
    while not (told.exists() and told.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert ended(told.read_text())


def test_results_are_replaced_whole(tmp_path, monkeypatch):
    """A run that is stopped while it packs leaves the file of the stage before."""
    kept = tmp_path / "kept"
    mine = session(tmp_path, keep=kept)
    gpu_all.run_all([Stage("first", "", 60, (python("pass"),))], mine)
    before = (kept / "all.tar.gz").read_bytes()

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_all.shutil, "copy", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu_all._keep(mine, kept)
    assert (kept / "all.tar.gz").read_bytes() == before


def test_a_command_that_hangs_costs_little(tmp_path):
    says = "import time\nfor i in range(8): print(i, flush=True); time.sleep(0.3)"
    some = [
        Stage("hangs", "", 60, (python("import time; time.sleep(100)"),), quiet=1),
        Stage("speaks", "", 60, (python(says),), quiet=1.5),
    ]
    mine = session(tmp_path)
    start = time.monotonic()
    gpu_all.run_all(some, mine)
    assert time.monotonic() - start < 40
    assert [o.status for o in mine.outcomes] == ["FAILED", "passed"]
    assert "silent for 1 s" in mine.outcomes[0].note
    assert all(
        stage.quiet <= 90
        for stage in EVERY.values()
        if not stage.tools or "nvcc" in stage.tools[:1]
    )
    assert CUDA_TIMEOUT < 90


SHARING = [(1, False, "NCCL"), (2, False, "NCCL, taking turns"), (2, True, "NCCL")]


def test_kernels_come_first_and_alone():
    order = list(EVERY)
    assert order[:5] == ["build", "units", "kernels", "smoke", "overhead"]
    stages = [EVERY[name] for name in ("units", "smoke", "nccl", "elastic")]
    tested = {file for stage in stages for command in stage.commands for file in command}
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "tests/gpu").glob("test_cuda_*.py")} <= tested


@pytest.mark.parametrize(("world", "mps", "said"), SHARING)
def test_figures_say_where_ranks_take_turns_on_a_gpu(tmp_path, monkeypatch, world, mps, said):
    monkeypatch.setenv("BENCH_OVER_SOCKETS", "1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if mps:
        (tmp_path / "control").touch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Group(0, world, torch.device("cuda")).transport == said


# A daemon's program that ends when it is told to; or never serves, never ends, ends at once.
DAEMON = """#!{python}
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if "-f" not in sys.argv:
    (folder / "said").write_text(sys.stdin.read())
    raise SystemExit
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path({told!r}).write_text(f"{{os.getpid()}} {{server.pid}} {{folder}}")
if {kind!r} == "broken":
    raise SystemExit(1)
if {kind!r} != "silent":
    (folder / "control").touch()
while {kind!r} == "stubborn" or not (folder / "said").exists():
    time.sleep(0.02)
"""


def install_daemon(folder, kind):
    """On PATH, for stages that begin here; returns the file where it leaves its processes."""
    told, program = folder / "told", folder / "bin" / mps.DAEMON
    program.parent.mkdir()
    program.write_text(DAEMON.format(python=sys.executable, told=str(told), kind=kind))
    program.chmod(0o755)
    return told


def ended(process):
    """Return whether it is gone, or is in a while: a process is still there for a moment after it
    was killed.
    """
    for _ in range(200):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


SAYS = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'), os.getenv('SAID'))"


KINDS = [("right", True), ("right", False), *((k, True) for k in ("broken", "silent", "stubborn"))]


@pytest.mark.slow(but=("right-True",))
@pytest.mark.parametrize(("kind", "trial"), KINDS)
def test_ranks_share_a_gpu_by_a_daemon_that_ends_with_the_stage(tmp_path, monkeypatch, kind, trial):
    told = install_daemon(tmp_path, kind)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "")
    monkeypatch.setattr(mps, "STARTS", 2.0 if kind == "silent" else 60.0)
    monkeypatch.setattr(mps, "ENDS", 1.0)
    monkeypatch.setattr(mps, "TRIAL", python(f"raise SystemExit({int(not trial)})"))
    some = [
        Stage("together", "", 60, (python(SAYS),), together=True),
        Stage("alone", "", 60, (python(SAYS),)),
    ]
    gpu_all.run_all(some, session(tmp_path))
    daemon, server, folder = told.read_text().split()
    shared = trial and kind in ("right", "stubborn")
    logs = {name: (tmp_path / "logs" / f"{name}.log").read_text() for name in ("together", "alone")}
    assert logs == {"together": f"{folder if shared else ''} hello\n", "alone": " hello\n"}
    assert ended(daemon) and ended(server) and not Path(folder).exists()


@pytest.mark.slow
def test_a_daemon_ends_when_the_command_is_interrupted(tmp_path):
    told = install_daemon(tmp_path, "right")
    code = (
        "import pathlib, sys; sys.path.insert(0, '.'); from tests.gpu import test_gpu_all as t\n"
        f"t.mps.TRIAL, folder = t.python('pass'), pathlib.Path({str(tmp_path)!r})\n"
        "slow = t.python('import time; print(1, flush=True); time.sleep(100)')\n"
        "stage = t.Stage('slow', '', 90, (slow,), together=True)\n"
        "raise SystemExit(t.gpu_all.run_all([stage], t.session(folder)))"
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    process = subprocess.Popen(python(code), cwd=ROOT, env=os.environ | {"PATH": path})
    log = tmp_path / "logs" / "slow.log"
    while not (log.exists() and log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    daemon, server, folder = told.read_text().split()
    assert ended(daemon) and ended(server) and not Path(folder).exists()


@pytest.mark.slow
def test_interrupts_reach_what_tests_start_in_the_background_of_a_shell():
    """Run it where SIGINT is ignored, as in `make test &`."""
    wanted = "tests/gpu/test_gpu_all.py -m '' -k test_a_daemon_ends_when_the_command_is_interrupted"
    command = f"trap '' INT; exec {sys.executable} -m pytest {wanted}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout


def test_nothing_is_begun_when_the_time_is_over(tmp_path):
    mine = session(tmp_path, seconds=gpu_all.SHORTEST / 2)
    gpu_all.run_all([Stage("late", "", 60, (python("raise SystemExit(1)"),))], mine)
    assert [o.note for o in mine.outcomes] == ["no time is left"]


def test_stages_are_chosen_and_ordered(tmp_path):
    every = stages(context(tmp_path, 8))
    assert [s.name for s in choose("stage", every, "all", "units,build")] == list(every)[2:]
    assert [s.name for s in choose("stage", every, "trace,build", "")] == ["trace", "build"]
    for wrong in (("nothing", ""), ("build", "build")):
        with pytest.raises(UsageError):
            choose("stage", every, *wrong)
    assert all(stage.commands for stage in every.values())
    alone = stages(context(tmp_path, 1))
    assert not alone["ranks"].commands, "one GPU has no ranks of its own to offer"


EVERY = stages(Context(Path("x"), Path("x"), 8))


@pytest.mark.parametrize("stage", EVERY.values(), ids=EVERY)
def test_commands_are_accepted(stage):
    """Every option of a stage's commands is one that the program has."""
    for command in [*stage.commands, *stage.rehearsal]:
        if "bench" in command:
            name, *arguments = command[command.index("bench") + 1 :]
            module_of(name).main.parser().parse_args(arguments)


@pytest.mark.slow
def test_a_rehearsal_runs_as_typed(tmp_path):
    done = subprocess.run(
        ["bash", "bench/gpu_all.sh", "--rehearse", "--only", "codecs,trace", "--out", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs a GPU" in done.stdout and "failed: none" in done.stdout
    assert json.loads((tmp_path / "codecs.json").read_text())["points"]


def test_what_is_exposed():
    assert length([(3, 4), (0, 1), (0.5, 2), (0.6, 0.7)]) == 3
    computing = [(0.0, 2.0), (3.0, 4.0)]
    assert exposed([(1.0, 3.5)], computing) == 1.0
    assert exposed([(0.5, 1.5)], computing) == 0.0
    assert exposed([(5.0, 6.0), (5.5, 7.0)], computing) == 2.0
    kernels = [Kernel("gemm", 0.0, 2.0), Kernel("ncclDevKernel_AllReduce", 1.0, 3.0)]
    assert summary(kernels) == (2.0, 1.0) and summary([]) == (0.0, 0.0)
    assert launches([*kernels, Kernel("Memcpy DtoH", 0.0, 1.0)]) == 2


def test_ranks_over_sockets_have_hosts_of_their_own():
    one, other = (over_sockets(rank).environment for rank in (0, 1))
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"] and one["NCCL_SOCKET_IFNAME"] == "lo"


def point(*of, ratio, **more):
    spread = {"median": ratio, "q1": ratio, "q3": ratio}
    return {"of": list(of), "time": spread, "ratio": spread, **more}


def test_the_report_shows_every_gpu(tmp_path):
    facts = {"gpu": "1 x Some GPU", "cpu": "a cpu", "cores": 2, "memory_gib": 8.0, "ranks": 1}
    facts |= {"transport": "NCCL", "threads_per_rank": 1, "torch": "2", "python": "3"}
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    points = [
        point("wide", "pack fp32>fp32", method, ratio=ratio, moved=2e8, gbps=1000.0)
        for method, ratio in (("copy", 1.0), ("fastsync", 1 / 0.95))
    ]
    result = {"kind": "kernels", "command": "c", "environment": facts | {"commit": "abc"}}
    (folder / "kernels.json").write_text(json.dumps(result | {"points": points}))
    assert "Some GPU" in report.figures("gpu-kernels", tmp_path)
    assert report.figures("gpu-kernels", tmp_path / "nowhere") == report.NOT_MEASURED
