"""The documents as HTML: Sphinx finds every link, and fails where one leads nowhere."""

import shutil
import subprocess
import sys

import pytest

from tests.helpers.scripts import ROOT

# `make setup` installs it, and .ci/run builds the pages in any case.
pytest.importorskip("myst_parser", reason="the documents' generator is not installed")


def build(root, out):
    """Build a copy of the documents as `make docs` does; the exit code and what it printed."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", out]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture
def copy(tmp_path):
    root = tmp_path / "root"
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.mark.slow
def test_every_page_is_built_and_every_link_leads_somewhere(copy, tmp_path):
    code, said = build(copy, str(tmp_path / "site"))
    assert code == 0, said
    built = {p.relative_to(tmp_path / "site") for p in (tmp_path / "site").rglob("*.html")}
    sources = [copy / "README.md", copy / "examples/README.md", *copy.glob("docs/*.md")]
    assert {p.relative_to(copy).with_suffix(".html") for p in sources} <= built


@pytest.mark.slow
def test_broken_links_and_forgotten_pages_are_errors(copy, tmp_path):
    page = copy / "docs" / "wire.md"
    broken = "[a](missing.md) [b](zero.md#missing) [c](#missing) ![d](missing.svg)\n"
    page.write_text(page.read_text() + f"\n{broken}")
    (copy / "docs" / "forgotten.md").write_text("# Forgotten\n")
    code, said = build(copy, str(tmp_path / "site"))
    assert code != 0
    problems = (
        "target not found: 'missing.md'",
        "local id not found in doc 'docs/zero': 'missing'",
        "target not found: 'missing'",
        "image file not readable: docs/missing.svg",
        "forgotten.md: WARNING: document isn't included",
    )
    assert not [problem for problem in problems if problem not in said], said
    assert said.count("WARNING") == len(problems), said
