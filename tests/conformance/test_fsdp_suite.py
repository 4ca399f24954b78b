"""The harness for torch's FSDP2 tests, on a file of our own. Theirs: `make fsdp-suite`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.torch_suite.record import Lists

ROOT = Path(__file__).parents[2]
LISTS = Lists(ROOT / "tests" / "conformance" / "fsdp_suite")
CASES = json.loads((ROOT / "tests" / "conformance" / "fsdp_suite" / "cases.json").read_text())
# Written as torch's tests are.
SAMPLE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import a_name_of_another_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_cuda import TEST_CUDA
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread, MLP, get_devtype
from torch.testing._internal.common_utils import run_tests

device_type = torch.device(get_devtype())
device_module = torch.get_device_module(device_type)
c10d = torch.ops.c10d


class TestProcesses(FSDPTest):
    @property
    def world_size(self):
        return min(8, torch.cuda.device_count())

    @skip_if_lt_x_gpu(4)
    def test_parity(self):
        torch.manual_seed(0)
        model = MLP(4, torch.device("cuda"))
        reference = MLP(4, torch.device("cuda", self.rank))
        reference.load_state_dict(model.state_dict())
        replicate(reference, device_ids=[self.rank])
        fully_shard(model.in_proj, reshard_after_forward=2)
        fully_shard(model)
        inp = torch.full((1, 4), 1.0 + self.rank).cuda()
        with CommDebugMode() as counted:
            model(inp).sum().backward()
        counts = counted.get_comm_counts()
        self.assertEqual(counts[c10d._allgather_base_], 3)
        self.assertEqual(counts[c10d._reduce_scatter_base_], 2)
        reference(inp).sum().backward()
        for param, ref in zip(model.parameters(), reference.parameters()):
            self.assertIsInstance(param, DTensor)
            self.assertEqual(param.grad.full_tensor(), ref.grad)

    @skip_if_lt_x_gpu(4)
    def test_ranks(self):
        fully_shard(nn.Linear(4, 4))
        self.assertEqual(self.world_size, dist.get_world_size())
        self.assertEqual(dist.get_world_size(), 4)

    @skip_if_lt_x_gpu(2)
    def test_wrong(self):
        self.assertIsInstance(fully_shard(nn.Linear(4, 4)), nn.Conv2d)

    def test_memory(self):
        fully_shard(nn.Linear(4, 4))
        device_module.memory_stats()

    def test_another_version(self):
        a_name_of_another_version(fully_shard(nn.Linear(4, 4)))


class TestThreads(FSDPTestMultiThread):
    kind = a_name_of_another_version.KIND

    @property
    def world_size(self):
        return 2

    def perThreadSetUp(self):
        super().perThreadSetUp()
        device_module.set_device(0)

    def test_state(self):
        model = nn.Sequential(fully_shard(nn.Linear(2, 2)))
        fully_shard(model)
        fully_shard.state(model)._lazy_init()
        self.assertTrue(fully_shard.state(model)._is_root)
        self.assertFalse(model[0]._get_fsdp_state()._is_root)
        self.assertIsInstance(model, FSDPModule)

    def test_subtests(self):
        self.run_subtests({"keep": [True, False]}, self._check_kept)

    def _check_kept(self, keep):
        model = fully_shard(nn.Linear(2, 2), reshard_after_forward=not keep)
        model(torch.ones(1, 2, device=device_type))
        self.assertEqual(isinstance(model.weight, DTensor), not keep)


if __name__ == "__main__":
    run_tests()
"""
NAMES = {
    "TestProcesses": ("another_version", "memory", "parity", "ranks", "wrong"),
    "TestThreads": ("state", "subtests"),
}
WRONG, SKIPPED = "sample.TestProcesses.test_wrong", ("another_version", "memory")


def run_suite(tmp_path, *arguments):
    """Exit status, results by name, and output of the command."""
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    (upstream / "test_fully_shard_sample.py").write_text(SAMPLE)
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.conformance.fsdp_suite",
        str(upstream),
        "--json",
        str(report),
    ]
    done = subprocess.run(
        [*command, "--quiet", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert report.exists(), done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(report.read_text())}
    return done.returncode, results, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["torch", "fastsync"])
