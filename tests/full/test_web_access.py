"""The page for everybody: on a phone, in the dark, by keyboard, and for those who hear it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Visit, visiting
from tests.support.dashboard import NUM_STEPS, opened

CONTRAST = (Path(__file__).parents[1] / "support" / "contrast.js").read_text()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["1280-light", "390-dark"])
def whole(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Visit]:
    width, scheme = request.param
    with visiting(browser, address, width=width, scheme=scheme) as visit:
        yield opened(visit, NUM_STEPS)


def test_nothing_is_wider_than_the_screen(whole: Visit) -> None:
    width = whole.page.viewport_size["width"]
    assert whole.page.evaluate("document.documentElement.scrollWidth") <= width
    whole.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    whole.page.wait_for_selector("#composition .rows table")
    assert whole.page.evaluate("document.documentElement.scrollWidth") <= width


def test_text_stands_out_from_its_ground(whole: Visit) -> None:
    """WCAG AA: 4.5 : 1 for text (3 : 1 from 24 px, or bold from 18.7 px), composed over all grounds beneath it."""
    assert whole.page.evaluate(CONTRAST) == []


def test_the_tab_key_visits_everything_in_order_and_shows_where_it_is(whole: Visit) -> None:
    seen = []
    for _ in range(12):
        whole.page.keyboard.press("Tab")
        seen.append(whole.page.evaluate(
            """() => { const e = document.activeElement;
                return [e.textContent.trim() || e.id || e.type, getComputedStyle(e).outlineStyle] }"""
        ))  # fmt: skip
    names = [name for name, _ in seen]
    assert names[:2] == ["Skip to the content", "Overview"]
    assert names.index("Theme: system") < names.index("Follow the newest")
    assert all(outline != "none" for _, outline in seen)
    whole.page.focus("a.skip")
    whole.page.keyboard.press("Enter")
    assert whole.page.evaluate("document.activeElement.id") == "content"
