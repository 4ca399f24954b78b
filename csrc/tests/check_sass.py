#!/usr/bin/env python3
"""Checks the machine code of the CUDA kernels; needs cuobjdump, but no GPU.

Reads the objects that fastsync/_build/recipe.py has compiled into a folder, or else has it compile
them, with errors for spills, local memory and every warning. Asserts of each kernel in the SASS:

  - 16-byte loads and stores (LDG...128, STG...128): as many as a round of the kernel moves, so that
    not one of them has been split, and all loads before the first store
  - 8-byte ones, likewise, where elements of half the size of the widest are moved, and one for the
    factor, which may lie in the device's memory
  - no thread moves 32 bytes in a row by two accesses of 16: each would half-fill its sectors
  - no local memory: no LDL, no STL, no stack
  - at most MAX_REGISTERS registers per thread

cuobjdump and nvdisasm come with the CUDA toolkit, or from
`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm` (found in this interpreter's packages).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

# 65,536 registers per multiprocessor / (64 * 256 threads) = 4 blocks = 1024 threads, which keep at
# least 32 KiB in flight: enough to saturate memory (see kBytesPerThread in pack_cuda.cu).
MAX_REGISTERS = 64

# As in pack_cuda.cu, whose loops must not be unrolled beyond it for the counts to hold.
BYTES_PER_THREAD = 64
ACCESS_BYTES = 16


def load_build() -> ModuleType:
    """fastsync/_build/recipe.py, by its path: the package itself needs torch."""
    path = ROOT / "fastsync" / "_build" / "recipe.py"
    spec = importlib.util.spec_from_file_location("_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_build"] = module
    spec.loader.exec_module(module)
    return module


BUILD = load_build()
SOURCES = [s for s in BUILD.CUDA_SOURCES if "__global__" in (ROOT / "csrc" / s).read_text()]


class CheckError(Exception):
    """The check could not run, or a kernel failed it; the text says which and why."""


SIZES = {"BFloat16": 2, "Half": 2, "float": 4, "double": 8}


# Elements of a quad in codec_group.h, and bytes of their codes.
QUAD = 4
CODE_BYTES = {
    "Float32Codec": 16,
    "BFloat16Codec": 8,
    "Float16Codec": 8,
    "Float8E4M3Codec": 4,
    "Float8E5M2Codec": 4,
    "Int8Codec": 4,
    "Int4Codec": 2,
}

# The first source, two at a time, and one that is left: places that load codes.
SOURCE_LOADS = 4


@dataclass(frozen=True)
class Accesses:
    """Loads and stores of 16 bytes, and of 8 where those are not single elements."""

    loads: int
    stores: int
    loads8: int | None = None
    stores8: int | None = None
    factors: int = 0  # loads of 8 bytes that are not counted in `loads8`

    @property
    def in_flight(self) -> int:
        """The loads before the first store."""
        return self.loads + (self.loads8 or 0) + self.factors

    @classmethod
    def of(cls, loads: list[int], stores: list[int]) -> Accesses:
        """From the bytes of each."""
        return cls(loads.count(16), stores.count(16), loads.count(8), stores.count(8))


def transfer_accesses(dst: str, src: str, accumulate: str) -> Accesses:
    """pack and unpack: kBytesPerThread in the wider type, and the fill.

    The fill store of the kernels that do not accumulate is one more.
    """
    wide = max(SIZES[dst], SIZES[src])
    moved = {t: [ACCESS_BYTES * SIZES[t] // wide] * (BYTES_PER_THREAD // 16) for t in (dst, src)}
    adds = accumulate == "true"
    found = Accesses.of(moved[src] + moved[dst] * adds, moved[dst] + [16] * (not adds))
    found = replace(found, factors=1)
    return replace(found, loads8=None, stores8=None) if wide == 8 else found


def quads(codec: str) -> int:
    """Return how many quads a thread's group has: more where a block's scale is shared."""
    return 2 if codec in ("Float32Codec", "BFloat16Codec") else 4


def group_accesses(codec: str, size: int) -> list[int]:
    """Bytes of the accesses to a group of elements of a size."""
    return [QUAD * size] * quads(codec)


def code_accesses(codec: str) -> list[int]:
    """Return the accesses to a group's codes."""
    return [CODE_BYTES[codec]] * quads(codec)


