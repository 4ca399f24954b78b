"""Makes torch's own DDP tests run on the CPU and build the class under test.

The source of `torch.testing._internal.distributed.distributed_test` is parsed where the installed
wheel has it, changed as a syntax tree, and compiled; nothing of it is kept. Two sets of rules:

Always:
    * calling DistributedDataParallel, under any of its dotted names, becomes `SUITE.build(...)`;
      other uses of the name become `SUITE.wrapper`. Torch itself is not patched: its own
      isinstance checks keep seeing its own class;
    * the input of 1000 x 1000 pixels in `test_ddp_uneven_inputs` becomes one of 100 x 100, which
      is enough for the same parameters;
    * `torch.load` is told `weights_only=False`: tests that load hooks are older than its default.

Without a GPU per rank:
    * decorators that skip where there are fewer GPUs than ranks go away (`GPU_GUARDS`);
    * `x.cuda(...)` becomes `x.cpu()`; `x.to(device)` becomes `x.to("cpu")` unless the argument is a
      dtype, a layout or given by another name than `device`;
    * `device=anything` becomes `device="cpu"`, `device_ids=` and `output_device=` become None;
    * `torch.device(...)` becomes `torch.device("cpu")`;
    * `torch.cuda.manual_seed` becomes `torch.manual_seed`, `torch.cuda.current_device()` becomes
      "cpu", `torch.cuda.set_device` and `torch.cuda.synchronize` become nothing;
    * the index of a device, `x.device.index`, becomes `x.device.type` and is expected to be "cpu";
    * the device type of a mesh becomes "cpu"; `init_multigpu_helper` gives each rank itself.
"""

from __future__ import annotations

import ast

from tests.conformance.syntax import dotted, expression

__all__ = ["SUITE_NAME", "find_ddp_tests", "rewrite"]

# What the rewritten source calls the object that builds the class under test.
SUITE_NAME = "__torch_suite__"

_CLASS = "DistributedDataParallel"
_BASE = "_DistTestBase"
_CUDA_RENAMED = {"manual_seed": "manual_seed"}
_CUDA_DROPPED = ("set_device", "synchronize")

# Decorators, and the most ranks whose absence of GPUs they may be told about.
GPU_GUARDS = (
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
)


def rewrite(source: str, on_cpu: bool, world_size: int) -> ast.Module:
    """The changed syntax tree of torch's test module.

    Args:
        source: text of the module.
        on_cpu: also apply the rules for machines without a GPU per rank.
        world_size: tests that ask for more GPUs than this keep being skipped.
    """
    tree = _ClassRule().visit(ast.parse(source))
    if on_cpu:
        tree = _DeviceRules(world_size).visit(tree)
    fixed: ast.Module = ast.fix_missing_locations(tree)
    return fixed


def find_ddp_tests(source: str) -> list[str]:
    """Names of the test methods whose code reaches a construction of the class.

    Parametrized tests appear under the name of their function.
    """
    base = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == _BASE
    )
    methods = {node.name: node for node in base.body if isinstance(node, ast.FunctionDef)}
    reaching = {name for name, node in methods.items() if _builds_class(node)}
    calls = {name: _own_calls(node) for name, node in methods.items()}
    while True:
        more = {name for name, called in calls.items() if called & reaching} - reaching
        if not more:
            return [name for name in methods if name.startswith("test_") and name in reaching]
        reaching |= more


def _builds_class(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and _is_class(n.func) for n in ast.walk(node))


def _own_calls(node: ast.AST) -> set[str]:
    return {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def _is_class(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == _CLASS
    return isinstance(node, ast.Name) and node.id == _CLASS


class _ClassRule(ast.NodeTransformer):
    """The rules that hold on every machine."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_class(node.func):
            node.func = expression(f"{SUITE_NAME}.build")
        if dotted(node.func) == "torch.load":
            node.keywords = [k for k in node.keywords if k.arg != "weights_only"]
            node.keywords.append(ast.keyword("weights_only", ast.Constant(False)))
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return expression(f"{SUITE_NAME}.wrapper") if _is_class(node) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return expression(f"{SUITE_NAME}.wrapper") if _is_class(node) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name == "test_ddp_uneven_inputs":
            node = _SmallerImage().visit(node)
        return self.generic_visit(node)


class _SmallerImage(ast.NodeTransformer):
    """`torch.ones(batch, batch, dim, dim)` with a dim of 100."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        dims = [arg for arg in node.args if isinstance(arg, ast.Name) and arg.id == "dim"]
        if dotted(node.func) == "torch.ones" and len(dims) == 2:
            node.args = [*node.args[:2], ast.Constant(100), ast.Constant(100)]
        return self.generic_visit(node)


class _DeviceRules(ast.NodeTransformer):
    """The rules for machines without a GPU per rank."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if not self._is_guard(d)]
        return self.generic_visit(node)

    def _is_guard(self, decorator: ast.expr) -> bool:
        call = decorator if isinstance(decorator, ast.Call) else None
        if dotted(call.func if call else decorator) not in GPU_GUARDS:
            return False
        asked = call.args[-1] if call and call.args else None
        count = asked.value if isinstance(asked, ast.Constant) else None
        return not (isinstance(count, int) and count > self._world_size)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "device":
            return ast.keyword("device", ast.Constant("cpu"))
        if node.arg in ("device_ids", "output_device"):
            return ast.keyword(node.arg, ast.Constant(None))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = dotted(node.func)
        if name.startswith("torch.cuda."):
            return self._cuda_call(node, name.removeprefix("torch.cuda."))
        if name == "torch.device":
            return expression("torch.device('cpu')")
        if name == "init_multigpu_helper":
            return expression("{rank: [rank] for rank in range(dist.get_world_size())}")
        if name == "init_device_mesh":
            node.args[0] = ast.Constant("cpu")
        if name == "self.assertEqual" and dotted(node.args[1]) == "self.rank":
            self._expect_on_cpu(node)
        if isinstance(node.func, ast.Attribute):
            self._move(node, node.func)
        return self.generic_visit(node)

    def _cuda_call(self, node: ast.Call, name: str) -> ast.AST:
        if name in _CUDA_DROPPED:
            return ast.Constant(None)
        if name == "current_device":
            return ast.Constant("cpu")
        if name in _CUDA_RENAMED:
            node.func = expression(f"torch.{_CUDA_RENAMED[name]}")
        return self.generic_visit(node)

    @staticmethod
    def _expect_on_cpu(node: ast.Call) -> None:
        found = node.args[0]
        if isinstance(found, ast.Attribute) and found.attr == "index":
            found.attr, node.args[1] = "type", ast.Constant("cpu")

    @staticmethod
    def _move(node: ast.Call, method: ast.Attribute) -> None:
        if method.attr == "cuda":
            method.attr, node.args, node.keywords = "cpu", [], []
        elif method.attr == "to" and len(node.args) == 1 and not node.keywords:
            target = dotted(node.args[0])
            is_device = not target.startswith("torch.") and "dtype" not in target
            if is_device or isinstance(node.args[0], ast.Call):
                node.args = [ast.Constant("cpu")]
