"""From a folder of torch's test files to tests that can be run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conformance.fsdp_suite.rewrite import DEVICES, SUITE, TABLE, rewrite
from tests.conformance.fsdp_suite.stand_ins import (
    MOST_RANKS,
    STAND_INS,
    Missing,
    RankTest,
    asked,
    device_module,
)
from tests.conformance.fsdp_suite.wrappers import Suite

__all__ = ["Case", "load_tests"]

_PATTERN = "test_fully_shard_*.py"


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        name: "file.class.method", without what all files' names begin with.
        asks: devices that it asks for.
        ranks: that it gets.
    """

    name: str
    cls: type[RankTest]
    method: str
    asks: int
    ranks: int


def load_tests(suite: Suite, folder: Path) -> dict[str, Case]:
    """Rewrites and imports the files, in this process.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(folder.glob(_PATTERN))
    if not files:
        raise FileNotFoundError(f"no {_PATTERN} in {folder}")
    cases = [case for path in files for case in _cases(path, _import(suite, path))]
    return {case.name: case for case in cases}


def _import(suite: Suite, path: Path) -> ModuleType:
    module = ModuleType(f"fsdp_suite_rewritten.{path.stem}")
    table = {**STAND_INS, **suite.wrapper.names, "missing": Missing}
    names = {SUITE: _Tested(suite), TABLE: table, DEVICES: device_module}
    module.__dict__.update(names, __file__=str(path))
    sys.modules[module.__name__] = module  # classes in it can be pickled
    code = compile(rewrite(path.read_text(), set(table)), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


class _Tested:
    """The functions under test, as attributes."""

    def __init__(self, suite: Suite) -> None:
        self.fully_shard = suite.fully_shard
        self.register_fsdp_forward_method = suite.wrapper.register_fsdp_forward_method
        missing = Missing("share_comm_ctx")
        self.share_comm_ctx: Callable[..., Any] = suite.wrapper.share_comm_ctx or missing


def _cases(path: Path, module: ModuleType) -> list[Case]:
    file = path.stem.removeprefix("test_fully_shard_").rstrip("_")
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, RankTest) and value is not RankTest
    ]
    found = []
    for cls in dict.fromkeys(classes):
        for method in sorted(name for name in dir(cls) if name.startswith("test_")):
            found.append(_case(f"{file}.{cls.__name__}.{method}", cls, method))
    return found


def _case(name: str, cls: type[RankTest], method: str) -> Case:
    asks = asked(getattr(cls, method))
    device_module.count = asks
    try:
        ranks = min(MOST_RANKS, int(cls(method).world_size))
    except Exception as error:
        raise RuntimeError(f"{name} does not say how many ranks it wants") from error
    return Case(name, cls, method, asks, ranks)
