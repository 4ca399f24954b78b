"""Sources and flags of the C++/CUDA extension, stated once.

The JIT build, ``setup.py`` (which loads this file by its path) and CMake all read them from here:

* ``python recipe.py --out DIR`` compiles the extension into ``DIR`` (the JIT build runs this),
* ``python recipe.py --cmake`` prints sources and flags for CMake.

The CUDA kernels see no torch header. They are compiled by ``nvcc`` alone and linked with a static
CUDA runtime, so a build needs no CUDA build of torch, and the result also runs without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODULE = "_C"
# By their folder in csrc.
_CPP_NAMES = {
    "kernels": "codec_cpu digest_cpu norm_cpu pack_cpu select_cpu sum_cpu",
    "ops": "buffers checks codec_ops device items lossy_ops ops pool resizable_storage",
    "codec": "coder",
    "comm": "collective host_backend peers pipeline python_hook worker",
    "shm": "channel collective mailbox memory messages segment",
    "fault": "device_monitor fault_events fault_watch process step_timing",
    "transport": (
        "choose coded codes coding flat hierarchical hooked pipelined regions scattered sparse "
        "transport"
    ),
    "reducer": "autograd_hooks bucket flags plan_watch precision reducer step_log timeline usage",
    "fsdp": "group_codes group_log group_reduce param_group",
    "bindings": "groups module ops specs watch",
}
CPP_SOURCES = tuple(
    f"{folder}/{name}.cpp"
    for folder, names in _CPP_NAMES.items()
    for name in names.split()
)
CUDA_SOURCES = tuple(f"kernels/{name}_cuda.cu" for name in ("driver", "pack", "codec"))
# torch's own load() adds no -O flag, which costs the pack kernels a factor of ten. A product and a
# sum are never contracted into one rounding: host, device and the slow twins must agree on bits.
KERNEL_CXX_FLAGS = ("-O3", "-ffp-contract=off")
CXX_FLAGS = (
    *KERNEL_CXX_FLAGS,
    "-g0",  # distutils adds -g, which is of no use in a stripped library
    "-DAT_PER_OPERATOR_HEADERS",  # torch's headers include the operators that they use, not all
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)
KERNEL_NVCC_FLAGS = ("-O3", "-fmad=false")
NVCC_FLAGS = (
    *KERNEL_NVCC_FLAGS,
    "-std=c++17",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "--threads=0",  # architectures in parallel
)
# For developers of the sources: the compilers of users may have more warnings.
STRICT_CXX_FLAGS = ("-Werror",)
STRICT_NVCC_FLAGS = (
    "-Werror=all-warnings",
    "-Xptxas=-Werror,-warn-spills,-warn-lmem-usage",
)
STRIP_FLAG = "-Wl,-s"
CUDA_LINK_FLAGS = ("-lcudart_static", "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,ALL")
DEFAULT_ARCHS = ("80", "90", "100")
# Instrumented code at -O3 takes minutes to compile and finds nothing more; code that goes on after
# an error takes a third longer than code that ends. gcc, which inlines less at -O1, takes optional
# values in torch's headers for uninitialised.
_SANITIZED = (
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
    "-Wno-maybe-uninitialized",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a build. `strict` turns warnings into errors."""

    archs: Sequence[str] = DEFAULT_ARCHS
    sanitize: str = ""
    strict: bool = False

    @property
    def cxx_flags(self) -> list[str]:
        strict = STRICT_CXX_FLAGS if self.strict else ()
        return [*CXX_FLAGS, *strict, *sanitizer_flags(self.sanitize)]

    @property
    def nvcc_flags(self) -> list[str]:
        strict = STRICT_NVCC_FLAGS if self.strict else ()
        return [*NVCC_FLAGS, *strict, *arch_flags(self.archs)]


class BuildError(RuntimeError):
    """The extension cannot be built; the text names what is missing and the remedy."""


