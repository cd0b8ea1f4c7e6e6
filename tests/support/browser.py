"""A real Chromium for tests of the page: what it complains of and whom it calls is collected."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
WHY_NOT = "no Chromium: install it with `apt-get install --no-install-recommends chromium fonts-dejavu-core`"
PATIENCE_MS = 60_000


@dataclass
class Visit:
    """One tab, and what went wrong in it."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    """Of the console, of scripts and of requests that failed."""
    requests: list[str] = field(default_factory=list)

    def hosts(self) -> set[str]:
        """Whom it called; data: addresses have no host."""
        return {urlsplit(url).netloc for url in self.requests} - {""}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Any, url: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Iterator[Visit]:
    """A tab on this address, when its first page is mounted."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce", **options
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    visit = Visit(page)
    page.on("console", lambda m: visit.complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("request", lambda request: visit.requests.append(request.url))
    page.on("requestfailed", lambda request: visit.complaints.append(f"{request.url}: {request.failure}"))
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    yield visit
    context.close()
