"""The simulated device and the extension built for it, compiled once and cached.

`python -m tests.simulated.build FOLDER NAME` compiles one of them into a folder.
"""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

from fastsync._build import extension, recipe
from fastsync._build.env import Env

HERE = Path(__file__).parent / "csrc"
DEVICE, ENGINE = "_device", "_C"
_DEVICE_UNITS = ("device", "operators", "backend")
_OWN_UNITS = {"unity/codes.cpp": HERE / "codes.cpp"}
# As in the host tests of CMakeLists.txt.
_KERNEL = """#define FS_DEVICE_FORMS 1
#include "cuda_runtime.h"
#include "kernels/{}"
"""
# At -O3 compiling takes a third longer, and finds nothing more.
_FLAGS = [*recipe.CXX_FLAGS, "-O1", "-DFASTSYNC_WITH_CUDA", "-Wno-unknown-pragmas"]
_NOTED = ["-fsanitize=thread", "-Wno-maybe-uninitialized"]


def library(name):
    """Return the path of a compiled library, which the first process to ask for it builds."""
    cache = Env.read().cache_dir
    folder = cache / f"simulated{name}-{_digest(name)}"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{name}.so"
    with (folder / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if not done.exists():
            command = [sys.executable, "-m", __name__, str(folder), name]
            ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            text = ran.stdout.decode(errors="replace")
            (folder / "log").write_text(text)
            if ran.returncode != 0:
                raise RuntimeError(f"building {name} for the simulated device failed:\n{text}")
            done.touch()
    return built


def _digest(name):
    files = [HERE / "stream.h", Path(__file__)]
    if name == DEVICE:
        files += [HERE / "device.h", *(HERE / f"{unit}.cpp" for unit in _DEVICE_UNITS)]
    else:
        files += [*recipe.all_files(), *recipe.source_dir().glob("tests/cuda_*.h")]
        files += [HERE / "cuda_runtime.h", HERE / "accesses.h", HERE / "accesses.cpp"]
        files += [*_OWN_UNITS.values(), Path(recipe.__file__)]
    identity = {**recipe.binary_identity(), "sources": ""}
    facts = [*identity.values(), recipe.cxx()]
    facts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _engine_parts():
    """Return the sources to compile, and objects that serve any device.

    Only one unit instantiates kernels of devices. The others' objects are those of the extension,
    where the first import has compiled it.
    """
    root, compiled = recipe.source_dir(), extension.find().parent
    sources, objects = [], []
    for unit in recipe.translation_units():
        shared = compiled / f"{Path(unit).stem}.o"
        if unit not in _OWN_UNITS and shared.exists():
            objects.append(str(shared))
        else:
            sources.append(_OWN_UNITS.get(unit, root / unit))
    return [*sources, HERE / "accesses.cpp"], objects


def _compile_kernels(folder):
    """Compile the kernels with a call before each access, see accesses.h; return the objects."""
    objects, compilers = [], []
    for source in recipe.CUDA_SOURCES:
        name = Path(source).name
        kernel = folder / f"{Path(name).stem}_kernels.cpp"
        kernel.write_text(_KERNEL.format(name))
        objects.append(str(kernel.with_suffix(".o")))
        places = [f"-I{place}" for place in (recipe.source_dir(), HERE)]
        command = [recipe.cxx(), "-std=c++20", "-fPIC", *_FLAGS, *_NOTED, *places]
        compilers.append(subprocess.Popen([*command, "-c", str(kernel), "-o", objects[-1]]))
    if any([compiler.wait() for compiler in compilers]):
        raise RuntimeError("the kernels did not compile")
    return objects


def _build(folder, name):
    from torch.utils import cpp_extension

    objects = []
    if name == DEVICE:
        sources = [HERE / f"{unit}.cpp" for unit in _DEVICE_UNITS]
        flags = ["-O1", "-g0", "-DAT_PER_OPERATOR_HEADERS", "-fvisibility=hidden"]
    else:
        sources, objects = _engine_parts()
        objects += _compile_kernels(folder)
        flags = _FLAGS
    cpp_extension.load(
        name=name,
        sources=[str(source) for source in sources],
        extra_include_paths=[str(recipe.source_dir()), str(HERE)],
        extra_cflags=flags,
        extra_ldflags=objects,
        build_directory=str(folder),
        verbose=True,
    )


if __name__ == "__main__":
    _build(Path(sys.argv[1]), sys.argv[2])