def source_dir() -> Path:
    """Return the folder of the C++ sources: beside the package in a checkout, else inside it."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package.parent / "csrc", package / "csrc"):
        if (candidate / "bindings/module.cpp").exists():
            return candidate
    raise BuildError(f"the C++ sources are missing: no csrc/bindings/module.cpp near {package}")


def all_files() -> list[Path]:
    """Return every file that the compiled extension depends on, in a fixed order."""
    root = source_dir()
    kinds = (".h", ".cpp", ".cu")
    files = (p for p in root.rglob("*") if p.suffix in kinds)
    return sorted(p for p in files if p.relative_to(root).parts[0] != "tests")


def translation_units() -> list[str]:
    """Return the files for the C++ compiler: those of csrc/unity, and each source that is in none.

    A unit includes several sources, which share the cost of parsing torch's headers.
    """
    root = source_dir()
    units = sorted(root.glob("unity/*.cpp"))
    united = {
        (unit.parent / name).resolve().relative_to(root.resolve()).as_posix()
        for unit in units
        for name in re.findall(r'^#include "(.*[.]cpp)"$', unit.read_text(), re.MULTILINE)
    }
    alone = [source for source in CPP_SOURCES if source not in united]
    return [f"unity/{unit.name}" for unit in units] + alone


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler, its root folder and its version text."""

    nvcc: Path
    root: Path
    version: str

    @property
    def library_dir(self) -> Path:
        for name in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
            if (self.root / name / "libcudart_static.a").exists():
                return self.root / name
        raise BuildError(
            f"the CUDA toolkit at {self.root} has no libcudart_static.a; install its runtime "
            "development files, or set FASTSYNC_CUDA=0 to build without CUDA"
        )


def has_gpu() -> bool:
    """Return whether this machine has one of NVIDIA's, without starting its driver."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def find_toolkit(wanted: str = "auto") -> Toolkit | None:
    """Find the CUDA toolkit.

    Args:
        wanted: ``1`` (insist), ``0`` (None), ``auto`` (None where there is no nvcc, or no GPU), or
            ``found`` (None where there is no nvcc).

    Raises:
        BuildError: a toolkit was found but does not work, or was asked for and is missing.
    """
    if wanted == "0" or (wanted == "auto" and not has_gpu()):
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if found is None:
        if wanted == "1" or home:
            where = f"{home}/bin" if home else "PATH"
            raise BuildError(
                f"no nvcc in {where}; install a CUDA toolkit or point CUDA_HOME at one, "
                "or set FASTSYNC_CUDA=0 to build without CUDA"
            )
        return None
    nvcc = Path(found)
    return Toolkit(nvcc, _toolkit_root(nvcc, home), _run_nvcc(nvcc, "--version"))


def _run_nvcc(nvcc: Path, *args: str) -> str:
    try:
        done = subprocess.run([nvcc, *args], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(_broken(nvcc, str(error))) from error
    if done.returncode != 0:
        raise BuildError(_broken(nvcc, (done.stderr or done.stdout).strip()))
    return (done.stdout + done.stderr).strip()


def _broken(nvcc: Path, detail: str) -> str:
    return (
        f"the CUDA compiler {nvcc} does not work: {detail or 'no output'}. Repair the toolkit, "
        "point CUDA_HOME at a working one, or set FASTSYNC_CUDA=0 to build without CUDA"
    )


def _toolkit_root(nvcc: Path, home: str | None) -> Path:
    """nvcc itself may be a wrapper somewhere else; the folder with the headers is the root."""
    listing = _run_nvcc(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
    tops = [line.split("TOP=", 1)[1] for line in listing.splitlines() if "TOP=" in line]
    candidates = [home, *tops, str(nvcc.resolve().parent.parent), "/usr/local/cuda"]
    for candidate in candidates:
        if candidate and (Path(candidate) / "include" / "cuda_runtime.h").exists():
            return Path(candidate).resolve()
    raise BuildError(_broken(nvcc, "its headers (include/cuda_runtime.h) are nowhere to be found"))


def arch_flags(archs: Sequence[str]) -> list[str]:
    """Return flags for machine code of each architecture, and for PTX of the newest."""
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def compile_cuda(toolkit: Toolkit, out: Path, options: Options) -> list[str]:
    """Compile the CUDA sources with nvcc alone, all at once; return the object files.

    Raises:
        BuildError: nvcc failed; carries its output.
    """
    with ThreadPoolExecutor(len(CUDA_SOURCES)) as pool:
        jobs = [
            pool.submit(_compile_one, toolkit.nvcc, options.nvcc_flags, source, out)
            for source in CUDA_SOURCES
        ]
    return [job.result() for job in jobs]


def object_file(source: str, out: Path) -> Path:
    """Return the file that a CUDA source is compiled into."""
    return out / (Path(source).stem + ".cuda.o")


def _compile_one(nvcc: Path, flags: Sequence[str], source: str, out: Path) -> str:
    target = object_file(source, out)
    command = [str(nvcc), *flags, "-c", str(source_dir() / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(_broken(nvcc, f"\n{done.stdout}{done.stderr}"))
    return str(target)


def check_compilers() -> None:
    """Raise BuildError where the C++ compiler or ninja is missing."""
    compiler = cxx()
    if shutil.which(compiler.split()[0]) is None:
        raise BuildError(
            f"no C++ compiler: {compiler!r} is not on PATH. Install one "
            "(Debian: apt-get install g++) or name yours in CXX"
        )
    if shutil.which("ninja") is None:
        raise BuildError("ninja is not on PATH; install it with: pip install ninja")


def cxx() -> str:
    """Return the C++ compiler that torch's build helpers will call."""
    return os.environ.get("CXX", "c++")


