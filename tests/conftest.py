"""Slow cases, ranks that tests share, and a real browser: Chromium, without window and network.

`@pytest.mark.slow` leaves a test to `make test-all`; `slow("a", "b")` those of its cases alone, and
`slow(but=("a", "b"))` all cases but those.
"""

import shutil
import signal

import pytest

from tests.helpers import teams

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background. What tests start would ignore it too, and they interrupt some.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    named = {}  # by test function and name of a case: whether there is such a case
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        for mark in [mark for mark in item.own_markers if mark.name == "slow"]:
            but = mark.kwargs.get("but", ())
            if case in but or (mark.args and case not in mark.args):
                item.own_markers.remove(mark)
            for name in (*mark.args, *but):
                place = f"{item.nodeid.partition('[')[0]}[{name}]"
                named[place] = named.get(place, False) or name == case
    chosen = any("::" in argument for argument in config.args)  # then not all cases are here
    if missing := [] if chosen else [place for place, there in named.items() if not there]:
        raise pytest.UsageError(f"marked as slow, but not there: {', '.join(missing)}")


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        teams.end()


@pytest.fixture(scope="module")
def browser():
    """Needs the package playwright, and a Chromium: its own, or one on PATH; else skips."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as play:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            started = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium can be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Open a file as a page; anything it complains about, and any request it makes, fail."""
    contexts, trouble = [], []

    def visited(path, scheme="light", **viewport):
        size = {"width": 1300, "height": 900} | viewport
        context = browser.new_context(color_scheme=scheme, viewport=size, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda message: trouble.append(message.text))
        page.on("request", lambda r: r.url.startswith("file:") or trouble.append(r.url))
        page.goto(path.as_uri())
        return page

    yield visited
    for context in contexts:
        context.close()
    assert not trouble
