"""The pages of prompts and groups in a real Chromium: the records' numbers, permalinks, keys, hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.dashboard.assets import write_export
from tests.support.browser import visiting
from tests.support.dashboard_app import serving_dashboard
from tests.support.recorded_responses import write_agent_run, write_rollout_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_rollout_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def address(run: Any) -> Iterator[str]:
    with serving_dashboard(run) as url:
        yield url


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page of which nothing is complained on the console."""
    with visiting(browser, address) as visit:
        yield visit.page
        assert visit.page.evaluate("window.hacked") is None
        assert visit.complaints == []


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
    assert texts(page, "#transitions tbody tr")[0].split("\t") == ["1", "B_bad", "entered", "group with mu = 0"]
    assert "mean reward 0 at version 1, 0.25 at version 2" in page.inner_text("#pass-rate-summary")
    page.click("#pass-rate .tools summary")
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


def test_text_of_a_model_is_text(page: Any, address: str) -> None:
    opened(page, address, "group/hard%402", "#response-2 .response-text")
    shown = page.inner_text("#response-1 .response-text")
    assert shown.startswith("<script>window.hacked = 1</script></script><img src=x onerror=window.hacked=1>")
    assert "⟨ESC⟩[31mred⟨U+202E⟩evil⟨NUL⟩" in shown
    assert page.locator("#content script, #content img").count() == 0
    assert len(page.inner_text("#response-2 .response-text").split("\n")[0]) >= 100_000
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_an_episode_is_a_transcript_that_fits_a_phone_in_both_themes(browser: Any, tmp_path: Path) -> None:
    with serving_dashboard(write_agent_run(tmp_path / "agents")) as address:
        for width, scheme in ((1280, "light"), (390, "dark")):
            with visiting(browser, address, width=width, scheme=scheme) as visit:
                page = opened(visit.page, address, "group/agent%402", "#response-1 .turn")
                lines = [re.sub(r"\s+", " ", text) for text in texts(page, "#response-0 .turn")]
                assert lines == [
                    "Turn 0 2 sampled tokens sampled get(a)<eos>",
                    "Turn 1 3 sampled tokens context <tool>37<assistant> sampled calc(37+5)<eos>",
                    "Turn 2 1 sampled token context <tool>42<assistant> sampled 42",
                ]
                assert texts(page, "#response-1 .tag.warn") == [
                    "fork: continues turn 0", "history was changed: starts again",
                ]  # fmt: skip
                assert texts(page, "#response-2 .response-text") == ["5"]  # one turn is no transcript
                page.focus("#response-0 .response-text")
                for _ in range(4):
                    page.keyboard.press("ArrowRight")
                assert page.inner_text("#response-0 .readout").startswith("token 4 of 6, turn 1, “(37+5)”")
                page.click("#engine-prompt summary")
                assert page.inner_text("#engine-prompt pre") == "<user>a+5<assistant>"
                assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
                assert page.evaluate("window.hacked") is None
                opened(page, address, "", "#turns:not([hidden])")
                assert "get 0.5, calc 0.25" not in page.inner_text("#tool-calls-summary")  # of step 2
                opened(page, address, "?step=2", "#tool-calls-summary:has-text('get 0.5')")
                assert page.inner_text("#tool-calls-summary").startswith("Step 2: get 0.5, calc 0.25, tool-0 0")
                assert visit.complaints == []


def test_a_run_without_agents_has_no_cards_of_episodes(page: Any, address: str) -> None:
    opened(page, address, "", "#reward-summary:has-text('Step 2')")
    assert page.locator("#turns[hidden], #tool-calls[hidden]").count() == 2


def test_an_exported_file_shows_the_same_and_says_what_it_does_not_carry(page: Any, run: Any, tmp_path: Path) -> None:
    file = write_export(run, tmp_path / "page.html")
    address = file.as_uri()
    opened(page, address, "group/hard%402?response=1", "#response-1.selected")
    assert "<script>window.hacked = 1</script>" in page.inner_text("#response-1 .response-text")
    opened(page, address, "prompt/hard", "#visits tbody tr:nth-child(2)")
    page.click("text=hard@1")
    page.wait_for_selector(".notice:has-text('not included in the exported file')")
    opened(page, address, "prompts?text=HARD", "#results tbody tr")
    assert texts(page, "#results tbody th") == ["hard"]
