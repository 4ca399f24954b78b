"""Every benchmark, and what runs, compares and reports them.

python -m bench step --models small --json out/step.json
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from examples.common.ranks import USAGE

HERE = Path(__file__).resolve().parent
COMMANDS = {
    "gpu_all": "bench.gpu.all",
    "report": "bench.report.documents",
    **{p.stem: f"bench.commands.{p.stem}" for p in sorted(HERE.glob("commands/[a-z]*.py"))},
}


def module_of(name: str) -> Any:
    """Return the module of a command: its `main` takes arguments and returns an exit code."""
    return import_module(COMMANDS[name])


def _summary(module: str) -> str:
    """Return the first line of a module's text; the module is not imported for it."""
    path = HERE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names; without one, lists them all."""
    if argv and argv[0] in COMMANDS:
        return int(module_of(argv[0]).main(argv[1:]))
    asked = not argv or argv[0] in ("-h", "--help")
    if not asked:
        print(f"error: unknown command {argv[0]!r}", file=sys.stderr)
    listed = "".join(f"  {name:12} {_summary(module)}\n" for name, module in COMMANDS.items())
    print(f"python -m bench COMMAND [--help]\n\n{listed}", file=None if asked else sys.stderr)
    return 0 if asked else USAGE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
