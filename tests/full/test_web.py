"""The page in a real Chromium: it follows a run, draws the numbers of its records, and is there for everybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo.runtime.auth.api_tokens import Keyring, Role, digest
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.synthetic_run import extend
from services.dashboard.assets import write_export
from tests.support.browser import Visit, visiting
from tests.support.dashboard import (
    NUM_STEPS,
    all_values,
    made_run,
    opened,
    rows_of,
    values,
    viewed,
)
from tests.support.dashboard_app import serving_dashboard
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run


def test_the_page_follows_a_running_run(browser: Any, tmp_path: Path) -> None:
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
    set_of_run(finished.path).folder.mkdir()
    with serving_dashboard(finished, keyring) as url:
        with visiting(browser, url) as visit:
            visit.page.wait_for_selector("#token-form")
            assert visit.page.text_content("main").startswith("This run requires a token")  # and no figures behind it
            assert f"{finished.path}/tokens/operator/token" in visit.page.text_content("main")
            visit.page.fill("#token", "not-one-of-ours-0000")
            visit.page.click("text=Show the run")
            visit.page.wait_for_selector("text=invalid token")
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
    row, results = made.step()
    run.write_groups(3, results)
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


def test_runs_of_a_folder_are_switched_and_compared(browser: Any, tmp_path: Path) -> None:
    ours, _ = made_run(tmp_path / "runs/ours", 5)
    theirs, _ = made_run(tmp_path / "runs/theirs", 3)
    with viewed(ours) as url, visiting(browser, url) as visit:
        opened(visit, 5)
        visit.page.select_option("[aria-label='Compare with']", "theirs")
        visit.page.wait_for_function(
            "() => document.querySelector('#reward .canvas').card.chart().getOption().series.length === 2"
        )
        assert values(visit, "reward", "mean reward, theirs") == short([row["reward_mean"] for row in rows_of(theirs)])
        visit.page.select_option("[aria-label='Run']", "theirs")
        opened(visit, 3)
        assert visit.complaints == []


def test_the_numbers_of_a_chart_are_saved_as_csv_and_its_picture_as_png(
    browser: Any, address: str, finished: RunDirectory
) -> None:
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        with visit.page.expect_download() as csv:
            visit.page.click("[aria-label='Batch composition as CSV']")
        lines = Path(csv.value.path()).read_text().splitlines()
        assert lines[0] == "step,X1,X2,X3,batch,B"
        assert lines[1].split(",")[1:4] == [str(rows_of(finished)[0][name]) for name in ("x1", "x2", "x3")]
        with visit.page.expect_download() as png:
            visit.page.click("[aria-label='Batch composition as PNG']")
        assert Path(png.value.path()).read_bytes().startswith(b"\x89PNG")
        assert visit.complaints == []


# -- numbers


WORDS = {"x1": "X1 fresh", "x2": "X2 re-evaluated", "x3": "X3 reused"}
PHASES = {
    "wait_batch_s": "waiting for the batch", "prox_s": "proximal log-probs",
    "update_s": "forward, backward, optimizer", "diagnostics_s": "diagnostics",
    "sync_s": "weight update of the workers", "checkpoint_s": "checkpoint",
}  # fmt: skip
CURVES = {
    "composition": {**{WORDS[name]: name for name in WORDS}, "B": "batch_size"},
    "tables": {"B_bad prompts": "num_bad", "B_high groups": "num_high"},
    "staleness": {WORDS[name]: f"staleness_{name}_mean" for name in WORDS},
    "reward": {"mean reward": "reward_mean"}, "loss": {"loss": "loss"}, "entropy": {"entropy": "entropy"},
    "grad-norm": {"gradient norm": "grad_norm"}, "clipping": {"clipped share": "clip_ratio"},
}  # fmt: skip
"""Chart -> all of its series -> column of metrics.jsonl."""


def columns_of(run: RunDirectory) -> dict[str, list[Any]]:
    rows = rows_of(run)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _short(value: float | None) -> Any:
    """As the page is sent it: six digits."""
    return None if value is None else pytest.approx(value, rel=1e-5)


def short(series: list[Any]) -> list[Any]:
    return [_short(value) for value in series]


def test_every_series_of_every_curve_has_the_numbers_of_the_records(
    browser: Any, address: str, finished: RunDirectory
) -> None:
    column = columns_of(finished)
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        for chart, series in CURVES.items():
            assert all_values(visit, chart) == {words: short(column[name]) for words, name in series.items()}, chart
        assert all_values(visit, "thresholds") == {
            "r_tot": short(column["reward_mean"]), "c1": [0.125] * NUM_STEPS, "c2": short(column["c2"]),
            "c3": short(column["c3"]),
        }  # fmt: skip
        within = [name for name in PHASES if name != "checkpoint_s"]
        left = [step_s - sum(column[name][i] for name in within) for i, step_s in enumerate(column["step_s"])]
        assert all_values(visit, "phases") == {
            **{words: short(column[name]) for name, words in PHASES.items()},
            "everything else": [pytest.approx(max(0.0, rest), abs=1e-4) for rest in left],
        }
        assert visit.complaints == []


def test_a_method_without_thresholds_shows_none_and_a_nearly_empty_batch_says_so(browser: Any, tmp_path: Path) -> None:
    rows = [metrics_row(step, x1=1, batch_size=8) for step in range(1, 7)]
    measured = [evaluation_row("easy", version, {"p": marks, "q": marks}) for version, marks in ((1, "00"), (7, "01"))]
    run = write_run(tmp_path / "plain", preset="grpo", metrics=rows, evaluations=measured)
    with viewed(run) as url, visiting(browser, url) as visit:
        opened(visit, 6)
        hidden = [visit.page.is_hidden(f"#{name}") for name in ("thresholds", "tables", "ages", "composition")]
        assert hidden == [True, True, True, False]
        assert "r_tot" not in visit.page.inner_text("main")
        found = " ".join(visit.page.locator(".notice").all_inner_texts())
        assert "Batches are nearly empty: 1.0 of 8 groups per step" in found
        assert visit.page.get_attribute("#composition .summary", "class") == "summary warn"
        cells = visit.page.locator("#held-out .body tbody tr").all_inner_texts()
        assert cells == ["easy\t0.0 %\t50.0 %\t+50.0 [+50.0, +50.0]\t2 × 2"]
        assert visit.complaints == []


def test_times_and_diagnostics_of_steps_that_lack_some_are_no_more_than_what_is_recorded(
    browser: Any, tmp_path: Path
) -> None:
    """Steps of 2 s with checkpoints of .5 s besides; the divergence is measured in the first of two steps."""
    rows = [metrics_row(1, tv_x1=0.4), metrics_row(2, tv_x1=None)]
    run = write_run(tmp_path / "sparse", metrics=rows, overrides=["--run.num_steps", "9"])
    with viewed(run) as url, visiting(browser, url) as visit:
        opened(visit, 2)
        found = all_values(visit, "phases")
        assert (found["checkpoint"], found["everything else"]) == ([0.5, 0.5], [2.0, 2.0])
        assert "2.50 s each" in visit.page.inner_text("#phases .summary")
        assert visit.page.inner_text("#tv .summary").startswith("Last measured in step 1: X1 0.4; X1 past the limit")
        durations = "async (seconds) => seconds.map((await import('bapo/app/format.js')).duration)"
        words = ["10 s", "1 min 0 s", "3 min 0 s", "1 h 0 min"]
        assert visit.page.evaluate(durations, [9.997, 59.7, 179.6, 3599.7]) == words
        assert visit.complaints == []
    run = write_run(tmp_path / "timeless", metrics=[metrics_row(1, step_s=None)], overrides=["--run.num_steps", "9"])
    with viewed(run) as url, visiting(browser, url) as visit:
        opened(visit, 1)
        assert visit.page.locator(".tile").first.inner_text().split("\n")[-1] == "1 of 9"


def test_an_exported_file_searches_the_ids_of_all_prompts_that_it_includes(browser: Any, tmp_path: Path) -> None:
    groups = [result(f"p{i:03}", "0110", step=1) for i in range(350)]
    run = write_run(tmp_path / "many", metrics=[metrics_row(1)], groups={1: groups})
    path = write_export(run, tmp_path / "many.html")
    with visiting(browser, path.as_uri() + "#/prompts?text=29+p", offline=True) as visit:
        status = visit.page.locator("#results [role=status]")
        status.wait_for()
        # p029, p129, p229, and p290 to p299.
        assert status.inner_text().startswith("13 found.")
        assert "of 300 of 350 prompts" in status.inner_text()


# -- for everybody: on a phone, in the dark, by keyboard


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


def test_the_pages_are_in_one_line(whole: Visit) -> None:
    tops = whole.page.evaluate("[...document.querySelectorAll('#menu a')].map(e => e.getBoundingClientRect().top)")
    assert len(tops) > 2
    assert len(set(tops)) == 1


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
    assert names.index("Overview") < names.index("Follow latest")
    assert all(outline != "none" for _, outline in seen)
    whole.page.focus("a.skip")
    whole.page.keyboard.press("Enter")
    assert whole.page.evaluate("document.activeElement.id") == "content"
