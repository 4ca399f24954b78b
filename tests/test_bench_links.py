"""python -m bench links as it is typed, with tiny settings; links are real where rights allow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.measure import jobs, netns
from bench.measure.netns import LinkName, parse_links
from examples.common.ranks import INTERRUPTED, NO_RIGHTS, USAGE, UsageError

ROOT = Path(__file__).parent.parent
TINY = ("--scale", "0.01", "--rounds", "1", "--seconds", "1", "--check-steps", "2")
MISSING = netns.missing_rights()
needs_links = pytest.mark.skipif(MISSING is not None, reason=f"links: {MISSING}")


def links(*arguments, **options):
    command = [sys.executable, "-m", "bench", "links", *TINY, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, **options
    )


def left_behind(pid):
    return [name for name in netns._ours() if name.startswith(f"fsbench-{pid}-")]


def check_records(path, expected):
    result = json.loads(path.read_text())
    assert [(r["link"], r["ranks"]) for r in result["links"]] == expected
    for record in result["links"]:
        assert set(record["variants"]) == {"no_sync", "ddp", "fastsync", "fastsync_bf16"}
        assert record["rate_bytes_per_second"] > 0
        factor = 2 * (record["ranks"] - 1) / record["ranks"]
        fp32 = record["variants"]["fastsync"]
        assert fp32["formula_bytes"] == factor * record["gradient_bytes"]
        assert record["variants"]["fastsync_bf16"]["formula_bytes"] == fp32["formula_bytes"] / 2
        assert record["variants"]["ddp"]["check"] == "bit-identical"
        yield record


@needs_links
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_meet_over_a_shaped_link(tmp_path, ranks):
    """The interface counts what the formula says, give or take headers and acknowledgements."""
    path = tmp_path / "links.json"
    wanted = ("--wrappers", "ddp,fastsync,fastsync_bf16", "--json", str(path))
    done = links("--links", "500mbit", "--ranks", str(ranks), *wanted)
    assert done.returncode == 0, done.stderr
    for record in check_records(path, [("500mbit", ranks)]):
        # Token buckets let no more than their rate pass, but for the few bytes of their burst.
        assert record["rate_bytes_per_second"] * 8 < 600e6
        for name in ("ddp", "fastsync", "fastsync_bf16"):
            variant = record["variants"][name]
            assert 0.99 < variant["sent_bytes"] / variant["formula_bytes"] < 1.5


@needs_links
def test_links_are_removed_when_the_benchmark_is_stopped():
    command = [sys.executable, "-m", "bench", "links", *TINY, "--links", "1gbit", "--seconds", "60"]
    process = subprocess.Popen([*command, "--rounds", "10000"], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not left_behind(process.pid):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == INTERRUPTED
    process.stderr.close()
    assert not left_behind(process.pid)


@needs_links
def test_what_would_stop_a_removal_waits_for_its_end(monkeypatch):
    run = netns._ip

    def interrupted(*arguments):
        if arguments[:2] == ("netns", "delete"):
            signal.raise_signal(signal.SIGTERM)
        return run(*arguments)

    monkeypatch.setattr(netns, "_ip", interrupted)
    with jobs.terminable(), pytest.raises(KeyboardInterrupt), netns.Network(2):
        assert left_behind(os.getpid())
    assert not left_behind(os.getpid())


@needs_links
def test_what_a_killed_run_left_is_removed_and_the_living_are_not():
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    stale = f"fsbench-{dead.pid}-1-0"
    alive = f"fsbench-{os.getpid()}-{netns._start_time(os.getpid())}-9"
    for name in (stale, alive):
        subprocess.run(["ip", "netns", "add", name], check=True)
    inside = subprocess.Popen(["ip", "netns", "exec", stale, "sleep", "600"])
    while not subprocess.check_output(["ip", "netns", "pids", stale]).split():
        time.sleep(0.01)
    try:
        assert stale in netns.remove_stale()
        assert stale not in netns._ours() and alive in netns._ours()
        assert inside.wait(10) == -signal.SIGKILL
    finally:
        inside.kill()
        subprocess.run(["ip", "netns", "delete", alive], check=True)


def test_missing_tools_are_named_and_have_a_code_of_their_own(tmp_path):
    done = links("--links", "1gbit", env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == NO_RIGHTS
    assert "ip and tc not found" in done.stderr


def test_bad_input_is_refused():
    assert [link.rate for link in parse_links("1gbit, veth,loopback")] == ["1gbit", None, None]
    assert LinkName("100mbit").scale < LinkName("1gbit").scale == LinkName("veth").scale == 1.0
    for text in ("fast", "0mbit", "10", "1gbit,"):
        with pytest.raises(UsageError, match="unknown rate"):
            parse_links(text)
    done = links("--links", "loopback", "--wrappers", "fastsync_nonsense")
    assert done.returncode == USAGE and "unknown wrapper ['fastsync_nonsense']" in done.stderr
    done = links("--links", "loopback", "--ranks", "1")
    assert done.returncode == USAGE and "at least 2 rank(s)" in done.stderr
