"""Builds the documentation as HTML and checks every link in it: python -m docs.build

README.md becomes index.html, and every Markdown file of docs/ and examples/ a page of its own, in
the folders that they have in the repository; what they link to is copied. Pages follow the order of
reading below. Each has an outline, and all share one index for the search, which runs in the
browser and needs no server. Links are checked in what was built: a relative link has to lead to a
file of the site, and its anchor to an element there. Links to other sites are not followed. Exits
with 1 where a link is broken, a table was not made, or a page has no place in the order of reading.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from string import Template
from typing import Any, Final

import markdown
from markdown.extensions import Extension
from markdown.extensions.codehilite import CodeHiliteExtension
from markdown.extensions.toc import TocExtension

from docs.markup import ELSEWHERE, Redirect, Tables, Treeprocessors, address, slug

ROOT: Final = Path(__file__).resolve().parents[1]
SITE: Final = Path(__file__).resolve().parent / "site"  # template, style and script
ASSETS: Final = ("style.css", "site.js")
INDEX: Final = "search-index.js"
MARK: Final = ".built-by-docs-build"  # a folder without it is not removed
# A pipe table that a converter took for text, and a heading or fence that it did not see.
LEFT_OVER: Final = re.compile(r"^\s*(\|.*\|\s*$|#{1,6} \S|```)", re.MULTILINE)

# The order of reading. Files that are not there yet are passed over.
READING: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("Start", ("README.md", "docs/drop-in.md", "docs/run.md", "docs/mpi.md", "examples/README.md")),
    (
        "Use",
        (
            "docs/tuning.md",
            "docs/wire.md",
            "docs/zero.md",
            "docs/zero3.md",
            "docs/planner.md",
            "docs/custom-codec.md",
            "docs/timeline.md",
            "docs/faults.md",
        ),
    ),
    (
        "Look up",
        ("docs/api.md", "docs/environment.md", "docs/troubleshooting.md", "docs/upgrade.md"),
    ),
    ("Measured", ("docs/benchmarks.md", "docs/gpu.md")),
    ("Inside", ("docs/how-it-works.md", "docs/decisions.md")),
)
OTHERS: Final = "More"


def reading(root: Path = ROOT) -> list[tuple[str, list[Path]]]:
    """The Markdown files of the site by part, in the order of reading; the others come last."""
    listed = [(part, [root / name for name in names]) for part, names in READING]
    parts = [(part, [path for path in paths if path.exists()]) for part, paths in listed]
    return [*parts, (OTHERS, unlisted(root))]


def unlisted(root: Path = ROOT) -> list[Path]:
    """Documents without a place in the order of reading."""
    listed = {root / name for _, names in READING for name in names}
    folders = (root / "docs", root / "examples")
    return [p for folder in folders for p in sorted(folder.glob("*.md")) if p not in listed]


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files of the site, in the order of reading."""
    return [path for _, paths in reading(root) for path in paths]


@dataclass(frozen=True)
class Heading:
    """A heading of the second or third level, as the outline shows it: `name` is HTML."""

    level: int
    name: str
    anchor: str


@dataclass(frozen=True)
class Page:
    """A document as HTML.

    Attributes:
        address: where it lies in the site.
        part: of the order of reading.
        body: without navigation.
        outline: its headings.
        files: what it links to besides documents.
    """

    address: str
    part: str
    title: str
    body: str
    outline: tuple[Heading, ...]
    files: tuple[Path, ...]

    def link_to(self, target: str) -> str:
        """A file of the site, relative to this page."""
        return posixpath.relpath(target, posixpath.dirname(self.address) or ".")


def convert(document: Path, root: Path, part: str = "") -> Page:
    text = document.read_text(encoding="utf-8")
    # A comment would take the table below it along as raw HTML.
    text = re.sub(r"^(<!-- /?bench:[\w-]+ -->)$", r"\n\1\n", text, flags=re.MULTILINE)
    redirect = Redirect(document, root)
    extensions: list[str | Extension] = [
        *("tables", "fenced_code", "sane_lists"),
        CodeHiliteExtension(guess_lang=False, css_class="highlight"),
        TocExtension(slugify=slug, permalink="#", permalink_class="anchor"),
        Treeprocessors((redirect, Tables())),
    ]
    converter = markdown.Markdown(extensions=extensions, output_format="html")
    body = converter.convert(text)
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    title = heading[1] if heading else document.stem
    tokens: Sequence[dict[str, Any]] = getattr(converter, "toc_tokens", ())
    files = tuple(redirect.files)
    return Page(address(document, root), part, title, body, tuple(_outline(tokens)), files)


def _outline(tokens: Sequence[dict[str, Any]]) -> Iterator[Heading]:
    for token in tokens:
        if token["level"] in (2, 3):
            yield Heading(token["level"], token["name"], token["id"])
        yield from _outline(token["children"])


def render(page: Page, pages: Sequence[Page]) -> str:
    """The whole HTML of a page, with links to all others."""
    template = Template((SITE / "page.html").read_text(encoding="utf-8"))
    home = pages[0].title
    return template.substitute(
        title=escape(page.title if page.title == home else f"{page.title} · {home}"),
        home=page.link_to("index.html"),
        root=page.link_to("."),
        style=page.link_to("assets/style.css"),
        script=page.link_to("assets/site.js"),
        navigation=_navigation(page, pages),
        outline=_outline_links(page.outline),
        body=page.body,
        neighbours=_neighbours(page, pages),
    )