def sanitizer_flags(sanitize: str) -> list[str]:
    return [f"-fsanitize={sanitize}", *_SANITIZED] if sanitize else []


def sources_digest() -> str:
    """Return a digest of this file and of every source of the extension."""
    files = [*all_files(), Path(__file__)]
    facts = (f"{p.name}:{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def binary_identity() -> dict[str, str]:
    """Return the properties that a binary must share with this process to be loaded into it.

    A binary built against one minor version of torch must not be loaded into another.
    """
    import torch

    return {
        "sources": sources_digest(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "abi": str(sysconfig.get_config_var("SOABI") or sys.version),
    }


def fingerprint(toolkit: Toolkit | None, options: Options) -> str:
    """Return a digest of all inputs: sources, flags, compilers, torch and Python."""
    compiler = subprocess.run([*cxx().split(), "--version"], capture_output=True, text=True)
    facts = [
        *binary_identity().values(),
        *options.cxx_flags,
        STRIP_FLAG,
        compiler.stdout,
        *((toolkit.version, *options.nvcc_flags) if toolkit else ("no cuda",)),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The inputs of a C++ extension builder. CUDA objects are compiled beforehand."""

    sources: list[str]
    include_dirs: list[str]
    cxx_flags: list[str]
    link_flags: list[str]


def recipe(out: Path, toolkit: Toolkit | None, options: Options) -> Recipe:
    """Compile the CUDA kernels, if there is a toolkit, and describe the rest of the build."""
    flags = options.cxx_flags
    link = sanitizer_flags(options.sanitize)[:1] or [STRIP_FLAG]
    if toolkit is not None:
        flags.append("-DFASTSYNC_WITH_CUDA")
        link += [*compile_cuda(toolkit, out, options), f"-L{toolkit.library_dir}", *CUDA_LINK_FLAGS]
    root = source_dir()
    return Recipe([str(root / u) for u in translation_units()], [str(root)], flags, link)


def build(out: Path, wanted_cuda: str, options: Options) -> None:
    """Compile the extension into ``out``.

    Raises:
        BuildError: a tool is missing or broken.
        RuntimeError: the compiler refused the sources.
    """
    from torch.utils import cpp_extension

    check_compilers()
    plan = recipe(out, find_toolkit(wanted_cuda), options)
    cpp_extension.load(
        name=MODULE,
        sources=plan.sources,
        extra_include_paths=plan.include_dirs,
        extra_cflags=plan.cxx_flags,
        extra_ldflags=plan.link_flags,
        build_directory=str(out),
        with_cuda=False,
        verbose=True,
    )


def install_beside_package(out: Path) -> Path:
    """Copy the extension in ``out`` to where `import fastsync` finds it prebuilt."""
    package = Path(__file__).resolve().parents[1]
    target = package / f"{MODULE}.so"
    shutil.copy(out / target.name, target)
    (package / "_prebuilt.json").write_text(json.dumps(binary_identity()))
    return target


def _cmake_commands() -> str:
    root = source_dir()
    kernels = [root / s for s in CPP_SOURCES if s.startswith("kernels/")]
    values = {
        "FASTSYNC_KERNEL_SOURCES": kernels,
        "FASTSYNC_CXX_FLAGS": KERNEL_CXX_FLAGS,
        "FASTSYNC_NVCC_FLAGS": KERNEL_NVCC_FLAGS,
    }
    return "\n".join(f"set({k} {' '.join(map(str, v))})" for k, v in values.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to compile the extension into")
    parser.add_argument("--cmake", action="store_true", help="print sources and flags for CMake")
    parser.add_argument("--cuda", default="auto", choices=("auto", "found", "0", "1"))
    parser.add_argument("--archs", default=";".join(DEFAULT_ARCHS), help="such as '80;90;100'")
    parser.add_argument("--sanitize", default="", help="such as address,undefined")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--beside", action="store_true", help="install it beside the package")
    args = parser.parse_args()
    if args.cmake:
        print(_cmake_commands())
        return 0
    if args.out is None:
        parser.error("one of --out and --cmake is needed")
    try:
        args.out = args.out.resolve()  # ninja runs within it
        args.out.mkdir(parents=True, exist_ok=True)
        build(args.out, args.cuda, Options(args.archs.split(";"), args.sanitize, args.strict))
        if args.beside:
            print(f"fastsync: installed {install_beside_package(args.out)}")
    except RuntimeError as error:
        print(f"fastsync: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
