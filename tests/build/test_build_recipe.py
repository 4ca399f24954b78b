"""Sources, flags and tools of the extension, without building it."""

import re
import subprocess
import sys

import pytest

from fastsync._build import recipe
from fastsync._build.recipe import BuildError, Options


def test_sources_exist_and_none_is_forgotten():
    root = recipe.source_dir()
    named = {*recipe.CPP_SOURCES, *recipe.CUDA_SOURCES}
    there = {p.relative_to(root).as_posix() for p in recipe.all_files() if p.suffix != ".h"}
    there = {name for name in there if not name.startswith("unity/")}
    assert named == there


def test_flags_that_results_depend_on():
    """Fused multiply-adds round once where others round twice."""
    assert "-ffp-contract=off" in recipe.CXX_FLAGS
    assert "-fmad=false" in recipe.NVCC_FLAGS
    assert "-O3" in recipe.CXX_FLAGS


def test_cmake_gets_the_same_definition():
    command = [sys.executable, recipe.__file__, "--cmake"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "-ffp-contract=off" in text
    assert "kernels/pack_cpu.cpp" in text
    assert "-fmad=false" in text


def test_arch_flags():
    flags = recipe.arch_flags(("80", "90"))
    assert flags == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_fingerprint_covers_what_shapes_the_binary(monkeypatch):
    ampere = Options(("80",))
    first = recipe.fingerprint(None, ampere)
    assert first == recipe.fingerprint(None, ampere)
    assert first != recipe.fingerprint(None, Options(("80",), "thread"))
    assert first != recipe.fingerprint(None, Options(("80",), strict=True))
    toolkit = recipe.Toolkit(recipe.source_dir(), recipe.source_dir(), "12.0")
    assert first != recipe.fingerprint(toolkit, ampere)
    assert recipe.fingerprint(toolkit, ampere) != recipe.fingerprint(toolkit, Options(("90",)))
    monkeypatch.setattr(recipe, "CXX_FLAGS", ("-O0",))
    assert first != recipe.fingerprint(None, ampere)


WARNED_OF = "int sum(int only, int) { int unread; return only; }\n"


@pytest.mark.parametrize("strict", [False, True])
def test_warnings_are_errors_only_where_asked(tmp_path, strict):
    """A user's compiler may warn of what ours does not."""
    source = tmp_path / "warned_of.cpp"
    source.write_text(WARNED_OF)
    compiler = recipe.cxx().split()
    flags = Options(strict=strict).cxx_flags
    command = [*compiler, *flags, "-c", str(source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "unread" in done.stderr
    assert (done.returncode != 0) is strict
    promoted = [f for f in Options(strict=strict).nvcc_flags if "Werror" in f]
    assert bool(promoted) is strict


def test_no_toolkit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert recipe.find_toolkit("0") is None
    assert recipe.find_toolkit("found") is None
    with pytest.raises(BuildError, match="no nvcc in PATH"):
        recipe.find_toolkit("1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="FASTSYNC_CUDA=0"):
        recipe.find_toolkit("found")
    assert recipe.find_toolkit("0") is None
    monkeypatch.setattr(recipe, "has_gpu", lambda: False)
    assert recipe.find_toolkit("auto") is None


def test_every_source_is_compiled_once():
    root = recipe.source_dir()
    units = recipe.translation_units()
    compiled = [name for name in units if not name.startswith("unity/")]
    for unit in (name for name in units if name.startswith("unity/")):
        lines = re.findall(r'^#include "../(.*)"$', (root / unit).read_text(), re.MULTILINE)
        compiled += lines
    assert sorted(compiled) == sorted(recipe.CPP_SOURCES)


def test_a_source_in_no_unit_is_compiled_by_itself(monkeypatch):
    monkeypatch.setattr(recipe, "CPP_SOURCES", (*recipe.CPP_SOURCES, "ops/another.cpp"))
    assert "ops/another.cpp" in recipe.translation_units()
