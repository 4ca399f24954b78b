"""The documentation in a real browser, from a disk and without a network: search, colours, phone.

Skipped where the package playwright or a Chromium is missing; `.ci/run` installs them where it can.
"""

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("markdown", reason="markdown is not installed")
pytest.importorskip("pygments", reason="pygments is not installed")

from docs import build

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    return folder, build.build(folder)


@pytest.fixture
def open_page(visit, site):
    """Opens a page of the site."""
    return lambda address="index.html", **how: visit(site[0] / address, **how)


def test_search_leads_to_the_section(open_page):
    page = open_page("docs/tuning.html")
    page.keyboard.press("/")
    page.keyboard.type("error feedback")
    first = page.locator("#ui-results a").first
    assert "Error feedback" in first.inner_text() and "Wire formats" in first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/docs/wire.html#error-feedback")


def test_search_says_that_it_found_nothing(open_page):
    page = open_page()
    page.locator(".search input").fill("error qxzv")
    page.locator("#ui-results p").wait_for()
    assert page.locator("#ui-results").inner_text() == "Nothing found."
    page.keyboard.press("Escape")
    assert page.locator("#ui-results").is_hidden()


def test_colours_follow_the_system_until_the_switch_chooses(open_page):
    page = open_page(scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    assert dark != open_page(scheme="light").evaluate(colour) == "rgb(255, 255, 255)"
    page.locator("#ui-theme").click()
    assert page.evaluate(colour) == "rgb(255, 255, 255)"
    page.reload()
    assert page.evaluate(colour) == "rgb(255, 255, 255)", "the choice is not kept"
    page.locator("#ui-theme").click()
    assert page.evaluate(colour) == dark


def test_every_page_fits_a_phone(open_page, site):
    for page in site[1]:
        opened = open_page(page.address, **PHONE)
        assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_phone_sees_the_text_first(open_page):
    page = open_page("docs/drop-in.html", **PHONE)
    assert page.locator("h1").bounding_box()["y"] < PHONE["height"] / 2
    assert not page.locator('nav[aria-label="Pages"] a').first.is_visible()
    page.locator(".pages summary").click()
    assert page.locator('nav[aria-label="Pages"] a').first.is_visible()
