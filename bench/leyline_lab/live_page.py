"""Pictures of the live page in Debian's Chromium, during a replay of the shipped session."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from .demo import DEFAULT_POLICY
from .demo.run import served, shipped_trace
from .harness.machine import CHECKOUT
from .replay.driver import ChatDriver
from .traces.recordings import TraceRequest

DOCS = CHECKOUT / "docs"
SHORTER = (("review-auth", 9), ("triage-flaky", 14), ("stockroom", 41))
"""Sessions and the number of turns of each; the last one comes last."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
WIDTH, HEIGHT = 1280, 1080


def main() -> None:
    """Write ``docs/live.png`` and ``docs/live-dark.png``."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium: run deploy/tools.sh")
    (recorded,) = shipped_trace().sessions
    with (
        served(["--policy", DEFAULT_POLICY, "--reuse", "live"]) as base_url,
        closing(ChatDriver(base_url)) as driver,
        sync_playwright() as playwright,
    ):
        for name, turns in SHORTER:
            for number, request in enumerate(recorded.requests[:turns]):
                driver.send(_apart(request, name), session=name, place=(0, number))
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        for scheme, path in (("light", DOCS / "live.png"), ("dark", DOCS / "live-dark.png")):
            _picture(browser, base_url.removesuffix("/v1"), scheme == "dark", path)
        browser.close()


def _apart(request: TraceRequest, name: str) -> TraceRequest:
    """Return the request with an opening that no other session shares, so that it
    finds what it shares with others by content only."""
    opening = {"role": "system", "content": f"You work on {name}."}
    return replace(request, messages=(opening, *request.messages[1:]))


def _picture(browser: Browser, origin: str, dark: bool, path: Path) -> None:
    page = browser.new_page(
        viewport={"width": WIDTH, "height": HEIGHT},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page.goto(f"{origin}/")
    page.locator(".turn").last.wait_for()
    page.locator(".turn:has(.mark)").last.click()
    page.locator(".turn-view table").wait_for()
    page.screenshot(path=path)
    page.close()
    print(path.relative_to(DOCS.parent))
