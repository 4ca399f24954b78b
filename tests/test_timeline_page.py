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


def test_it_names_nobody_where_nobody_is_late(open_page):
    assert "No rank keeps" in open_page(made_up_run()).locator("#straggler").inner_text()


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


def test_lanes_are_drawn_to_scale(open_page):
    page = open_page(made_up_run(late=8))
    group = page.locator('#chart .rank[data-rank="0"]')

    def span(selector):
        box = group.locator(selector).first.bounding_box()
        return box["x"], box["width"]

    start, width = span(".backward")
    per_ms = width / 40
    at, length = span(".exposed")
    assert at == pytest.approx(start + 40 * per_ms, abs=1)
    assert length == pytest.approx(18 * per_ms, abs=1)
    at, length = span('.bucket[data-bucket="0"] .wire')
    assert at == pytest.approx(start + 19 * per_ms, abs=1)  # rank 1 launched it at 29 ms
    assert length == pytest.approx(14 * per_ms, abs=1)


def test_hovering_over_a_bucket_tells_its_parameters(open_page):
    page = open_page(made_up_run(late=8))
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator('.rank[data-rank="0"] .bucket[data-bucket="0"] .hit').hover()
    assert tip.is_visible()
    told = tip.inner_text()
    for words in ("bucket 0 on rank 0", "layer.weight", "layer.bias", "1.0 MiB as float32"):
        assert words in told
    assert "20.0 ms" in told and "waiting for rank 1" in told and "8.00 ms" in told
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_steps_can_be_chosen(open_page):
    page = open_page(made_up_run(steps=5))
    page.locator('.step[data-step="3"]').click()
    assert page.locator("#step-title").inner_text() == "Step 3"
    page.keyboard.press("ArrowRight")
    assert page.locator("#step-title").inner_text() == "Step 4"
    page.keyboard.press("ArrowRight")  # there is no further one
    assert page.locator("#step-title").inner_text() == "Step 4"
    assert page.locator('.step[aria-selected="true"]').get_attribute("data-step") == "4"


def test_zoom_and_pan(open_page):
    page = open_page(made_up_run())

    def backward():
        return page.locator('.rank[data-rank="0"] .backward').bounding_box()

    whole = backward()
    page.locator("#zoom-in").click()
    assert backward()["width"] == pytest.approx(2 * whole["width"], rel=0.02)
    before = backward()["x"]
    chart = page.locator("#chart").bounding_box()
    middle = chart["x"] + chart["width"] / 2, chart["y"] + 30
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] - 100, middle[1], steps=3)
    page.mouse.up()
    assert backward()["x"] == pytest.approx(before - 100, abs=3)
    page.locator("#zoom-reset").click()
    assert backward() == pytest.approx(whole)
    page.mouse.move(*middle)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    assert backward()["width"] > whole["width"]


def contrast(page, selector):
    """The WCAG contrast of a text with what it stands on."""
    colours = page.evaluate(
        """(selector) => {
            const node = document.querySelector(selector);
            let ground = node;
            const none = "rgba(0, 0, 0, 0)";
            while (getComputedStyle(ground).backgroundColor === none) ground = ground.parentElement;
            const style = getComputedStyle(node);
            const ink = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
            return [ink, getComputedStyle(ground).backgroundColor]
              .map((text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number));
        }""",
        selector,
    )

    def luminance(channels):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    bright, dark = sorted((luminance([c / 255 for c in rgb]) for rgb in colours), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible(open_page, scheme):
    page = open_page(made_up_run(late=8), scheme=scheme)
    texts = (
        "h1",
        "#facts",
        "#verdict",
        ".tile .name",
        ".tile.exposed .value",
        ".hint",
        "#buckets td",
    )
    for selector in (*texts, "#chart text.strong", "#chart text.tick", "#chart text.late"):
        assert contrast(page, selector) >= 4.5, selector


def test_it_fits_a_narrow_window(open_page):
    page = open_page(made_up_run(late=8), width=420)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#chart .bucket").count() == 4


def test_many_ranks_show_the_straggler(open_page):
    run = made_up_run(late=8)
    others = [
        type(r)(i, *list(vars(run.ranks[0]).values())[1:])
        for i, r in enumerate([run.ranks[0]] * 11)
    ]
    late = type(run.ranks[1])(11, *list(vars(run.ranks[1]).values())[1:])
    page = open_page(type(run)(**{**vars(run), "world_size": 12, "ranks": (*others, late)}))
    assert page.locator("#chart .rank").count() == 8
    assert page.locator('#chart .rank[data-rank="11"]').count() == 1
    page.locator("#ranks").select_option("12")
    assert page.locator("#chart .rank").count() == 12
