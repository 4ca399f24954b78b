"""The timeline's page in a real browser."""

import pytest

from fastsync.timeline.views import html_page
from tests.runs import made_up_run, made_up_units

pytest.importorskip("playwright", reason="playwright is not installed")


@pytest.fixture
def open_page(visit, tmp_path):
    """Open the page of a run."""

    def opened(run, **how):
        (tmp_path / "run.html").write_text(html_page(run), encoding="utf-8")
        return visit(tmp_path / "run.html", **how)

    return opened


def test_it_says_what_matters(open_page):
    page = open_page(made_up_run(late=8))
    verdict = page.locator("#verdict").inner_text()
    assert "68.0 ms" in verdict and "18.0 ms (26 %)" in verdict
    assert "Rank 1 is the straggler" in verdict and "8.00 ms after the others" in verdict
    assert "It is slow in backward" in verdict
    assert page.locator("#tiles .tile").count() == 5
    assert "on 2 ranks" in page.locator("h1").inner_text()


def test_every_rank_has_its_lanes(open_page):
    page = open_page(made_up_run(late=8))
    assert page.locator("#chart .rank").count() == 2
    for rank in (0, 1):
        group = page.locator(f'#chart .rank[data-rank="{rank}"]')
        texts = group.locator("text").all_text_contents()
        assert {"compute", "bucket 0", "bucket 1", "communication"} <= set(texts)
        assert group.locator(".exposed").count() == 1
        assert group.locator(".bucket").count() == 2


def test_units_have_lanes_gathers_and_reductions(open_page):
    page = open_page(made_up_units(late=2))
    assert "parameters" in page.locator("#verdict").inner_text()
    for rank in (0, 1):
        group = page.locator(f'#chart .rank[data-rank="{rank}"]')
        texts = group.locator("text").all_text_contents()
        assert {"compute", "root", "blocks.0", "communication"} <= set(texts)
        assert group.locator(".move").count() == 3
        assert group.locator(".shade").count() == 3
    assert page.locator("#table-title").inner_text() == "Units of this step"
    assert page.locator("#buckets tr").count() == 1 + 3
    page.locator('.rank[data-rank="0"] .move[data-kind="reduction"] .hit').hover()
    told = page.locator("#tip").inner_text()
    for words in ("reduction of blocks.0 on rank 0", "blocks.0.bias", "as bfloat16", "6.00 ms"):
        assert words in told
