"""docs/build.py: every page is built, every table made, every link checked."""

import re

import pytest

from tests.scripts import ROOT

pytest.importorskip(
    "markdown", reason="make setup installs it; .ci/run builds the pages in any case"
)

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
        assert page.body.count("<table>") == len(re.findall(r"^\|[-: |]+\|$", text, re.MULTILINE))


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