def test_a_file_of_tests(tmp_path, wrapper):
    _, results, output = run_suite(tmp_path, "--wrapper", wrapper, "--all")
    names = {f"sample.{cls}.test_{name}" for cls, its in NAMES.items() for name in its}
    assert set(results) == names, output
    for name, result in results.items():
        skipped = name.endswith(SKIPPED)
        status = "failed" if name == WRONG else "not run" if skipped else "passed"
        assert result["status"] == status, (name, result["text"])
    assert "FSDPLinear" in results[WRONG]["text"]
    reasons = [r["text"] for n, r in results.items() if n.endswith(SKIPPED)]
    assert "no torch.distributed.fsdp.a_name_of_another_version" in reasons[0]
    assert reasons[1] == "the CPU has no memory_stats"


@pytest.mark.slow
def test_a_broken_wrapper_fails(tmp_path):
    only = ("--only", "parity", "--timeout", "30")
    _, results, output = run_suite(tmp_path, "--wrapper", "broken-sum", "--all", *only)
    assert [r["status"] for r in results.values()] == ["failed"], output


@pytest.mark.slow
def test_torchs_own_is_asked_first(tmp_path):
    only = ("--only", "parity|wrong|state", "--measure-baseline")
    status, results, output = run_suite(tmp_path, *only)
    assert status == 0, output
    assert {name.rsplit(".", 1)[1] for name in results} == {"test_parity", "test_state"}
    assert "lacks" not in output


@pytest.mark.slow
def test_tests_that_the_folder_lacks_are_counted(tmp_path):
    (tmp_path / "test_fully_shard_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "tests.conformance.fsdp_suite", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "lacks 111 of the baseline's 111 tests" in done.stdout
    assert "no test matches" in done.stderr


@pytest.mark.slow
def test_a_folder_without_tests(tmp_path):
    command = [sys.executable, "-m", "tests.conformance.fsdp_suite", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no test_fully_shard_*.py in" in done.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.cuda.set_device(0)", "__device_module__.set_device(0)"),
        ("torch.get_device_module(kind).Stream()", "__device_module__.Stream()"),
        ("torch.device('cuda', rank)", "torch.device('cpu')"),
        ("torch.device(get_devtype())", "torch.device(get_devtype())"),
        ("torch.device('meta')", "torch.device('meta')"),
        ("x.cuda(rank)", "x.cpu()"),
        ("init_device_mesh('cuda', (2,))", "init_device_mesh('cpu', (2,))"),
        ("DISTRIBUTED_BACKEND != 'nccl'", "DISTRIBUTED_BACKEND != 'nccl'"),
        ("init(backend='nccl')", "init(backend='gloo')"),
        ("torch.distributed.fsdp.fully_shard(m)", "__fsdp_suite__.fully_shard(m)"),
        (
            "from torch.distributed.fsdp import fully_shard as f",
            "f = __fsdp_suite__.fully_shard",
        ),
        ("replicate(m, device_ids=[0])", "replicate(m, device_ids=None)"),
    ],
)
def test_rules(source, expected):
    # It imports torch's own tests, which takes seconds.
    from tests.conformance.fsdp_suite.rewrite import rewrite

    assert ast.unparse(rewrite(source)).strip() == expected


def test_the_lists_hold_what_they_say():
    names = LISTS.baseline("gloo")
    exceptions = LISTS.exceptions()
    assert len(names) == 111
    assert len(exceptions) == 5
    assert set(exceptions) <= set(names)
    assert all(exceptions.values())


def test_each_case_of_torchs_has_a_test_of_ours():
    assert set(CASES) == set(LISTS.baseline("gloo"))
    for case, ours in CASES.items():
        assert ours, case
        for test in ours:
            file, name = test.split("::")
            (source,) = (ROOT / "tests").glob(f"*/{file}.py")
            assert f"def {name}(" in source.read_text(), f"{case}: there is no {test}"
