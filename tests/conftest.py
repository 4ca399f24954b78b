"""Marks the slow tests; on request notes what each test takes, and runs several files at once.
Pages are looked at in a real browser: Chromium, without a window and without a network.
"""

import shutil
import signal
from pathlib import Path

import pytest

from tests import at_once, slow, teams

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")


def pytest_addoption(parser):
    at_once.add_options(parser)
    parser.addoption(
        "--seconds-to",
        type=Path,
        metavar="FILE",
        help="note there what each test takes, for python -m tests.slow",
    )


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background. What tests start would ignore it too, and they interrupt some.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    at_once.register(config)
    if config.getoption("--seconds-to") is not None:
        config.pluginmanager.register(slow.Clock(config.getoption("--seconds-to").absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    listed = slow.read()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)


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
    """Opens a file as a page; anything it complains about, and any request it makes, fails."""
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