def encode_accesses(codec: str, tensor: str) -> Accesses:
    """Return the accesses of encode: a group of the tensor and of the residual in, codes and
    residual out.
    """
    loads = group_accesses(codec, SIZES[tensor]) + group_accesses(codec, 4)
    found = Accesses.of(loads, code_accesses(codec) + group_accesses(codec, 4))
    return replace(found, factors=1)


def decode_accesses(codec: str, tensor: str) -> Accesses:
    """Return the accesses of decode: codes of several sources in, a group of the tensor out."""
    return Accesses.of(SOURCE_LOADS * code_accesses(codec), group_accesses(codec, SIZES[tensor]))


def reduce_accesses(codec: str) -> Accesses:
    """Codes of several sources and the residual in, codes and residual out."""
    loads = SOURCE_LOADS * code_accesses(codec) + group_accesses(codec, 4)
    return Accesses.of(loads, code_accesses(codec) + group_accesses(codec, 4))


EXPECTATIONS = (
    (r"transfer_kernel<(\w+), (\w+), (true|false), ", transfer_accesses),
    (r"encode_kernel<(\w+), (\w+), ", encode_accesses),
    (r"decode_kernel<(\w+), (\w+), ", decode_accesses),
    (r"reduce_kernel<(\w+)>", reduce_accesses),
    (r"probe\(?", lambda: Accesses(0, 0)),  # asks only whether there is code for a GPU
)


def expected_accesses(kernel: str) -> Accesses | None:
    """Return what a kernel of this name must do; None for one that is not known here."""
    for pattern, accesses in EXPECTATIONS:
        arguments = re.match(pattern, kernel)
        if arguments is not None:
            return accesses(*arguments.groups())
    return None


@dataclass
class Kernel:
    """One kernel of one architecture, as counted in its SASS."""

    arch: str
    name: str
    loads: int = 0
    in_flight: int = 0
    stores: int = 0
    loads8: int = 0
    stores8: int = 0
    local: int = 0
    places: set[tuple[str, str, int]] = field(default_factory=set)
    registers: int = -1
    stack: int = -1

    def problems(self) -> list[str]:
        """Return what is wrong with the kernel, in words; empty when nothing is."""
        expected = expected_accesses(self.name)
        if expected is None:
            return ["a kernel that this script has no expectations of: add them"]
        loads8 = None if expected.loads8 is None else expected.loads8 + expected.factors
        counts = (
            ("16-byte loads (LDG...128)", self.loads, expected.loads),
            ("16-byte stores (STG...128)", self.stores, expected.stores),
            ("8-byte loads (LDG...64)", self.loads8, loads8),
            ("8-byte stores (STG...64)", self.stores8, expected.stores8),
            ("wide loads before the first store", self.in_flight, expected.in_flight),
        )
        found = [
            f"{n} {what}, {wanted} expected"
            for what, n, wanted in counts
            if wanted is not None and n != wanted
        ]
        if self.local or self.stack != 0:
            found.append(f"local memory: {self.local} LDL/STL, stack {self.stack} bytes")
        halves = [p for p in self.places if (p[0], p[1], p[2] + ACCESS_BYTES) in self.places]
        if halves:
            found.append(
                f"{len(halves)} pairs of 16-byte accesses side by side, which half-fill sectors"
            )
        if not 0 < self.registers <= MAX_REGISTERS:
            found.append(f"{self.registers} registers, at most {MAX_REGISTERS} expected")
        return found


def find_tool(name: str) -> str:
    """A tool of the CUDA toolkit: on PATH, or in the NVIDIA packages of this interpreter."""
    on_path = shutil.which(name)
    if on_path:
        return on_path
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for candidate in sorted(packages.glob(f"*/bin/{name}")):
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise CheckError(
        f"{name} not found on PATH or in {packages}: install the CUDA toolkit"
        f", or `pip install nvidia-cuda-{name}`"
    )


def run(command: list[str], path: str) -> str:
    """The standard output of a command that must succeed."""
    env = dict(os.environ, PATH=path)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise CheckError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def short_name(mangled: str) -> str:
    """The kernel's name with its template arguments, without namespaces."""
    demangler = shutil.which("cu++filt") or shutil.which("c++filt")
    if demangler is None:
        raise CheckError("c++filt not found on PATH: install binutils")
    text = run([demangler, mangled], os.environ["PATH"]).strip()
    text = re.sub(r"fastsync::kernels::|\(anonymous namespace\)::|<unnamed>::", "", text)
    return re.sub(r"^void |\(.*$", "", text)


