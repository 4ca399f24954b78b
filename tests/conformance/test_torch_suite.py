"""The suite of torch's own DDP tests sees faults. What it says of FastDDP: `make torch-suite`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.torch_suite.record import LISTS
from tests.conformance.torch_suite.rewrite import find_ddp_tests, rewrite

ROOT = Path(__file__).parents[2]


def run_suite(tmp_path, wrapper, only, *more):
    """Exit status and results, by name, of the command."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.conformance.torch_suite",
        "--wrapper",
        wrapper,
        "--only",
        only,
    ]
    command += ["--backend", "gloo", "--quiet", "--json", str(report), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert report.exists(), done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(report.read_text())}
    return done.returncode, results, done.stdout


@pytest.mark.slow
def test_fastddp_passes_a_sample(tmp_path):
    status, results, output = run_suite(tmp_path, "fastddp", "logging_data_cpu")
    assert status == 0 and results, output
    assert all(result["status"] == "passed" for result in results.values()), output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "only"),
    [
        ("broken-no-sync", "DataParallelCPU$"),
        ("broken-no-gradient-sync", "DataParallelCPU$"),
        ("broken-sum", "DataParallelCPU$"),
        ("broken-no-broadcast", "static_graph_multi_forward"),
        ("broken-join", "join_model_equivalence"),
        ("broken-no-sync-ignored", "gradients_no_sync$"),
    ],
)
def test_a_broken_wrapper_fails(tmp_path, wrapper, only):
    status, results, output = run_suite(tmp_path, wrapper, only, "--timeout", "15")
    assert status == 1, output
    assert [r["status"] for r in results.values() if r["status"] in ("failed", "timed out")], output


@pytest.mark.slow
def test_the_share_that_must_fail(tmp_path):
    broken = ("broken-no-sync", "DataParallelCPU$", "--timeout", "15")
    assert run_suite(tmp_path, *broken, "--must-fail", "0.5")[0] == 0
    assert run_suite(tmp_path, *broken, "--must-fail", "1")[0] == 1
    assert run_suite(tmp_path, "fastddp", "DataParallelCPU$", "--must-fail", "0")[0] == 1


@pytest.mark.slow
def test_without_a_list_torchs_own_class_is_asked(tmp_path):
    only = "mixed_precision|DataParallelCPU$"
    status, results, output = run_suite(tmp_path, "fastddp", only, "--measure-baseline")
    assert status == 0, output
    assert "DataParallelCPU" in "".join(results)
    listed = [name for name in LISTS.baseline("gloo") if name in results]
    assert sorted(results) == sorted(listed), "torch fails most of mixed precision on the CPU"
    assert LISTS.baseline("no such backend") == []


def test_the_lists_hold_what_they_say():
    names = LISTS.baseline("gloo")
    assert len(names) == 73
    exceptions = LISTS.exceptions()
    assert set(exceptions) <= set(names)
    assert len(exceptions) <= 5
    assert all(exceptions.values())


def rewritten(source):
    return ast.unparse(rewrite(source, on_cpu=True, world_size=2)).strip()


@pytest.mark.slow(but=("m.to(rank)-m.to('cpu')",))
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("nn.parallel.DistributedDataParallel(m)", "__torch_suite__.build(m)"),
        ("isinstance(m, DistributedDataParallel)", "isinstance(m, __torch_suite__.wrapper)"),
        ("m.cuda(self.rank)", "m.cpu()"),
        ("m.to(rank)", "m.to('cpu')"),
        ("m.to(torch.float16)", "m.to(torch.float16)"),
        ("m.to(memory_format=f)", "m.to(memory_format=f)"),
        ("f(m, device_ids=[rank], device='cuda')", "f(m, device_ids=None, device='cpu')"),
        ("torch.cuda.manual_seed(1)", "torch.manual_seed(1)"),
        ("torch.cuda.set_device(1)", "None"),
        ("self.assertEqual(x.device.index, self.rank)", "self.assertEqual(x.device.type, 'cpu')"),
        ("@skip_if_lt_x_gpu(2)\ndef f():\n    pass", "def f():\n    pass"),
        (
            "@skip_if_lt_x_gpu(4)\ndef f():\n    pass",
            "@skip_if_lt_x_gpu(4)\ndef f():\n    pass",
        ),
    ],
)
def test_rules(source, expected):
    assert rewritten(source) == expected


def test_tests_are_found_through_their_helpers():
    source = """
class _DistTestBase:
    def test_direct(self): nn.parallel.DistributedDataParallel(m)
    def helper(self): self.test_direct()
    def test_by_helper(self): self.helper()
    def test_other(self): pass
"""
    assert find_ddp_tests(source) == ["test_direct", "test_by_helper"]
