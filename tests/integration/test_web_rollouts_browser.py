"""The pages of prompts and groups in a real Chromium: the records' numbers, permalinks, keys, hostile text."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.dashboard.export import write_export
from tests.dashboard_app import serving_dashboard
from tests.rollout_run import write_rollout_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_rollout_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def address(run: Any) -> Iterator[str]:
    with serving_dashboard(run) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which nothing may appear on the console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found, said = context.new_page(), []
    found.set_default_timeout(WAIT_MS)
    found.on("console", lambda message: said.append(message.text))
    found.on("pageerror", lambda error: said.append(str(error)))
    yield found
    assert found.evaluate("window.hacked") is None
    context.close()
    assert said == []


def opened(page: Any, address: str, place: str, until: str) -> Any:
    page.goto(f"{address}#/{place}")
    page.wait_for_selector(until)
    return page


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def test_a_prompt_shows_its_visits_and_leads_to_its_groups(page: Any, address: str) -> None:
    opened(page, address, "prompt/hard", "#visits tbody tr:nth-child(2)")
    rows = [re.sub(r"\s+", " ", row) for row in texts(page, "#visits tbody tr")]
    assert rows[0].startswith("1 Fresh 1 0 of 4 hard@1 – its fresh group had k = 0 of 4")
    assert rows[1].startswith("2 Fresh 2 1 of 4 hard@2 (text) X1 its fresh group had k = 1 of 4")
    assert "fresh group with mu = 0 <= c1 = 0.125" in texts(page, "#transitions tbody tr")[0]
    assert "0 of 4 right at version 1, 1 of 4 at version 2" in page.inner_text("#pass-rate-summary")
    page.click("#pass-rate summary")
    page.wait_for_selector("#pass-rate tbody tr")  # the toggle event fills it, after the click has returned
    numbers = [re.sub(r"\s+", " ", row) for row in texts(page, "#pass-rate tbody tr")]
    assert numbers == ["1 0 Fresh 1", "2 0.25 Fresh 2"]
    page.click("text=hard@2 (text)")
    page.wait_for_selector("#response-0")
    assert "#/group/hard%402?step=2" in page.url


def test_a_group_shows_reward_answer_and_advantage_of_each_response(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402", "#response-3 .response-text")
    assert texts(page, ".response .reward") == ["1", "0", "0", "0"]
    assert texts(page, ".response .advantage") == ["1.5", "-0.5", "-0.5", "0"]
    assert texts(page, ".response .extracted") == ["12+5+7", "–", "–", "–"]
    assert page.inner_text("#gold") == "12+5+7"
    assert page.inner_text("#response-0 .response-text") == "12+5+7 is 24"
    assert "advantage 0" in page.inner_text("#response-3")


def test_a_group_that_did_not_train_shows_its_texts_rewards_and_answers(page: Any, address: str) -> None:
    opened(page, address, "group/easy%402", "#response-3 .response-text")
    assert texts(page, ".response .reward") == ["1"] * 4
    assert texts(page, ".response .advantage") == ["–"] * 4
    assert texts(page, ".response .extracted") == ["easy 0", "easy 1", "easy 2", "easy 3"]
    assert page.inner_text("#response-2 .response-text").startswith("easy answer 2 <script>")
    assert "not trained in step 2" in page.inner_text("main")
    assert "no numbers of tokens: the group did not train in this step" in page.inner_text("#text-alone")
    page.hover("#response-0 .response-text")
    page.keyboard.press("j")
    page.wait_for_selector("#response-0.selected, #response-1.selected")
    assert page.locator("fieldset.controls").count() == 0


def classes(page: Any, response: int) -> list[str]:
    found = page.locator(f"#response-{response} .token").evaluate_all("tokens => tokens.map(t => t.className)")
    return [name.replace("token", "", 1).strip() for name in found]


def test_the_colour_of_a_token_is_that_of_its_number(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402", "#response-0 .token")
    assert classes(page, 0) == ["heat-0", "heat-1", "heat-1", "heat-1"]  # 0, 0.1, 0.2, 0.3 nats
    page.check("input[value=ratio]")
    assert classes(page, 0) == ["ratio-2", "ratio-3", "ratio-3", "ratio-4"]  # 1, 1.1, 1.2, 1.3
    page.check("input[value=clipping]")
    assert classes(page, 0) == ["heat-0", "clipped", "heat-0", "heat-0"]
    assert "colour=clipping" in page.url
    assert "clipped: the objective did not follow the ratio" in page.inner_text(".legend")
    page.reload()
    page.wait_for_selector("#response-0 .clipped")


def test_a_token_tells_its_numbers_to_the_pointer_and_to_the_keyboard(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402", "#response-0 .token")
    want = "token 2 of 4 “+5”: entropy 0.1 nats, ratio 1.1, clipped, log π -0.25, log α -0.5 (60.7 %)"
    page.hover("#response-0 .token:nth-child(2)")
    assert page.inner_text("#response-0 .readout") == want
    page.hover("h1")
    page.focus("#response-0 .response-text")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#response-0 .readout") == want


def test_j_and_k_go_between_responses_and_the_address_remembers_which(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402?response=1", "#response-1.selected")
    page.keyboard.press("j")
    page.wait_for_selector("#response-2.selected")
    assert "response=2" in page.url
    page.keyboard.press("k")
    page.keyboard.press("k")
    page.wait_for_selector("#response-0.selected")
    assert page.evaluate("document.activeElement.closest('.response').id") == "response-0"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # the focus is seen
    page.reload()
    page.wait_for_selector("#response-0.selected")


def test_text_of_a_model_is_text(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402", "#response-2 .response-text")
    shown = page.inner_text("#response-1 .response-text")
    assert shown.startswith("<script>window.hacked = 1</script></script><img src=x onerror=window.hacked=1>")
    assert "⟨ESC⟩[31mred⟨U+202E⟩evil⟨NUL⟩" in shown
    assert page.locator("#content script, #content img").count() == 0
    assert len(page.inner_text("#response-2 .response-text").split("\n")[0]) >= 100_000
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_more_of_a_long_response_comes_when_it_is_asked_for(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402", "#response-3 .more")
    assert page.locator("#response-3 .token").count() == 2000
    page.click("#response-3 .more")
    page.wait_for_selector("#response-3 .token:nth-child(3000)")
    assert page.locator("#response-3 .more").count() == 0


def test_a_group_without_a_record_says_how_to_get_one(page: Any, address: str) -> None:
    opened(page, address, "group/easy%401", "#no-text")
    text = page.inner_text("#no-text")
    assert "it was not the turn of step 1 (diagnostics.texts = 2, diagnostics.token_records = 2; 0: never)" in text
    assert "Rewards: 1, 1, 1, 0" in text


def test_the_search_finds_a_response_and_opens_it(page: Any, address: str) -> None:
    opened(page, address, "prompts", "#results tbody tr:nth-child(5)")
    page.fill("#words", "is 24")
    page.wait_for_selector("#results td:has-text('12+5+7 is 24')")
    assert "text=is+24" in page.url
    page.click("text=hard@2 / 0")
    page.wait_for_selector("#response-0.selected")


def test_a_cell_of_the_matrix_and_a_buffer_have_their_prompts(page: Any, address: str) -> None:
    opened(page, address, "prompts?first=0&last=1", "#results tbody tr")
    assert texts(page, "#results tbody th") == ["hard"]
    opened(page, address, "prompts", "#results tbody tr:nth-child(5)")
    page.select_option("#table", "bad")
    page.wait_for_selector("#results p:has-text('2 prompts')")
    assert sorted(texts(page, "#results tbody th")) == ["hard", "zero"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["prompts", "prompt/hard", "group/hard%402", "prompts?text=no"])
def test_nothing_is_wider_than_a_phone(browser: Any, address: str, place: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = opened(context.new_page(), address, place, "main table, main .response-text")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    context.close()


def ratio(first: list[float], second: list[float]) -> float:
    """WCAG contrast of two colours."""

    def luminance(colour: list[float]) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_of_the_heat_map_can_be_read_and_its_steps_differ_in_lightness(
    browser: Any, address: str, scheme: str
) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = opened(context.new_page(), address, "group/hard%402", ".legend .token")
    seen: dict[str, list[list[float]]] = {}
    for metric in ("entropy", "ratio", "clipping"):
        page.check(f"input[value={metric}]")
        found = page.locator(".legend .token").evaluate_all(
            """tokens => tokens.map(t => {
                 const rgb = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
                 const own = rgb(getComputedStyle(t).backgroundColor);
                 const ground = rgb(getComputedStyle(document.querySelector(".response-text")).backgroundColor);
                 return [rgb(getComputedStyle(t).color).slice(0, 3), (own[3] === 0 ? ground : own).slice(0, 3)];
               })"""
        )
        seen[metric] = [ground for _, ground in found]
        assert all(ratio(text, ground) >= 4.5 for text, ground in found), (metric, found)
    neighbours = zip(seen["entropy"], seen["entropy"][1:], strict=False)
    assert all(ratio(first, second) > 1.08 for first, second in neighbours)
    assert ratio(seen["entropy"][0], seen["entropy"][-1]) > 4
    context.close()


def test_an_exported_file_shows_the_same_and_says_what_it_does_not_carry(page: Any, run: Any, tmp_path: Path) -> None:
    file = write_export(run, tmp_path / "page.html")
    address = file.as_uri()
    opened(page, address, "group/hard%402?response=1", "#response-1.selected")
    assert "<script>window.hacked = 1</script>" in page.inner_text("#response-1 .response-text")
    opened(page, address, "prompt/hard", "#visits tbody tr:nth-child(2)")
    page.click("text=hard@1")
    page.wait_for_selector(".notice:has-text('does not carry this group')")
    opened(page, address, "prompts?text=HARD", "#results tbody tr")
    assert texts(page, "#results tbody th") == ["hard"]


def test_a_cell_of_the_overviews_matrix_leads_to_its_prompts_and_one_of_them_to_its_groups(
    page: Any, address: str
) -> None:
    opened(page, address, "overview", "#migration td a")
    assert page.locator("#migration td a").count() == 3  # hard 0 -> 1, easy 3 -> 4, zero 0 -> 0
    page.click("#migration td a[href='#/prompts?first=0&last=1']")
    page.wait_for_selector("#results tbody tr")
    assert texts(page, "#results tbody th") == ["hard"]
    page.click("#results tbody th a")
    page.wait_for_selector("#visits td a[href='#/group/hard%402?step=2']")
