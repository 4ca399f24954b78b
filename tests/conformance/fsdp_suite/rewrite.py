"""Makes a file of torch's FSDP2 tests run on the CPU and build what is under test.

The file is parsed, changed as a syntax tree, and compiled; nothing of it is kept. The rules:

* `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx`, wherever they are imported
  from and under their dotted names, are those under test;
* names in `stand_ins.STAND_INS` are those of that table: guards that ask for GPUs note how many
  ranks a test wants, classes of tests run in ranks that exist;
* a name that the installed torch does not have skips the tests that use it, instead of the file;
* `torch.cuda`, `torch.accelerator` and `torch.get_device_module(...)` are a `DeviceModule`;
* decorators that skip where `TEST_CUDA` and its kin are false go away;
* "cuda", "cuda:1" and the like become "cpu", "nccl" becomes "gloo", `x.cuda()` becomes `x.cpu()`,
  `torch.device(...)` one of the CPU unless it is "meta";
* `device_ids=` and `output_device=` become None;
* files that are written for another accelerator (`"npu"`, `torch.npu`, `x.npu()`) likewise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Set

from tests.conformance.fsdp_suite.stand_ins import STAND_INS
from tests.conformance.syntax import dotted, expression

__all__ = ["DEVICES", "SUITE", "TABLE", "rewrite"]

# What the rewritten source calls the suite, the table of stand-ins, and the module of the device.
SUITE, TABLE, DEVICES = "__fsdp_suite__", "__stand_ins__", "__device_module__"

_TESTED = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
_ACCELERATORS = ("cuda", "npu", "xpu", "hpu")
_DEVICE_NAME = re.compile(rf"({'|'.join(_ACCELERATORS)})(:\d+)?")
_BACKENDS = ("nccl", "hccl", "xccl")
_MODULES = tuple(f"torch.{name}" for name in (*_ACCELERATORS, "accelerator"))


def rewrite(source: str, table: Set[str] = frozenset(STAND_INS)) -> ast.Module:
    """The changed syntax tree of a file of tests.

    Args:
        table: names that are taken from the table of stand-ins.
    """
    fixed: ast.Module = ast.fix_missing_locations(_Rules(table).visit(ast.parse(source)))
    return fixed


def _guarded(module: str, alias: ast.alias, table: Set[str]) -> list[ast.stmt]:
    """Imports one name, and says what it stands for."""
    name = alias.asname or alias.name
    if alias.name in _TESTED:
        return ast.parse(f"{name} = {SUITE}.{alias.name}").body
    if alias.name in table:
        return ast.parse(f"{name} = {TABLE}[{alias.name!r}]").body
    missing = f"{TABLE}['missing']({f'{module}.{alias.name}'!r})"
    return ast.parse(
        f"try:\n    from {module} import {alias.name} as {name}\n"
        f"except ImportError:\n    {name} = {missing}"
    ).body


def _asks_for_gpu(decorator: ast.expr) -> bool:
    """Return whether it is `unittest.skipIf(not TEST_CUDA, ...)` or the like."""
    text = ast.unparse(decorator)
    return "skipIf(not TEST_" in text or "skipUnless(TEST_" in text


class _Rules(ast.NodeTransformer):
    def __init__(self, table: Set[str]) -> None:
        self._table = table

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        module = node.module or ""
        if node.level or not module.startswith("torch"):
            return node
        return [
            statement for alias in node.names for statement in _guarded(module, alias, self._table)
        ]

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        node.names = [alias for alias in node.names if alias.name != "torch_npu"]
        return node if node.names else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if not _asks_for_gpu(d)]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if not _asks_for_gpu(d)]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if _DEVICE_NAME.fullmatch(node.value):
                return ast.Constant("cpu")
            if node.value in _BACKENDS:
                return ast.Constant("gloo")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = dotted(node)
        if name in _MODULES:
            return expression(DEVICES)
        if name.startswith("torch.distributed") and node.attr in _TESTED:
            return expression(f"{SUITE}.{node.attr}")
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg in ("device_ids", "output_device"):
            return ast.keyword(node.arg, ast.Constant(None))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Guards compare DISTRIBUTED_BACKEND with a literal, which has to stay."""
        if dotted(node.left) == "DISTRIBUTED_BACKEND":
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = dotted(node.func)
        if name == "torch.get_device_module":
            return expression(DEVICES)
        if name == "torch.device":
            return self._device(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ACCELERATORS:
            node.func.attr, node.args, node.keywords = "cpu", [], []
        return self.generic_visit(node)

    def _device(self, node: ast.Call) -> ast.AST:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and first.value == "meta":
            return node
        if isinstance(first, ast.Call):  # torch.device(get_devtype())
            return self.generic_visit(node)
        return expression("torch.device('cpu')")
