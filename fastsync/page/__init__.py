"""Pages that need nothing else: one HTML file, no network, light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

__all__ = ["make_page"]

_BASE = Path(__file__).resolve().parent


def make_page(folder: Path, title: str, data: Mapping[str, object]) -> str:
    """A page whose script draws `data`.

    Args:
        folder: holds what differs from page to page: `page.html`, the body, and styles and scripts,
            of which those called `page` come last. Scripts find `data`, `$(id)` and
            `el(parent, name, attributes, text)` in `base.js`.
        title: of the browser's tab.
        data: what JSON can hold.
    """

    def styled(suffix: str) -> str:
        own = sorted(folder.glob(f"*.{suffix}"), key=lambda file: (file.stem == "page", file.name))
        files = (_BASE / f"base.{suffix}", *own)
        return "\n".join(file.read_text(encoding="utf-8") for file in files)

    parts = {
        "TITLE": escape(title),
        "CSS": styled("css"),
        "BODY": (folder / "page.html").read_text(encoding="utf-8"),
        "DATA": _embedded(data),
        "JS": styled("js"),
    }
    page = (_BASE / "page.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], page)


def _embedded(data: Mapping[str, object]) -> str:
    """JSON that cannot end the script element it stands in, whatever a parameter is called."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
