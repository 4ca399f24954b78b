"""Builds the documentation as HTML and checks every link in it: python -m docs.build

README.md becomes index.html, and every Markdown file of docs/ and examples/ a page of its own, in
the folders that they have in the repository; what they link to is copied. Links are checked in what
was built: a relative link has to lead to a file of the site, and its anchor to an element there.
Links to other sites are not followed. Exits with 1 where a link is broken or a table was not made.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import Element

import markdown
from markdown.extensions import Extension
from markdown.extensions.toc import TocExtension
from markdown.treeprocessors import Treeprocessor

ROOT = Path(__file__).resolve().parents[1]
MARK = ".built-by-docs-build"  # a folder without it is not removed
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|//")
# A pipe table that a converter took for text, and a heading or fence that it did not see.
LEFT_OVER = re.compile(r"^\s*(\|.*\|\s*$|#{1,6} \S|```)", re.MULTILINE)

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 Helvetica, Arial, sans-serif; color: #24292f; margin: 0; }
.frame { display: flex; max-width: 1280px; margin: 0 auto; }
nav { flex: 0 0 200px; padding: 2em 1em; }
nav a { display: block; padding: .25em .5em; color: #24292f; text-decoration: none; }
nav a[aria-current] { background: #eaeef2; border-radius: 4px; font-weight: bold; }
main { flex: 1; min-width: 0; padding: 1.2em 2em 4em; }
h1, h2, h3 { line-height: 1.25; } h2 { border-bottom: 1px solid #d0d7de; padding-bottom: .25em;
     margin-top: 2em; }
a { color: #0550ae; }
code { font: .88em/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
     background: #f0f2f4; padding: .1em .3em; border-radius: 3px; }
pre { background: #f6f8fa; padding: 1em; overflow-x: auto; border-radius: 6px; }
pre code { background: none; padding: 0; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .92em; }
td, th { border: 1px solid #d0d7de; padding: .35em .7em; text-align: left; vertical-align: top; }
th { background: #f6f8fa; }
img { max-width: 100%; }
@media (max-width: 800px) { .frame { display: block; } nav { padding: 1em; }
     nav a { display: inline-block; } main { padding: 0 1em 3em; } }
"""


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files of the site, the start page first."""
    folders = (root / "docs", root / "examples")
    return [root / "README.md", *(p for f in folders for p in sorted(f.glob("*.md")))]


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


class _Redirection(Extension):
    def __init__(self, redirect: Redirect) -> None:
        super().__init__()
        self.redirect = redirect

    def extendMarkdown(self, md: markdown.Markdown) -> None:
        # After `inline`, which makes the links.
        md.treeprocessors.register(self.redirect, "redirect", 1)


@dataclass(frozen=True)
class Page:
    """A document as HTML.

    Attributes:
        address: where it lies in the site.
        body: without navigation.
        files: what it links to besides documents.
    """

    address: str
    title: str
    body: str
    files: tuple[Path, ...]


def convert(document: Path, root: Path) -> Page:
    text = document.read_text(encoding="utf-8")
    # A comment would take the table below it along as raw HTML.
    text = re.sub(r"^(<!-- /?bench:[\w-]+ -->)$", r"\n\1\n", text, flags=re.MULTILINE)
    redirect = Redirect(document, root)
    contents = TocExtension(slugify=slug)
    extensions: list[str | Extension] = [
        "tables",
        "fenced_code",
        "sane_lists",
        contents,
        _Redirection(redirect),
    ]
    body = markdown.Markdown(extensions=extensions, output_format="html").convert(text)
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    title = heading[1] if heading else document.stem
    return Page(address(document, root), title, body, tuple(redirect.files))


def render(page: Page, pages: list[Page]) -> str:
    """The whole HTML of a page, with links to all others."""
    here = posixpath.dirname(page.address) or "."
    links = []
    for other in pages:
        current = ' aria-current="page"' if other is page else ""
        target = posixpath.relpath(other.address, here)
        links.append(f'<a href="{target}"{current}>{escape(other.title)}</a>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{STYLE}</style></head>\n"
        f'<body><div class="frame"><nav>{"".join(links)}</nav>\n'
        f"<main>{page.body}</main></div></body></html>\n"
    )


class Found(HTMLParser):
    """The names, links and running text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.text: list[str] = []
        self.literal = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.literal += tag in ("pre", "code", "style")
        for name, value in attrs:
            if name == "id" and value:
                self.names.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)

    def handle_endtag(self, tag: str) -> None:
        self.literal -= tag in ("pre", "code", "style")

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
    pages = [convert(document, root) for document in documents(root)]
    clear(site)
    for page in pages:
        path = site / page.address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page, pages), encoding="utf-8")
        for file in page.files:
            copy = site / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
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
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(pages)} pages in {site}, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
