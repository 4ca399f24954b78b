"""The command that runs everything on a GPU goes on behind a stage that fails."""

import json
import sys
import time
from pathlib import Path

from bench.__main__ import module_of
from bench.gpu import all as gpu_all
from bench.gpu.stages import Context, Stage, stages


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
    """Whatever way it fails; its output is kept, and so are results."""
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


def test_commands_are_accepted():
    """Every option of a stage's commands is one that the program has."""
    for stage in stages(Context(Path("x"), Path("x"), 8)).values():
        for command in [*stage.commands, *stage.rehearsal]:
            if "bench" in command:
                name, *arguments = command[command.index("bench") + 1 :]
                module_of(name).main.parser().parse_args(arguments)
