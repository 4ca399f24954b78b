"""The layers of the package: who may include whom, and how large things may get."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fastsync"
CSRC = ROOT / "csrc"
LONGEST_FUNCTION = 80
LONGEST_FILE = 450

# Packages, from the lowest: a module may import from packages above its own line only. What stands
# in one line does not know of each other.
PACKAGE_LAYERS = [
    ["build", "torch_private"],
    ["wire"],
    ["plan"],
    ["ranks"],
    ["engine"],
    ["timeline"],
    ["front"],
    ["ddp"],
    ["replacing"],
    ["integrations"],
    ["__init__"],
    ["run", "startup"],
    ["testing"],
]
# Within a package likewise, module by module. Where a package has no line here, its modules do not
# know of each other.
MODULE_LAYERS = {
    "build": [["env", "recipe"], ["extension"]],
    "engine": [["state", "agreement"], ["engine"], ["checkpoint"]],
    "front": [["buffers", "mixed_precision", "logging_data", "request"], ["torch_faces"]],
    "plan": [["layout", "topology"], ["policy"], ["buckets"]],
    "testing": [["_forkserver", "ranks"], ["__init__"]],
    "timeline": [
        ["data", "policy"],
        ["views", "recorder", "stats"],
        ["command"],
        ["__init__", "__main__"],
    ],
    "torch_private": [["callers", "graphs", "groups", "parallel"], ["__init__"]],
    "wire": [["formats"], ["plugins"]],
}
CPP_LAYERS = [
    ["check.h", "codec_plugin.h"],
    ["kernels"],
    ["ops/items"],
    ["ops/ops", "comm/worker", "engine/timeline"],
    ["ops/codec_ops", "ops/lossy_ops", "comm/collective"],
    ["comm/chain"],
    ["codec/coder"],
    ["codec/topk_coder", "codec/python_codec", "codec/plugin_codec"],
    [
        "comm/hook",
        "engine/autograd_hooks",
        "engine/plan_watch",
        "engine/step_log",
        "engine/rate_meter",
    ],
    ["comm/python_hook", "transport/transport", "engine/precision"],
    ["transport/coded", "transport/low_rank"],
    ["transport/hierarchical"],
    ["engine/bucket"],
    ["engine/bucket_finish"],
    ["engine/usage"],
    ["engine/reducer"],
    ["engine/reducer_state"],
    ["bindings.cpp"],
]


def python_files():
    return sorted(PACKAGE.rglob("*.py"))


def cpp_files():
    files = (p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu"))
    return sorted(p for p in files if "tests" not in p.relative_to(CSRC).parts)


def level_of(name, layers):
    for level, members in enumerate(layers):
        if name in members:
            return level
    raise AssertionError(f"{name} has no place in tests/test_layers.py; give it one")


def place_of(path):
    """Package and module of a file; a module that lies in no package is one by itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts if len(parts) == 2 else (parts[0], None)


