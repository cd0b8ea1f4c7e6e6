"""The page in a real Chromium: it loads, follows a run that goes on, and has the numbers of its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bapo.runtime.auth.api_tokens import Keyring, Role, digest
from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.synthetic_run import extend
from services.dashboard.assets import write_export
from tests.support.browser import visiting
from tests.support.dashboard import NUM_STEPS, made_run, opened, values, viewed
from tests.support.dashboard_app import serving_dashboard


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


def test_a_run_with_tokens_asks_for_one_and_keeps_it_for_the_tab(
    redis_url: str, browser: Any, finished: RunDirectory
) -> None:
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
