"""Replacements for names that torch's tests import: guards, devices, classes of tests."""

from __future__ import annotations

import contextlib
import inspect
import os
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal import common_device_type, common_utils
from torch.testing._internal.common_distributed import run_subtests

from tests.conformance.fsdp_suite.counting import CountingMode

__all__ = ["MOST_RANKS", "STAND_INS", "DeviceModule", "Missing", "RankTest", "asked"]

MOST_RANKS = 4
FEWEST_RANKS = 2
_ASKED = "_fsdp_suite_asked"

F = TypeVar("F")


class DeviceModule:
    """`torch.cuda`, or what `torch.get_device_module()` returns: the CPU's, with a few ranks.

    What only a GPU has, as statistics of its memory, skips the test that asks for it.
    """

    def __init__(self) -> None:
        self.count = FEWEST_RANKS

    def device_count(self) -> int:
        """Return the number of ranks of the running test."""
        return self.count

    def is_available(self) -> bool:
        """Return True, so that tests find devices."""
        return True

    def current_accelerator(self, *unused: object, **named: object) -> torch.device:
        """Return the device, as torch.accelerator does."""
        return torch.device("cpu")

    def current_device(self) -> str:
        """Return the device, as torch.cpu does."""
        return "cpu"

    def manual_seed(self, seed: int) -> None:
        """Seed the only generator."""
        torch.manual_seed(seed)

    def device(self, *unused: object) -> contextlib.AbstractContextManager[None]:
        """Return an empty context: there is only one device."""
        return contextlib.nullcontext()

    def empty_cache(self) -> None:
        """Do nothing: the CPU has no cache."""

    def _sleep(self, cycles: int) -> None:
        """Delays test how streams wait for each other; the CPU has one."""

    def __getattr__(self, name: str) -> Any:
        """The rest is torch.cpu's."""
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        raise unittest.SkipTest(f"the CPU has no {name}")


class Missing:
    """Name that the installed torch does not have; a test that uses it is skipped.

    As a decorator, or as what makes one, it skips the function; a class of tests may inherit it.
    """

    def __init__(self, name: str) -> None:
        self._reason = f"the installed torch has no {name}"

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (unittest.case.skip(self._reason)(type("MissingBase", (RankTest,), {})),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (inspect.isfunction(args[0])):
            return unittest.skip(self._reason)(args[0])
        return self._used()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._used()

    def _used(self) -> Any:
        """Classes may keep what comes of it."""
        if _inside_a_test():
            raise unittest.SkipTest(self._reason)
        return self


def _inside_a_test() -> bool:
    return dist.is_initialized()


class RankTest(common_utils.TestCase):
    """In place of FSDPTest and its kin: the ranks exist already when a test is made."""

    MAIN_PROCESS_RANK = -1
    rank = 0
    file_name = ""
    ranks: int | None = None  # that a test really has

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return device_module.count

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks."""
        return dist.distributed_c10d._get_default_group()

    @property
    def pg(self) -> dist.ProcessGroup | None:
        """Return `process_group`, by another name."""
        return self.process_group

    @property
    def init_method(self) -> str:
        """Return where ranks meet."""
        return f"file://{self.file_name}"

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        """Run each combination of arguments."""
        run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:
        """Do nothing: only tests that torch runs in threads need it."""

    def perThreadTearDown(self) -> None:
        """Do nothing: only tests that torch runs in threads need it."""

    def _barrier(self, *unused: object) -> None:
        dist.barrier()


def asked(function: Callable[..., object]) -> int:
    """Return how many devices a test asks for."""
    return getattr(function, _ASKED, FEWEST_RANKS)


def skip_if_lt_x_gpu(count: int, *unused: object, **named: object) -> Callable[[F], F]:
    """Note the number of ranks that a test is to get."""

    def note(function: F) -> F:
        setattr(function, _ASKED, max(count, FEWEST_RANKS))
        return function

    return note


def _passing(*args: Any, **kwargs: Any) -> Any:
    """A decorator that changes nothing, with arguments or without."""
    if len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0])):
        return args[0]
    return lambda function: function


def _gpu_only(*args: Any, **kwargs: Any) -> Any:
    reason = "asks for a GPU"
    if len(args) == 1 and (inspect.isfunction(args[0]) or inspect.isclass(args[0])):
        return unittest.skip(reason)(args[0])
    return unittest.skip(reason)


def _for_each_device(cls: type[Any], scope: dict[str, Any], **unused: object) -> None:
    common_device_type.instantiate_device_type_tests(cls, scope, only_for=("cpu",))
    made = scope.get(f"{cls.__name__}CPU")
    if made is not None:
        made.device_type, made._primary_device = "cpu", "cpu"


def _no_time(*unused: object, **named: object) -> float:
    return 1.0


device_module = DeviceModule()

# By the name that is imported, wherever it comes from.
STAND_INS: dict[str, Any] = {
    "CommDebugMode": CountingMode,
    "FSDPTest": RankTest,
    "FSDPTestContinuous": RankTest,
    "FSDPTestMultiThread": RankTest,
    "MultiProcContinuousTest": RankTest,
    "DISTRIBUTED_BACKEND": "nccl",  # guards ask for it; process groups are made as "gloo"
    "TEST_CUDA": False,
    "TEST_MULTIGPU": False,
    "TEST_HPU": False,
    "TEST_XPU": False,
    "TEST_WITH_ROCM": False,
    "TEST_CUDA_GRAPH": False,
    "SM90OrLater": False,
    "PLATFORM_SUPPORTS_SYMM_MEM": False,
    "skip_if_lt_x_gpu": skip_if_lt_x_gpu,
    "at_least_x_gpu": lambda count: count <= MOST_RANKS,
    "compiled_fsdp_test": _passing,  # compiles for GPUs alone
    "requires_nccl": _passing,
    "requires_nccl_version": _passing,
    "requires_accelerator_dist_backend": _passing,
    "skipIfRocm": _passing,
    "skipIfRocmArch": _passing,
    "skipIfRocmVersionLessThan": _passing,
    "skip_if_rocm_arch_multiprocess": _passing,
    "skip_if_rocm_multiprocess": _passing,
    "skipXPUIf": _passing,
    "onlyCUDA": _gpu_only,
    "requires_cuda_p2p_access": _gpu_only,
    "requires_multicast_support": _gpu_only,
    "instantiate_device_type_tests": _for_each_device,
    "device_sleep": _no_time,
    "get_cycles_per_ms": _no_time,
    "get_devtype": lambda: torch.device("cpu"),
    "run_tests": lambda: None,
}


def meet(case: RankTest, rank: int, ranks: int) -> None:
    """Make the process group of a test."""
    case.rank = rank
    os.environ["WORLD_SIZE"] = str(ranks)
    dist.init_process_group("gloo", init_method=case.init_method, world_size=ranks, rank=rank)
