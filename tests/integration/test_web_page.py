"""The page in a real Chromium: it loads, follows a run that goes on, and has the numbers of its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo.records import RunDirectory
from bapo.tokens import Keyring, Role, digest
from benchmarks.synthetic_run import extend
from services.dashboard.export import write_export
from tests.browser import visiting
from tests.buffer_app import serving, small_config
from tests.buffer_setup import new_store
from tests.dashboard_app import serving_dashboard
from tests.web_setup import NUM_STEPS, made_run, opened, summary, values, viewed


def test_the_page_follows_a_run_that_goes_on(browser: Any, tmp_path: Path) -> None:
    run, made = made_run(tmp_path / "live", 5)
    with viewed(run) as url, visiting(browser, url) as visit:
        opened(visit, 5)
        extend(run, made, 3)
        opened(visit, 8)
        rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert values(visit, "composition", "X1 fresh") == [row["x1"] for row in rows]
        assert len(rows) == 8
        run.truncate_after(2)  # the run went back to a checkpoint
        opened(visit, 2)
        assert values(visit, "composition", "X1 fresh") == [row["x1"] for row in rows[:2]]
        assert visit.complaints == []


def test_only_its_own_service_is_called(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        assert visit.hosts() == {address.split("/")[2]}
        assert visit.complaints == []


def test_a_link_names_a_step_and_the_slider_changes_it_by_keyboard(browser: Any, address: str) -> None:
    with visiting(browser, f"{address}#/overview?step=10") as visit:
        opened(visit, 10)
        visit.page.focus(".slider input")
        visit.page.keyboard.press("ArrowLeft")
        opened(visit, 9)
        assert visit.page.url.endswith("#/overview?step=9")
        visit.page.click("text=Follow the newest")
        opened(visit, NUM_STEPS)
        visit.page.evaluate("location.hash = '#/nowhere'")
        visit.page.wait_for_selector("text=There is no such page")


def test_an_exported_file_is_the_same_page_without_anybody(
    browser: Any, finished: RunDirectory, tmp_path: Path
) -> None:
    path = write_export(finished, tmp_path / "run.html")
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    with visiting(browser, path.as_uri() + "#/overview?step=7", offline=True) as visit:
        opened(visit, 7)
        assert values(visit, "composition", "X3 reused") == [row["x3"] for row in rows]
        assert (visit.hosts(), visit.complaints) == (set(), [])
        assert {url.split(":")[0] for url in visit.requests} <= {"file", "data"}


def test_a_run_with_tokens_asks_for_one_and_keeps_it_for_the_tab(browser: Any, finished: RunDirectory) -> None:
    token = "token-of-the-viewer-0123"
    keyring = Keyring(f"{Role.VIEWER}:{digest(token)}")
    with serving_dashboard(finished, keyring) as url:
        with visiting(browser, url) as visit:
            visit.page.fill("#token", "not-one-of-ours-0000")
            visit.page.click("text=Show the run")
            visit.page.wait_for_selector("text=this token is not accepted here")
            visit.page.fill("#token", token)
            visit.page.keyboard.press("Enter")
            opened(visit, NUM_STEPS)
            visit.page.reload()
            opened(visit, NUM_STEPS)
            assert token not in visit.page.url
            assert visit.page.evaluate("[document.cookie, Object.keys(localStorage).join()]") == ["", ""]
        with visiting(browser, url) as other:
            other.page.wait_for_selector("#token-form")


@pytest.mark.parametrize("place", ["overview", "prompts", "prompt/any", "group/any"])
def test_before_there_is_a_token_nothing_is_asked_and_nothing_is_on_the_console(
    browser: Any, finished: RunDirectory, place: str
) -> None:
    keyring = Keyring(f"{Role.VIEWER}:{digest('token-of-the-viewer-0123')}")
    with (
        serving_dashboard(finished, keyring) as url,
        visiting(browser, f"{url}#/{place}") as visit,
    ):
        visit.page.wait_for_selector("#token-form")
        visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # a tab that is seen again
        visit.page.wait_for_timeout(500)
        assert (visit.complaints, [url for url in visit.requests if "/api/" in url]) == ([], [])
        assert visit.page.locator("#token-form .problem").count() == 0
        assert visit.page.evaluate("getComputedStyle(document.getElementById('token-form')).paddingLeft") != "0px"
        assert visit.page.inner_text("#connection") == "token needed"


def test_a_buffer_without_records_shows_what_it_knows_itself(browser: Any, tmp_path: Path) -> None:
    """No run directory: queues are there, and the page says what is not."""
    away = RunDirectory(tmp_path / "away")
    with (
        serving(new_store("memory", ""), small_config()) as client,
        serving_dashboard(away, buffer_url=client.url) as url,
        visiting(browser, url) as visit,
    ):
        visit.page.wait_for_selector("#queues .summary:has-text('requests wait for a worker')")
        assert "No step has ended yet" in visit.page.text_content("main")
        assert visit.complaints == []


def test_when_the_service_is_away_the_page_says_so_and_keeps_what_it_has(browser: Any, finished: RunDirectory) -> None:
    with visiting(browser, "data:text/html,<body data-ready>") as visit:
        with viewed(finished) as url:
            visit.page.goto(url)
            opened(visit, NUM_STEPS)
        visit.page.wait_for_selector("text=The service does not answer.")
        assert summary(visit, "composition").startswith(f"Step {NUM_STEPS}:")
        with viewed(finished, int(url.split(":")[2].split("/")[0])):
            visit.page.wait_for_selector("#problem", state="hidden")


def test_text_of_a_run_is_never_markup(browser: Any, tmp_path: Path) -> None:
    run, made = made_run(tmp_path / "evil", 2)
    row, fates = made.step()
    run.write_groups(3, fates)
    run.append_metrics(row | {"warning": "<img src=x onerror=alert(1)></script><script>alert(2)</script>"})
    page = write_export(run, tmp_path / "evil.html")
    with viewed(run) as url:
        for place in (url, page.as_uri()):
            with visiting(browser, place) as visit:
                opened(visit, 3)
                assert "<img src=x onerror=alert(1)></script><script>" in visit.page.text_content("main .notice")
                assert visit.page.query_selector("main img, main script") is None
                refusal = visit.page.evaluate(
                    "() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } }"
                )
                assert refusal == "TypeError"