def imported(tree):
    """Fastsync's own modules that a module imports, anywhere in it: (package, module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastsync"):
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            files = [PACKAGE.parent / Path(*name.split(".")) for name in inside]
            found = [f for f in files if f.with_suffix(".py").exists() or f.is_dir()]
            names = [".".join(f.relative_to(PACKAGE.parent).parts) for f in found] or [node.module]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "fastsync":
                yield (rest[0] if rest else "__init__", rest[1] if len(rest) > 1 else None)


@pytest.mark.parametrize("path", python_files(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_python_imports_point_down(path):
    package, module = place_of(path)
    mine = level_of(package, PACKAGE_LAYERS)
    for other, name in imported(ast.parse(path.read_text())):
        where = f"{path.relative_to(PACKAGE)} imports {other}.{name}"
        if other != package:
            assert level_of(other, PACKAGE_LAYERS) < mine, where
            continue
        assert package in MODULE_LAYERS, where
        layers = MODULE_LAYERS[package]
        assert level_of(name or "__init__", layers) < level_of(module, layers), where


def cpp_level(relative):
    for level, members in enumerate(CPP_LAYERS):
        for member in members:
            if relative == member or re.match(rf"{re.escape(member)}(/|\.|$)", relative):
                return level
    raise AssertionError(f"{relative} has no place in tests/test_layers.py; give it one")


def includes(path):
    for name in re.findall(r'#include "([^"]+)"', path.read_text()):
        for base in (path.parent, CSRC):
            if (base / name).exists():
                yield (base / name).resolve().relative_to(CSRC).as_posix()
                break
        else:
            raise AssertionError(f"{path} includes {name}, which is not there")


@pytest.mark.parametrize("path", cpp_files(), ids=lambda p: p.relative_to(CSRC).as_posix())
def test_includes_point_down(path):
    relative = path.relative_to(CSRC).as_posix()
    mine = cpp_level(relative)
    for name in includes(path):
        same_unit = Path(name).with_suffix("") == Path(relative).with_suffix("")
        in_kernels = name.startswith("kernels/") and relative.startswith("kernels/")
        assert same_unit or in_kernels or cpp_level(name) < mine, f"{relative} includes {name}"


def test_kernels_see_no_torch_header():
    for path in cpp_files():
        if "kernels" in path.parts or path.name == "check.h":
            assert not re.search(r"#include <(torch|ATen|c10)", path.read_text()), path


def test_only_the_hooks_know_autograd_and_only_comm_knows_c10d():
    for path in cpp_files():
        text, unit = path.read_text(), path.relative_to(CSRC).as_posix()
        if not unit.startswith("engine/autograd_hooks"):
            assert "torch/csrc/autograd" not in text, unit
        if not unit.startswith("comm/"):
            assert "c10d/" not in text, unit
            assert "c10d::" not in text, unit


def test_private_names_of_torch_live_in_one_package():
    private = re.compile(r"\bdistributed_c10d\b|from torch\S*\._|import torch\S*\._C|torch\._C\b")
    for path in python_files():
        if path.parent.name != "torch_private" and path.stem != "_forkserver":
            assert not private.search(path.read_text()), path.name


def environment_reads(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield node.lineno


def test_the_environment_is_read_in_two_places():
    for path in python_files():
        lines = list(environment_reads(ast.parse(path.read_text())))
        assert not lines or path.parent.name == "build", f"{path.name}, lines {lines}"
    named = set(re.findall(r'environ\.get\("(\w+)"', (PACKAGE / "build" / "recipe.py").read_text()))
    assert named <= {"CUDA_HOME", "CUDA_PATH", "CXX"}
    for path in cpp_files():
        assert "getenv" not in path.read_text(), path.name


def python_functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1, node


def cpp_functions(path):
    """Blocks that start at a line's beginning and end with a brace there; namespaces excepted."""
    start = None
    for number, line in enumerate(path.read_text().splitlines()):
        opens = line.endswith("{") and not re.match(r"(namespace|class|struct|enum|extern)\b", line)
        if opens and re.match(r"[A-Za-z]", line):
            start = (number, line)
        elif line.startswith("}") and start is not None:
            yield start[1], number - start[0] + 1
            start = None


def everything():
    tests = sorted((ROOT / "tests").glob("*.py"))
    return [*python_files(), *tests, *cpp_files()]


@pytest.mark.parametrize("path", everything(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_grows_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines"
    if path.suffix == ".py":
        found = [(n, size) for n, size, _ in python_functions(path)]
    else:
        found = list(cpp_functions(path))
    too_long = [f"{name}: {size} lines" for name, size in found if size > LONGEST_FUNCTION]
    assert not too_long


def test_the_scan_sees_functions():
    """So that the limits above mean something."""
    assert len(list(python_functions(PACKAGE / "ddp.py"))) > 10
    assert len(list(cpp_functions(CSRC / "engine" / "reducer.cpp"))) > 20
    assert len(list(imported(ast.parse((PACKAGE / "ddp.py").read_text())))) > 3