def read_usage(text: str, kernels: dict[str, Kernel]) -> None:
    """Fills in registers and stack from `cuobjdump -res-usage`."""
    for name, stack, registers in re.findall(
        r"Function (\S+):\s+REG:(?=\d+ STACK:(\d+))(\d+)", text
    ):
        kernels[name].stack = int(stack)
        kernels[name].registers = int(registers)


def count(line: str, kernel: Kernel, streak: int) -> int:
    """Counts one instruction; returns the wide loads since the last store."""
    access = re.search(r"\b(LDG|STG)((?:\.\w+)*)", line)
    if access is None:
        kernel.local += bool(re.search(r"\b(LDL|STL)\b", line))
        return streak
    kind, modifiers = access[1], access[2].split(".")
    bits = next((bits for bits in ("64", "128") if bits in modifiers), None)
    if bits == "128" and (place := re.search(r"\[(R\d+)\.64(?:\+(-?0x[0-9a-f]+))?\]", line)):
        kernel.places.add((kind, place[1], int(place[2] or "0", 16)))
    if kind == "STG":
        kernel.stores += bits == "128"
        kernel.stores8 += bits == "64"
        return 0
    kernel.loads += bits == "128"
    kernel.loads8 += bits == "64"
    streak += bits is not None
    kernel.in_flight = max(kernel.in_flight, streak)
    return streak


def read_sass(text: str, arch: str) -> dict[str, Kernel]:
    """Counts instructions per kernel from `cuobjdump -sass`."""
    kernels: dict[str, Kernel] = {}
    kernel = None
    streak = 0
    for line in text.splitlines():
        header = re.search(r"Function : (\S+)", line)
        if header:
            kernel = kernels[header[1]] = Kernel(arch, short_name(header[1]))
            streak = 0
        elif kernel is not None:
            streak = count(line, kernel, streak)
    return kernels


def inspect(cuobjdump: str, binary: Path, arch: str, path: str) -> list[Kernel]:
    """The kernels of one architecture in a compiled object."""
    base = [cuobjdump, "-arch", f"sm_{arch}"]
    kernels = read_sass(run([*base, "-sass", str(binary)], path), arch)
    if not kernels:
        raise CheckError(f"no kernel for sm_{arch} in {binary}")
    read_usage(run([*base, "-res-usage", str(binary)], path), kernels)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def compile_kernels(folder: Path) -> None:
    """Compiles as the extension does under CI."""
    try:
        toolkit = BUILD.find_toolkit("1")
        BUILD.compile_cuda(toolkit, folder, BUILD.Options(strict=True))
    except BUILD.BuildError as error:
        raise CheckError(error) from error


def check(folder: Path) -> list[Kernel]:
    """Inspects every kernel of every architecture in a folder of objects."""
    cuobjdump, nvdisasm = (find_tool(t) for t in ("cuobjdump", "nvdisasm"))
    path = os.pathsep.join([str(Path(nvdisasm).parent), os.environ["PATH"]])
    binaries = [BUILD.object_file(source, folder) for source in SOURCES]
    return [
        kernel
        for binary in binaries
        for arch in BUILD.DEFAULT_ARCHS
        for kernel in inspect(cuobjdump, binary, arch, path)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="of the objects; default: compile")
    folder = parser.parse_args().folder
    try:
        with tempfile.TemporaryDirectory() as own:
            if folder is None:
                compile_kernels(Path(own))
            kernels = check(folder or Path(own))
    except CheckError as error:
        print(f"check_sass: {error}", file=sys.stderr)
        return 1
    print(f"{'arch':6} {'regs':>4} {'stack':>5} {'LDG.128':>7} {'STG.128':>7}  kernel")
    failures = []
    for k in kernels:
        print(f"sm_{k.arch:3} {k.registers:4} {k.stack:5} {k.loads:7} {k.stores:7}  {k.name}")
        failures += [f"sm_{k.arch} {k.name}: {problem}" for problem in k.problems()]
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(kernels)} kernels checked, {len(failures)} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
