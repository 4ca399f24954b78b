"""The layers of the package: which file may include which, and how long a function may be."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.build.layers import CPP_LAYERS, MODULE_LAYERS, PACKAGE_LAYERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastsync"
CSRC = ROOT / "csrc"
LONGEST_FUNCTION = 80
MOST_ANY = 15  # per thousand lines


@cache
def parsed(path):
    return ast.parse(path.read_text())


def python_files():
    return sorted(PACKAGE.rglob("*.py"))


def cpp_files():
    files = (p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu"))
    return sorted(p for p in files if "tests" not in p.relative_to(CSRC).parts)


def level_of(name, layers):
    for level, members in enumerate(layers):
        if name in members:
            return level
    raise AssertionError(f"{name} has no place in tests/build/test_layers.py; give it one")


def place_of(path):
    """Package and module of a file; a module that lies in no package is one by itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts if len(parts) == 2 else (parts[0], None)


def is_module(place):
    return place.is_dir() or any(place.with_suffix(s).exists() for s in (".py", ".pyi"))


def imported(tree):
    """Fastsync's own modules that a module imports, anywhere in it: (package, module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastsync"):
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            files = [PACKAGE.parent / Path(*name.split(".")) for name in inside]
            found = [f for f in files if is_module(f)]
            names = [".".join(f.relative_to(PACKAGE.parent).parts) for f in found] or [node.module]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "fastsync":
                yield (rest[0] if rest else "__init__", rest[1] if len(rest) > 1 else None)


def points_down(package, module, other, name):
    """Return whether a module may import another."""
    if other != package:
        return level_of(other, PACKAGE_LAYERS) < level_of(package, PACKAGE_LAYERS)
    layers = MODULE_LAYERS[package]
    return level_of(name or "__init__", layers) < level_of(module, layers)


def test_python_imports_point_down():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {other}.{name}"
        for path in python_files()
        for other, name in imported(parsed(path))
        if not points_down(*place_of(path), other, name)
    ]
    assert not wrong


def cpp_level(relative):
    for level, members in enumerate(CPP_LAYERS):
        for member in members:
            if relative == member or re.match(rf"{re.escape(member)}(/|\.|$)", relative):
                return level
    raise AssertionError(f"{relative} has no place in tests/build/test_layers.py; give it one")


def includes(path):
    for name in re.findall(r'#include "([^"]+)"', path.read_text()):
        for base in (path.parent, CSRC):
            if (base / name).exists():
                yield (base / name).resolve().relative_to(CSRC).as_posix()
                break
        else:
            raise AssertionError(f"{path} includes {name}, which is not there")


def may_include(unit, name):
    same_unit = Path(name).with_suffix("") == Path(unit).with_suffix("")
    in_kernels = name.startswith("kernels/") and unit.startswith("kernels/")
    return same_unit or in_kernels or cpp_level(name) < cpp_level(unit)


def test_includes_point_down():
    wrong = [
        f"{unit} includes {name}"
        for path in cpp_files()
        for unit in [path.relative_to(CSRC).as_posix()]
        for name in includes(path)
        if not may_include(unit, name)
    ]
    assert not wrong


def test_kernels_see_no_torch_header():
    for path in cpp_files():
        if "kernels" in path.parts or path.name == "check.h":
            assert not re.search(r"#include <(torch|ATen|c10)", path.read_text()), path


def test_memory_threads_and_devices_have_one_place_each():
    """An allocator, a way to divide work or another device is a change of one file in ops/."""
    allocates = r"at::(empty|zeros|ones|full)\w*\(|\.clone\(|\.new_\w+\("
    places = {
        "ops/buffers.cpp": allocates,
        "ops/parallel.h": r"at::parallel_for",
        "ops/device.h": r"#ifdef FASTSYNC_WITH_CUDA",
        "kernels/random.h": r"0x9e3779b97f4a7c15",
    }
    for place, pattern in places.items():
        assert re.search(pattern, (CSRC / place).read_text()), f"{place} is not the place"
        for path in cpp_files():
            unit = path.relative_to(CSRC).as_posix()
            if Path(unit).with_suffix("") == Path(place).with_suffix(""):
                continue
            found = re.search(pattern, path.read_text())
            assert not found, f"{unit}: {found[0]} belongs in {place}"


def test_only_the_hooks_know_autograd_and_only_comm_knows_c10d():
    for path in cpp_files():
        text, unit = path.read_text(), path.relative_to(CSRC).as_posix()
        if not unit.startswith("reducer/autograd_hooks"):
            assert "torch/csrc/autograd" not in text, unit
        if not unit.startswith(("comm/", "shm/", "unity/")):
            assert "c10d/" not in text, unit
            assert "c10d::" not in text, unit


def test_private_names_of_torch_live_in_one_package():
    private = re.compile(r"\bdistributed_c10d\b|from torch\S*\._|import torch\S*\._C|torch\._C\b")
    for path in python_files():
        if path.parent.name != "_torch" and path.stem != "_forkserver":
            assert not private.search(path.read_text()), path.name


def test_one_module_calls_the_extension():
    """Check that only reducer/core.py knows C++ by its types; other modules go through it."""
    calls = re.compile(r"\bextension\.load\(|fastsync(\._C| import _C)\b")
    callers = {
        p for p in python_files() if p.parent.name != "_build" and calls.search(p.read_text())
    }
    assert callers == {PACKAGE / "reducer" / "core.py"}


def mentions_of_any(tree):
    """In code: imports, annotations, casts."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if "Any" in names or (isinstance(node, ast.Name) and node.id == "Any"):
            yield node


