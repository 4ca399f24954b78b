"""From the installed torch to a class with the rewritten tests in it."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conformance.torch_suite.rewrite import SUITE_NAME, find_ddp_tests, rewrite
from tests.conformance.torch_suite.wrappers import Suite

__all__ = ["Tests", "load_tests"]

_SOURCE_MODULE = "torch.testing._internal.distributed.distributed_test"
_REWRITTEN_MODULE = "torch_suite_rewritten"


@dataclass(frozen=True)
class Tests:
    """The rewritten tests.

    Attributes:
        case: the unittest class.
        names: its tests that build the class under test, parametrized ones in full.
        suite: the object that builds it.
        timeouts: seconds that a process group of some tests waits, by name.
    """

    case: type[Any]
    names: list[str]
    suite: Suite
    timeouts: dict[str, int]


def load_tests(suite: Suite, backend: str, world_size: int) -> Tests:
    """Rewrites and imports torch's tests in this process."""
    # The module reads these when it is imported.
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(world_size))
    path = _find_source()
    source = path.read_text()
    tree = rewrite(source, on_cpu=backend == "gloo", world_size=world_size)
    module = ModuleType(_REWRITTEN_MODULE)
    module.__dict__.update({SUITE_NAME: suite, "__file__": str(path)})
    sys.modules[_REWRITTEN_MODULE] = module  # classes in it can be pickled
    code = compile(tree, str(path), "exec", dont_inherit=True)  # our __future__ imports
    exec(code, module.__dict__)
    case = type("TorchTests", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    case.__module__ = _REWRITTEN_MODULE
    return Tests(case, _names(case, source), suite, dict(module.CUSTOM_PG_TIMEOUT))


def _find_source() -> Path:
    spec = importlib.util.find_spec(_SOURCE_MODULE)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the installed torch has no {_SOURCE_MODULE}: install a full wheel")
    return Path(spec.origin)


def _names(case: type[Any], source: str) -> list[str]:
    names = []
    for function in find_ddp_tests(source):
        if hasattr(case, function):
            names.append(function)
        else:
            names += [name for name in sorted(dir(case)) if name.startswith(f"{function}_")]
    return list(dict.fromkeys(names))
