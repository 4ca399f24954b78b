"""Imports fastsync right after torch, in each Python that a program starts.

So FastDDP takes the place of torch's DDP where FASTSYNC_REPLACE_DDP asks for it, and a rank that
`fastsync.elastic` starts again makes its process group as it must, whatever the script imports.

Python imports this module before the script. It imports neither torch nor fastsync by itself: it
waits for the program to import torch, and runs the `sitecustomize` that it hides.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


class _AfterTorch:
    """Finds torch once, and has fastsync imported when its import ends."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            _import_fastsync()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_fastsync() -> None:
    if importlib.util.find_spec("fastsync") is None:  # started in a checkout
        sys.path.append(str(_HERE.parents[1]))
    import fastsync  # noqa: F401  # reads the variables


def _run_hidden() -> None:
    """An environment has one `sitecustomize`; this folder's comes first."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AfterTorch)
_run_hidden()