def _navigation(page: Page, pages: Sequence[Page]) -> str:
    lines, part = [], ""
    for other in pages:
        if other.part != part:
            part = other.part
            lines.append(f"<p>{escape(part)}</p>")
        current = ' aria-current="page"' if other is page else ""
        target = page.link_to(other.address)
        lines.append(f'<a href="{target}"{current}>{escape(other.title)}</a>')
    return "\n".join(lines)


def _outline_links(outline: Sequence[Heading]) -> str:
    if len(outline) < 2:
        return ""
    links = "\n".join(f'<a class="level{h.level}" href="#{h.anchor}">{h.name}</a>' for h in outline)
    return (
        '<details class="outline fold" open><summary>On this page</summary>'
        f'<nav aria-label="On this page">\n{links}\n</nav></details>'
    )


def _neighbours(page: Page, pages: Sequence[Page]) -> str:
    place = pages.index(page)
    links = []
    if place > 0:
        links.append(("previous", "Previous", pages[place - 1]))
    if place + 1 < len(pages):
        links.append(("next", "Next", pages[place + 1]))
    return "".join(
        f'<a class="{name}" rel="{"prev" if name == "previous" else "next"}" '
        f'href="{page.link_to(other.address)}"><small>{label}</small>{escape(other.title)}</a>'
        for name, label, other in links
    )


class Sections(HTMLParser):
    """What the search finds in a page: the text below each heading.

    Attributes:
        found: anchor, heading and text of each.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self._anchor, self._heading, self._text = "", title, [""]
        self._in_heading = self._in_anchor = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if re.fullmatch(r"h[1-6]", tag) and values.get("id"):
            self._close()
            self._anchor, self._heading = values["id"] or "", ""
            self._in_heading = True
        elif tag == "a" and values.get("class") == "anchor":
            self._in_anchor = True
        elif tag not in ("code", "em", "strong", "a", "span"):
            self._text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self._in_anchor = self._in_anchor and tag != "a"
        self._in_heading = self._in_heading and not re.fullmatch(r"h[1-6]", tag)

    def handle_data(self, data: str) -> None:
        if self._in_anchor:
            return
        if self._in_heading:
            self._heading += data
        else:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._close()

    def _close(self) -> None:
        text = " ".join("".join(self._text).split())
        if text or self._anchor:
            self.found.append((self._anchor, self._heading.strip(), text))
        self._text = [""]


def search_index(pages: Sequence[Page]) -> str:
    """The sections of all pages as a script, which a page can load from a disk too."""
    entries = []
    for page in pages:
        sections = Sections(page.title)
        sections.feed(page.body)
        sections.close()
        entries += [[page.address, page.title, *section] for section in sections.found]
    return f"searchIndex({json.dumps(entries, ensure_ascii=False, separators=(',', ':'))});\n"


class Found(HTMLParser):
    """The names, links and running text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.text: list[str] = []
        self.literal = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.literal += tag in ("pre", "code", "style", "script")
        for name, value in attrs:
            if name == "id" and value:
                self.names.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)

    def handle_endtag(self, tag: str) -> None:
        self.literal -= tag in ("pre", "code", "style", "script")

    def handle_data(self, data: str) -> None:
        if not self.literal:
            self.text.append(data)


def read(path: Path) -> Found:
    found = Found()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def problems(site: Path) -> Iterator[str]:
    """Broken links and unconverted Markdown in the pages of a built site."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    for path, found in pages.items():
        name = path.relative_to(site).as_posix()
        left = LEFT_OVER.search("".join(found.text))
        if left:
            yield f"{name}: not converted: {left[0].strip()!r}"
        for link in found.links:
            if ELSEWHERE.match(link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            if not file.is_relative_to(site.resolve()) or not file.is_file():
                yield f"{name}: {link} leads nowhere"
            elif anchor and file in pages and anchor not in pages[file].names:
                yield f"{name}: {link} names nothing on that page"


def clear(site: Path) -> None:
    """Removes a former site.

    Raises:
        FileExistsError: the folder holds something else.
    """
    if site.exists() and any(site.iterdir()) and not (site / MARK).exists():
        raise FileExistsError(f"{site} is not empty and no site of docs.build; name another --out")
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    (site / MARK).touch()


def build(site: Path, root: Path = ROOT) -> list[Page]:
    """Writes the site into a folder of its own."""
    pages = [convert(document, root, part) for part, paths in reading(root) for document in paths]
    clear(site)
    for page in pages:
        path = site / page.address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page, pages), encoding="utf-8")
        for file in page.files:
            copy = site / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    assets = site / "assets"
    assets.mkdir()
    for name in ASSETS:
        shutil.copyfile(SITE / name, assets / name)
    (assets / INDEX).write_text(search_index(pages), encoding="utf-8")
    return pages


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m docs.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = ROOT / "out" / "site"
    parser.add_argument("--out", type=Path, default=out, help="folder to write (default: out/site)")
    site = parser.parse_args().out.resolve()
    try:
        pages = build(site)
    except FileExistsError as error:
        parser.error(str(error))
    wrong = list(problems(site))
    for path in unlisted():
        wrong.append(f"{path.name} has no place in the order of reading: add it to READING")
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(pages)} pages in {site}, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
