"""docs/build.py: every page is built, every table made, every link checked."""

import json
import re

import pytest

from tests.scripts import ROOT

# `make setup` installs both, and .ci/run builds the pages in any case.
pytest.importorskip("markdown", reason="markdown is not installed")
pytest.importorskip("pygments", reason="pygments is not installed")

from docs import build


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    return folder, build.build(folder)


def test_no_link_is_broken(site):
    assert list(build.problems(site[0])) == []


def test_every_document_has_a_page_that_every_page_links_to(site):
    folder, pages = site
    assert {"index.html", "docs/how-it-works.html", "examples/README.html"} <= {
        page.address for page in pages
    }
    for page in pages:
        links = {
            (folder / page.address).parent / x for x in build.read(folder / page.address).links
        }
        reached = {link.resolve() for link in links if "#" not in link.name}
        assert {(folder / other.address).resolve() for other in pages} <= reached


def test_figures_come_along(site):
    assert (site[0] / "docs/gradient-way.svg").exists()


def test_every_table_is_made(site):
    for document, page in zip(build.documents(), site[1], strict=True):
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        assert page.body.count("<table") == len(re.findall(r"^\|[-: |]+\|$", text, re.MULTILINE))


def page_of(site, address):
    return next(page for page in site[1] if page.address == address)


def test_pages_follow_the_order_of_reading(site):
    listed = [name for _, names in build.READING for name in names if (ROOT / name).exists()]
    wanted = [build.address(ROOT / name, ROOT) for name in listed]
    assert [page.address for page in site[1]] == wanted
    html = (site[0] / "index.html").read_text()
    links = re.findall(r'<nav aria-label="Pages">(.*?)</nav>', html, re.DOTALL)[0]
    assert re.findall(r'href="([^"]+)"', links) == wanted


def test_the_readme_lists_every_document_in_that_order():
    section = (ROOT / "README.md").read_text().split("\n## Documentation\n")[1].split("\n## ")[0]
    listed = [ROOT / target for target in re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", section, re.M)]
    assert listed == build.documents()[1:]


def test_neighbours_are_linked(site):
    pages = site[1]
    html = (site[0] / pages[1].address).read_text()
    footer = re.findall(r"<footer>(.*?)</footer>", html)[0]
    shown = re.findall(r'class="(\w+)" rel="\w+" href="([^"]+)"', footer)
    neighbours = (("previous", pages[0]), ("next", pages[2]))
    assert shown == [(name, pages[1].link_to(other.address)) for name, other in neighbours]


def test_every_page_has_a_place_in_the_order_of_reading():
    assert build.unlisted() == [], "add it to READING in docs/build.py"


def test_a_page_without_a_place_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/forgotten.md").write_text("# Forgotten\n")
    (tmp_path / "docs/tuning.md").write_text("# Tuning\n")
    assert build.unlisted(tmp_path) == [tmp_path / "docs/forgotten.md"]
    assert build.documents(tmp_path)[-1] == tmp_path / "docs/forgotten.md"


def test_an_outline_leads_to_every_heading(site):
    text = re.sub(r"```.*?```", "", (ROOT / "docs/wire.md").read_text(), flags=re.DOTALL)
    page = page_of(site, "docs/wire.html")
    assert [heading.level for heading in page.outline] == [
        len(marks) for marks in re.findall(r"^(##+) ", text, re.MULTILINE)
    ]
    found = build.read(site[0] / page.address)
    assert {f"#{heading.anchor}" for heading in page.outline} <= set(found.links)
    assert {heading.anchor for heading in page.outline} <= found.names


def test_names_on_a_page_are_unique(site):
    for page in site[1]:
        names = re.findall(r'\bid="([^"]+)"', (site[0] / page.address).read_text())
        assert len(names) == len(set(names)), page.address


def test_code_is_highlighted(site):
    body = page_of(site, "docs/custom-codec.html").body
    assert '<span class="k">class</span>' in body  # Python
    assert '<span class="kt">int64_t</span>' in body  # C++


def index_of(folder):
    script = (folder / "assets" / build.INDEX).read_text()
    return json.loads(re.fullmatch(r"searchIndex\((.*)\);\n", script, re.DOTALL)[1])


def test_the_search_knows_every_section_of_every_page(site):
    entries = index_of(site[0])
    for page in site[1]:
        anchors = {anchor for address, _, anchor, _, _ in entries if address == page.address}
        assert {heading.anchor for heading in page.outline} <= anchors
        assert anchors <= build.read(site[0] / page.address).names | {""}
    text = next(text for _, _, _, heading, text in entries if heading == "Error feedback")
    assert "residual" in text and "#" not in text


def test_columns_of_tests_are_folded(site):
    body = page_of(site, "docs/drop-in.html").body
    folded = re.findall(r"<details>(.*?)</details>", body, re.DOTALL)
    rows = [
        line
        for line in (ROOT / "docs/drop-in.md").read_text().splitlines()
        if line.startswith("| ") and "`test_" in line
    ]
    assert len(folded) == len(rows) > 50
    for row, fold in zip(rows, folded, strict=True):
        assert re.findall(r"test_\w+::test_\w+", row) == re.findall(r"test_\w+::test_\w+", fold)
        assert fold.startswith("<summary>")


def test_cells_carry_the_heading_that_a_card_shows(site):
    body = page_of(site, "docs/drop-in.html").body
    assert '<td data-label="better than in DDP">' in body
    assert '<table class="words">' in body
    assert '<table class="numbers">' in page_of(site, "docs/benchmarks.html").body


def problems_of(tmp_path, readme, other="# Other\n"):
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text(readme)
    (root / "docs/other.md").write_text(other)
    (tmp_path / "secret.txt").write_text("not of this repository")
    build.build(tmp_path / "site", root)
    return list(build.problems(tmp_path / "site"))


@pytest.mark.parametrize(
    "readme, problem",
    [
        ("[a](docs/other.md#other) [b](#start-here)\n\n# Start `here`", None),
        ("[a](https://example.org/nowhere)", None),
        ("[a](docs/missing.md)", "docs/missing.html leads nowhere"),
        ("![a](figure.svg)", "figure.svg leads nowhere"),
        ("[a](docs/other.md#missing)", "docs/other.html#missing names nothing"),
        ("[a](#missing)", "#missing names nothing"),
        ("[a](../secret.txt)", "../secret.txt leads nowhere"),
        ("text\n| a | b |\n|---|---|\n| 1 | 2 |", "not converted"),
    ],
)
def test_mistakes_are_found(tmp_path, readme, problem):
    found = problems_of(tmp_path, readme)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])


def test_other_folders_are_not_emptied(tmp_path):
    (tmp_path / "precious").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty and no site"):
        build.build(tmp_path)
    assert (tmp_path / "precious").exists()


def test_documents_are_those_of_the_repository():
    outside = {"out", ".venv", "node_modules", "build", "dist"}
    all_of_them = {p for p in ROOT.rglob("*.md") if not outside & set(p.relative_to(ROOT).parts)}
    assert {p for p in all_of_them if not p.relative_to(ROOT).parts[0].startswith(".")} == set(
        build.documents()
    )
