"""Sphinx settings: `make docs` builds README.md, docs/ and examples/README.md as HTML.

The sources are the repository itself, so that a link works in a checkout as it does in the site.
A link to a file or heading that is not there is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

project = "fastsync"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "examples/README.md"]
exclude_patterns = [".*", "bench", "build", "csrc", "dist", "fastsync", "out", "tests"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "fastsync"
html_copy_source = False
html_show_sphinx = False

HERE = Path(__file__).resolve().parent
# The order of reading. Sphinx warns of a page that is not listed here.
PAGES = {
    "Use": [
        *("drop-in", "mpi", "tuning", "means", "wire", "zero", "zero3", "sync", "faults"),
        "planner",
    ],
    "Look up": ["api", "troubleshooting", "benchmarks", "upgrade"],
    "Inside": ["how-it-works", "gpu"],
}


def add_contents(app: Any, docname: str, source: list[str]) -> None:
    """Append the contents to the README, where GitHub would show them as code."""
    if docname != root_doc:
        return
    for caption, names in PAGES.items():
        pages = [f"docs/{name}" for name in names if (HERE / f"{name}.md").exists()]
        if caption == "Use":
            pages.append("examples/README")
        lines = ["```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```"]
        source[0] += "\n\n" + "\n".join(lines) + "\n"


def write_start(app: Any, exception: Exception | None) -> None:
    """Let the folder of the site open at the README."""
    if exception is None:
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_start)
