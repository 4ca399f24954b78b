"""Installs fastsync and compiles its extension ahead of time.

``pip install --no-build-isolation .`` compiles against the torch that is installed. Where torch
cannot be imported during the build (build isolation), the package is installed with its sources,
and the extension is compiled on first import instead.
"""

import importlib.util
import json
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def load_build(name="recipe"):
    """A file of fastsync/_build, by its path: the package itself must not be imported here."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"fastsync/_build/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def extension_arguments():
    """Arguments of setup() for the compiled extension; none where there is no torch."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}
    build, env = load_build(), load_build("env").Env.read()

    class Build(BuildExtension):
        """Compiles the CUDA kernels first, then the rest, and records what for."""

        def build_extensions(self):
            build.check_compilers()
            work = Path(self.build_temp).resolve()
            work.mkdir(parents=True, exist_ok=True)
            # The machine that compiles need not be the one that has the GPU.
            toolkit = build.find_toolkit(env.cuda.replace("auto", "found"))
            recipe = build.recipe(work, toolkit, build.Options(env.cuda_archs))
            for extension in self.extensions:
                extension.extra_compile_args = {"cxx": recipe.cxx_flags}
                extension.extra_link_args = recipe.link_flags
            super().build_extensions()
            target = Path(self.get_ext_fullpath("fastsync._C")).parent
            (target / "_prebuilt.json").write_text(json.dumps(build.binary_identity()))

    sources = [str(Path("csrc") / source) for source in build.translation_units()]
    extension = CppExtension("fastsync._C", sources, include_dirs=[str(HERE / "csrc")])
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": Build.with_options(no_python_abi_suffix=True)},
    }


def source_packages():
    """The C++ sources travel inside the package, for the build on first import."""
    folders = {p.parent.relative_to(HERE) for p in load_build().all_files()}
    return {".".join(("fastsync", *folder.parts)): str(folder) for folder in folders}


def python_packages():
    """Every folder of the package that holds Python."""
    folders = {p.parent.relative_to(HERE) for p in (HERE / "fastsync").rglob("*.py")}
    return {".".join(folder.parts): str(folder) for folder in folders}


sources = source_packages()
packages = {**python_packages(), **sources}
setup(
    packages=list(packages),
    package_dir=packages,
    package_data={
        "fastsync": ["py.typed", "_C.pyi"],
        **{package: ["*.h", "*.cpp", "*.cu"] for package in sources},
    },
    **extension_arguments(),
)
