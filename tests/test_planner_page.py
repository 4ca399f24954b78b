"""The plan's page in a real browser."""

import itertools
import re

import pytest

from fastsync.planner.command import main

pytest.importorskip("playwright", reason="playwright is not installed")

ASKED = "--params 7e9 --batch 1x4096 --gpus 16,64,512 --per-node 8 --device h100 --master-weights"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("plan") / "plan.html"
    assert main([*ASKED.split(), "--html", str(found)]) == 0
    return found


def test_every_strategy_has_a_bar_as_long_as_its_memory(visit, path):
    page = visit(path)
    limit = float(page.locator("#memory .limit").get_attribute("x1"))
    rows = page.locator("#memory .row")
    assert rows.count() == page.locator("#table tbody tr").count() >= 5
    begin = None
    for row in rows.all():
        parts = row.locator("rect:not(.hit)")
        boxes = [
            (float(p.get_attribute("x")), float(p.get_attribute("width"))) for p in parts.all()
        ]
        begin = boxes[0][0] if begin is None else begin
        assert boxes[0][0] == begin
        for (x, width), (following, _) in itertools.pairwise(boxes):
            assert x + width == pytest.approx(following)
        end = sum(boxes[-1])
        text = row.locator("text").last
        peak, unit = text.text_content().split()[:2]
        assert unit == "GB"
        fits = float(peak) <= 80
        assert ("over" in (text.get_attribute("class") or "")) is not fits
        if fits:
            assert float(peak) / 80 == pytest.approx((end - begin) / (limit - begin), rel=0.01)


def test_curves_have_a_point_for_each_number_of_gpus(visit, path):
    page = visit(path)
    names = page.locator("#scaling-legend span").count()
    assert names >= 3
    assert page.locator("#scaling .curve").count() == names
    assert page.locator("#scaling circle").count() == 3 * names
    assert (
        page.locator("#bandwidth .curve").count() == page.locator("#bandwidth-legend span").count()
    )
    page.locator("#scaling circle").last.hover()  # drawn above the others
    tip = page.locator("#tip").inner_text()
    assert re.search(r"\d+(\.\d+)? % efficiency", tip) and "exposed" in tip


def test_the_advice_is_said_first(visit, path):
    page = visit(path)
    assert page.locator("#advice").inner_text().startswith("Take ")
    assert page.locator("#advice").bounding_box()["y"] < page.locator("#memory").bounding_box()["y"]


@pytest.mark.parametrize("width", [420, 1300])
def test_nothing_is_cut_off(visit, path, width):
    page = visit(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
