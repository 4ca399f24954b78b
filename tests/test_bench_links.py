"""python -m bench links as it is typed, with tiny settings; links are real where rights allow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.measure import netns
from bench.measure.netns import LinkName, parse_links
from bench.models import WORKLOADS
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


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def all_end(pids, seconds=60):
    """Whether the processes end; one of them holds each namespace."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


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
def test_ranks_of_a_machine_share_its_link_and_its_memory(tmp_path):
    """The hierarchical form sends 2(n-1)/n of a rank's share of the gradients to other machines."""
    path = tmp_path / "links.json"
    nodes = ("--ranks", "4", "--per-node", "2", "--wrappers", "ddp,fastsync_nodes")
    done = links("--links", "veth", *nodes, "--json", str(path))
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(path.read_text())["links"]
    assert (record["ranks"], record["per_node"]) == (4, 2)
    sent = record["variants"]["fastsync_nodes"]["sent_bytes"] / (record["gradient_bytes"] / 2)
    assert 0.99 < sent < 1.5
    assert links("--links", "veth", "--ranks", "3", "--per-node", "2").returncode == USAGE


@needs_links
def test_stages_of_zero_over_a_shaped_link(tmp_path):
    """A step of DDP takes as long as its gradients on the link, but for the bucket's depth."""
    path, rate, burst = tmp_path / "zero.json", 20e6 / 8, 256e3
    command = [sys.executable, "-m", "bench", "zero", "--stages", "3", "--link", "20mbit"]
    command += ["--models", "small", "--scale", "0.25", "--rounds", "1", "--warmup", "1"]
    command += ["--steps", "1", "--check-steps", "1", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert "(20mbit)" in result["title"]
    nbytes = sum(p.nbytes for p in WORKLOADS["small"](scale=0.25).build().parameters())
    (ddp,) = (row[1] for row in result["rows"] if row[1].endswith(" ms"))
    assert float(ddp.removesuffix(" ms")) > 1e3 * (nbytes - burst) / rate


@needs_links
def test_links_and_ranks_end_when_the_benchmark_is_stopped():
    command = [sys.executable, "-m", "bench", "links", *TINY, "--links", "1gbit", "--seconds", "60"]
    process = subprocess.Popen([*command, "--rounds", "10000"], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while len(found := children(process.pid)) < 4:  # two ranks, and what holds their namespaces
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == INTERRUPTED
    process.stderr.close()
    assert all_end(found)


@needs_links
@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_left_of_a_killed_run(ranks):
    code = (
        "import time; from bench.measure.netns import network\n"
        f"with network({ranks}) as seats: print(*(s.holder for s in seats), flush=True);"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    holders = process.stdout.readline().decode().split()
    assert len(holders) == ranks and set(holders) <= set(children(process.pid))
    spaces = {Path(f"/proc/{pid}/ns/net").readlink() for pid in (*holders, "self")}
    assert len(spaces) == ranks + 1
    process.kill()
    process.communicate()
    assert all_end(holders)


def test_missing_tools_are_named_and_have_a_code_of_their_own(tmp_path):
    done = links("--links", "1gbit", env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == NO_RIGHTS
    assert "ip, tc, nsenter, unshare not found" in done.stderr


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