def test_types_are_said():
    files = [*python_files(), *PACKAGE.glob("*.pyi")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    found = sum(len(list(mentions_of_any(parsed(path)))) for path in files)
    assert found <= MOST_ANY * lines / 1000, f"{found} of Any in {lines} lines"
    assert len(list(mentions_of_any(ast.parse("from typing import Any\nx: list[Any] = []")))) == 2


def environment_reads(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield node.lineno


def test_the_environment_is_read_in_two_places():
    for path in python_files():
        lines = list(environment_reads(parsed(path)))
        assert not lines or path.parent.name == "_build", f"{path.name}, lines {lines}"
    named = set(
        re.findall(r'environ\.get\("(\w+)"', (PACKAGE / "_build" / "recipe.py").read_text())
    )
    assert named <= {"CUDA_HOME", "CUDA_PATH", "CXX"}
    for path in cpp_files():
        assert "getenv" not in path.read_text(), path.name


def python_functions(path):
    """Tell functions by their indentation: parsing every file takes fifty times as long."""
    inside, last = [], 0
    for number, line in enumerate([*path.read_text().splitlines(), "end"]):
        text = line.lstrip()
        indent = len(line) - len(text)
        while text and text[0] not in ")]}" and inside and indent <= inside[-1][0]:
            _, start, name = inside.pop()
            yield name, last - start + 1
        if defined := re.match(r"(?:async )?def (\w+)", text):
            inside.append((indent, number, defined[1]))
        last = number if text else last


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


def functions(path):
    """Return names and lengths of a file's functions."""
    return list(python_functions(path) if path.suffix == ".py" else cpp_functions(path))


def test_no_function_grows_too_long():
    files = [
        *python_files(),
        *(ROOT / "tests").rglob("*.py"),
        *cpp_files(),
        *measuring_files(".py"),
    ]
    too_long = [
        f"{path.relative_to(ROOT)}, {name}: {size} lines"
        for path in files
        for name, size in functions(path)
        if size > LONGEST_FUNCTION
    ]
    assert not too_long


def test_the_scan_sees_functions():
    """Keep the limit above from passing on an empty list."""
    assert len(list(python_functions(PACKAGE / "ddp" / "fast_ddp.py"))) > 10
    assert len(list(cpp_functions(CSRC / "reducer" / "reducer.cpp"))) > 20
    assert len(list(imported(parsed(PACKAGE / "ddp" / "fast_ddp.py")))) > 3


# Benchmarks and examples likewise: folders from the lowest, then the modules within each. Examples
# can be copied out of the repository, so they know of nothing but themselves and fastsync.
MEASURING = {"bench": ROOT / "bench", "examples": ROOT / "examples"}
MEASURING_LAYERS = [
    ["examples.common"],
    ["examples"],
    ["bench.models"],
    ["bench.report"],
    ["bench.measure"],
    ["bench.commands"],
    ["bench.gpu"],
    ["bench"],
]
MEASURING_MODULES = {
    "bench.commands": [["curves", "zero"], ["charged", "modes"]],
    "bench.gpu": [["guard", "mps", "stages"], ["all"]],
    "bench.measure": [
        ["gpu", "netns", "peers", "transfers"],
        ["bare", "codecs", "jobs"],
        ["benchmark"],
    ],
    "bench.models": [["workload"], ["classic", "paced"], ["known"], ["__init__"]],
    "bench.report": [["charts", "formulas", "summary", "tables"], ["figures"], ["documents"]],
    "examples": [
        ["checkpoint", "data", "manual_parallel", "ring_allreduce", "shapes"],
        ["gpt", "training"],
        ["demo", "experts", "limited_memory", "mpi", "padded"],
    ],
    "examples.common": [
        ["ranks"],
        ["machine", "text", "variants"],
        ["training"],
        ["check", "costs"],
        ["rounds"],
    ],
}


def measuring_files(*suffixes):
    found = (path for folder in MEASURING.values() for path in folder.rglob("*"))
    return sorted(path for path in found if path.suffix in suffixes)


def module_name(path):
    """Dotted folder and module of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1]), parts[-1]


def measuring_imports(tree):
    """Modules of bench and examples that are imported: dotted folder and module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in (n for n in names if n.split(".")[0] in MEASURING):
            places = (
                ROOT / name.replace(".", "/"),
                ROOT / name.rpartition(".")[0].replace(".", "/"),
            )
            for place in places:
                if place.with_suffix(".py").exists() or place.is_dir():
                    yield module_name(place / "__init__" if place.is_dir() else place)
                    break


def measuring_points_down(folder, module, other, name):
    if (other, name) == ("bench", "__init__"):
        return True  # a constant, set before anything is imported
    if other != folder:
        return level_of(other, MEASURING_LAYERS) < level_of(folder, MEASURING_LAYERS)
    layers = MEASURING_MODULES[folder]
    return name == module or level_of(name, layers) < level_of(module, layers)


def test_imports_of_benchmarks_and_examples_point_down():
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}.{name}"
        for path in measuring_files(".py")
        for other, name in measuring_imports(parsed(path))
        if not measuring_points_down(*module_name(path), other, name)
    ]
    assert not wrong


def test_the_package_knows_of_no_benchmark_and_no_example():
    for path in python_files():
        assert not list(measuring_imports(parsed(path))), path.name


def test_the_scan_sees_imports_of_benchmarks():
    found = set(measuring_imports(parsed(ROOT / "bench" / "commands" / "step.py")))
    assert {("bench.measure", "benchmark"), ("examples.common", "rounds")} <= found
