"""What docs.build changes in the HTML that Markdown makes: links, and tables.

Links between documents lead to their pages. Tables get what a narrow screen needs: a table of
numbers scrolls, a table of words becomes one card per row, and a column of tests is folded.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

import markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

__all__ = ["ELSEWHERE", "Redirect", "Tables", "Treeprocessors", "address", "slug"]

ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|//")
FOLDED = ("test", "tests")  # headings of the columns that are folded


def address(document: Path, root: Path) -> str:
    """Where a document's page lies in the site."""
    relative = document.relative_to(root).as_posix()
    return "index.html" if relative == "README.md" else relative.removesuffix(".md") + ".html"


def slug(heading: str, separator: str = "-") -> str:
    """The name by which GitHub lets one link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


class Redirect(Treeprocessor):
    """Points links between documents at their pages, and notes the other files they lead to."""

    def __init__(self, document: Path, root: Path) -> None:
        super().__init__()
        self.document, self.root = document, root
        self.files: list[Path] = []

    def run(self, tree: Element) -> None:
        for element in tree.iter():
            for attribute in ("href", "src"):
                link = element.get(attribute)
                if link and not ELSEWHERE.match(link) and not link.startswith("#"):
                    element.set(attribute, self._redirected(link))

    def _redirected(self, link: str) -> str:
        target, mark, anchor = link.partition("#")
        file = (self.document.parent / target).resolve()
        if file.suffix == ".md" and file.is_relative_to(self.root):
            here = posixpath.dirname(address(self.document, self.root)) or "."
            return posixpath.relpath(address(file, self.root), here) + mark + anchor
        if file.is_file() and file.is_relative_to(self.root):
            self.files.append(file)
        return link


class Tables(Treeprocessor):
    """Marks tables of numbers and of words, labels their cells, and folds columns of tests."""

    def run(self, tree: Element) -> None:
        for parent in list(tree.iter()):
            for index, child in enumerate(parent):
                if child.tag == "table":
                    _prepare(child)
                    parent[index] = _framed(child)


def _prepare(table: Element) -> None:
    headings = list(table.iter("th"))
    aligned = any("right" in (heading.get("style") or "") for heading in headings)
    table.set("class", "numbers" if aligned else "words")
    labels = [_text(heading) for heading in headings]
    for row in table.iter("tr"):
        for label, cell in zip(labels, row.iter("td"), strict=False):
            cell.set("data-label", label)
            if label in FOLDED and len(cell) > 0:
                _fold(cell)


def _framed(table: Element) -> Element:
    """The table in an element of its own, which can scroll."""
    frame = Element("div", {"class": "table", "tabindex": "0"})
    frame.append(table)
    frame.tail, table.tail = table.tail, None
    return frame


def _fold(cell: Element) -> None:
    """Puts what a cell holds behind a summary that counts it."""
    content, text = list(cell), cell.text
    count = sum(part.tag == "code" for part in content)
    for part in content:
        cell.remove(part)
    cell.text = None
    details = SubElement(cell, "details")
    summary = SubElement(details, "summary")
    summary.text = f"{count} tests" if count > 1 else "1 test"
    summary.tail = text
    details.extend(content)


def _text(element: Element) -> str:
    return "".join(element.itertext()).strip()


class Treeprocessors(Extension):
    """Runs processors in their order, after `inline`, which makes the links."""

    def __init__(self, processors: Iterable[Treeprocessor]) -> None:
        super().__init__()
        self.processors = list(processors)

    def extendMarkdown(self, md: markdown.Markdown) -> None:
        for index, processor in enumerate(self.processors):
            md.treeprocessors.register(processor, type(processor).__name__, 1 - 0.1 * index)
