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

# A module may import from earlier rows only.
PYTHON_LAYERS = [
    ["env", "_build", "network", "leaving"],
    ["layout", "codec", "_torch_private", "consensus", "mixed_precision"],
    ["config", "plugin"],
    ["links", "meeting", "agreement"],
    ["plan", "carried", "_ext", "buffers", "clocks", "timeline_data"],
    ["engine", "recorder", "stats", "timeline_views"],
    ["logging_data", "timeline", "wire_state", "request"],
    ["_torch_front"],
    ["ddp"],
    ["integrations"],
    ["__init__"],
    ["_forkserver", "testing"],
]
CPP_LAYERS = [
    ["check.h", "codec_plugin.h"],
    ["kernels"],
    ["items"],
    ["ops", "comm/worker", "engine/timeline"],
    ["codec_ops", "lossy_ops", "comm/collective"],
    ["comm/chain"],
    ["engine/coder"],
    ["engine/topk_coder"],
    [
        "comm/hook",
        "engine/autograd_hooks",
        "engine/plan_watch",
        "engine/step_log",
        "engine/rate_meter",
    ],
    ["comm/python_hook", "engine/wire", "engine/precision"],
    ["engine/coded_wire", "engine/power_wire", "engine/python_codec", "engine/plugin_codec"],
    ["engine/bucket", "engine/hierarchical_wire"],
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


def imported(tree):
    """Names of fastsync's own modules that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top == "fastsync":
                    yield rest or "__init__"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastsync"):
            rest = node.module.partition(".")[2]
            submodules = [a.name for a in node.names if (PACKAGE / f"{a.name}.py").exists()]
            yield from [rest] if rest else submodules or ["__init__"]


@pytest.mark.parametrize("path", python_files(), ids=lambda p: p.name)
def test_python_imports_point_down(path):
    mine = level_of(path.stem, PYTHON_LAYERS)
    for name in imported(ast.parse(path.read_text())):
        assert level_of(name, PYTHON_LAYERS) < mine, f"{path.name} imports {name}"


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


def test_private_names_of_torch_live_in_one_file():
    private = re.compile(r"\bdistributed_c10d\b|from torch\S*\._|import torch\S*\._C|torch\._C\b")
    for path in python_files():
        if path.stem not in ("_torch_private", "_forkserver"):
            assert not private.search(path.read_text()), path.name


def environment_reads(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield node.lineno


def test_the_environment_is_read_in_two_places():
    for path in python_files():
        lines = list(environment_reads(ast.parse(path.read_text())))
        assert not lines or path.stem in ("env", "_build"), f"{path.name}, lines {lines}"
    named = set(re.findall(r'environ\.get\("(\w+)"', (PACKAGE / "_build.py").read_text()))
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
