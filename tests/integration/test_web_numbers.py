"""Every number that the overview draws, in a real Chromium, against the records and the buffer that it comes from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import load_resolved
from bapo.records import RunDirectory
from bapo.types import Fate, Progress, Purpose
from bapo.wire import pack_group
from tests.browser import Visit, visiting
from tests.buffer_app import serving, small_config
from tests.buffer_setup import answer, new_store
from tests.dashboard_app import serving_dashboard
from tests.factories import make_request
from tests.web_setup import (
    BATCH,
    GROUP,
    NUM_STEPS,
    all_values,
    drawn,
    opened,
    queue_rows,
    rows_of,
    summary,
    values,
)

WORDS = {"x1": "X1 fresh", "x2": "X2 improved", "x3": "X3 reused"}
PHASES = {
    "wait_batch_s": "waiting for the batch", "prox_s": "proximal log-probs",
    "update_s": "forward, backward, optimizer", "diagnostics_s": "theorem meter",
    "sync_s": "weight update of the workers", "checkpoint_s": "checkpoint",
}  # fmt: skip
CURVES = {
    "composition": {**{WORDS[name]: name for name in WORDS}, "B": "batch_size"},
    "tables": {"B_bad prompts": "num_bad", "B_high groups": "num_high"},
    "staleness": {WORDS[name]: f"staleness_{name}_mean" for name in WORDS},
    "reward": {"r_tot": "reward_mean"}, "loss": {"loss": "loss"}, "entropy": {"entropy": "entropy"},
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
        left = [step_s - sum(column[name][i] for name in PHASES) for i, step_s in enumerate(column["step_s"])]
        assert all_values(visit, "phases") == {
            **{words: short(column[name]) for name, words in PHASES.items()},
            "everything else": [pytest.approx(max(0.0, rest), abs=1e-4) for rest in left],
        }
        assert visit.complaints == []


def test_the_theorem_meter_has_the_numbers_of_the_records(browser: Any, address: str, finished: RunDirectory) -> None:
    column, rows, settings = columns_of(finished), rows_of(finished), load_resolved(finished.config_path).diagnostics
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        for chart, limit in (("tv", settings.tv_warn), ("ess", settings.ess_warn)):
            measured = {name.upper(): short(column[f"{chart}_{name}"]) for name in WORDS}
            assert all_values(visit, chart) == {**measured, "limit": [limit] * NUM_STEPS}, chart
        bounds = {name: [next((b["paper"] for b in row["bounds"] if b["origin"] == name), None) for row in rows]
                  for name in WORDS}  # fmt: skip
        assert all(any(value is not None for value in series) for series in bounds.values()), "each subset has some"
        assert all_values(visit, "bound") == {name.upper(): short(series) for name, series in bounds.items()}
        cells = {cell["origin"]: cell["tv_tok"] for cell in rows[-1]["divergences"] if cell["age"] is not None}
        shown = {name: [v for v in points if v is not None] for name, points in drawn(visit, "by-age").items()}
        assert shown == {name.upper(): [pytest.approx(tv, rel=1e-5)] for name, tv in cells.items()}
        assert {"vacuous" in summary(visit, "bound"), visit.complaints == []} == {True}


Fresh = dict[int, list[Fate]]


def fresh_of(run: RunDirectory) -> Fresh:
    """Step -> its own fresh groups."""
    return {
        step: [f for f in fates if f.purpose is Purpose.FRESH and f.birth == step]
        for step, fates in dict(run.read_groups()).items()
    }


def visits_until(fresh: Fresh, step: int) -> list[list[int]]:
    """Per prompt that came again by then: how many of its responses were right, visit after visit."""
    visits: dict[str, list[int]] = {}
    for number in range(1, step + 1):
        for fate in fresh[number]:
            visits.setdefault(fate.prompt_id, []).append(round(sum(fate.rewards)))
    return [ks for ks in visits.values() if len(ks) > 1]


def matrix_of(fresh: Fresh, step: int) -> list[list[str]]:
    """Cells as they are written."""
    moved = Counter((ks[0], ks[-1]) for ks in visits_until(fresh, step))
    return [[str(moved[a, b] or "·") for b in range(GROUP + 1)] for a in range(GROUP + 1)]


def shown_matrix(visit: Visit) -> Any:
    return visit.page.eval_on_selector_all(
        "#migration .matrix tbody tr",
        "rows => rows.map(r => [...r.querySelectorAll('td')].map(c => c.textContent))",
    )


def shares_of(fresh: Fresh, first: int, last: int) -> Any:
    """Percent of the fresh groups of these steps by right responses."""
    counts = Counter(round(sum(f.rewards)) for step in range(first, last + 1) for f in fresh[step])
    return pytest.approx([100 * counts[k] / ((last - first + 1) * BATCH) for k in range(GROUP + 1)], rel=1e-5)


def shown_bins(visit: Visit) -> dict[str, list[float]]:
    return {name: [point["value"] for point in points] for name, points in drawn(visit, "bins").items()}


def test_bins_migration_and_rescues_are_those_of_the_groups(browser: Any, address: str, finished: RunDirectory) -> None:
    fresh, quarter = fresh_of(finished), NUM_STEPS // 4
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        assert shown_bins(visit) == {
            f"steps 1 to {quarter}": shares_of(fresh, 1, quarter),
            f"steps {NUM_STEPS - quarter + 1} to {NUM_STEPS}": shares_of(fresh, NUM_STEPS - quarter + 1, NUM_STEPS),
        }
        assert shown_matrix(visit) == matrix_of(fresh, NUM_STEPS)
        unsolved = [[ks for ks in visits_until(fresh, step) if ks[0] == 0] for step in range(1, NUM_STEPS + 1)]
        rescued = [sum(ks[-1] > 0 for ks in found) for found in unsolved]
        assert all_values(visit, "rescued") == {
            "unsolved at first": [len(found) for found in unsolved], "rescued": rescued,
        }  # fmt: skip
        assert 0 < rescued[-1] < len(unsolved[-1])
        assert f"{rescued[-1]} of {len(unsolved[-1])} unsolved prompts" in summary(visit, "rescued")


def test_an_earlier_step_shows_what_was_known_then(browser: Any, address: str, finished: RunDirectory) -> None:
    fresh, rows, quarter = fresh_of(finished), rows_of(finished), NUM_STEPS // 4
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        visit.page.focus(".slider input")
        for step in (NUM_STEPS - 1, NUM_STEPS - 2):
            visit.page.keyboard.press("ArrowLeft")
            opened(visit, step)
            assert shown_matrix(visit) == matrix_of(fresh, step)
        visit.page.evaluate("location.hash = '#/overview?step=12'")
        opened(visit, 12)
        assert shown_matrix(visit) == matrix_of(fresh, 12) != matrix_of(fresh, NUM_STEPS)
        assert shown_bins(visit)[f"steps {12 - quarter + 1} to 12"] == shares_of(fresh, 12 - quarter + 1, 12)
        assert sum(values(visit, "ages", "B_bad prompts")) == rows[11]["num_bad"]
        assert shown_fates(visit) == Counter(fate.reason for fate in dict(finished.read_groups())[12])


def shown_fates(visit: Visit) -> dict[str, int]:
    """Rule -> groups."""
    reasons = visit.page.eval_on_selector_all(
        "#fates tbody tr", "rows => rows.map(r => [r.children[0].textContent, r.children[1].textContent])"
    )
    return {name: int(n) for name, n in reasons}


def test_ages_and_fates_are_those_of_the_groups(browser: Any, address: str, finished: RunDirectory) -> None:
    last = rows_of(finished)[-1]
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        assert sum(values(visit, "ages", "B_bad prompts")) == last["num_bad"] > 0
        assert sum(values(visit, "ages", "B_high groups")) == last["num_high"]
        assert shown_fates(visit) == Counter(fate.reason for fate in dict(finished.read_groups())[NUM_STEPS])


def test_held_out_accuracy_has_its_interval(browser: Any, address: str, finished: RunDirectory) -> None:
    measured = [json.loads(line) for line in (finished.path / "evaluations.jsonl").read_text().splitlines()]
    splits = {name: [row for row in measured if row["split"] == name] for name in ("easy", "hard")}
    with visiting(browser, address) as visit:
        opened(visit, NUM_STEPS)
        expected: dict[str, Any] = {}
        for name, rows in splits.items():
            percents = {"": [row["accuracy"] for row in rows], " from": [row["low"] for row in rows],
                        " to": [row["high"] - row["low"] for row in rows]}  # fmt: skip
            expected |= {
                name + end: [pytest.approx(100 * v, rel=1e-4) for v in series] for end, series in percents.items()
            }
        assert all_values(visit, "held-out") == expected
        assert [point[0] for point in drawn(visit, "held-out")["hard"]] == [0, 8, 16, 24]
        visit.page.select_option("#migration select", "easy")
        for step, newest in ((NUM_STEPS, 3), (12, 1)):  # the newest measurement after step 12 is that of step 8
            visit.page.evaluate(f"location.hash = '#/overview?step={step}'")
            opened(visit, step)
            before, after = splits["easy"][0]["rewards"], splits["easy"][newest]["rewards"]
            moved = Counter((round(sum(before[name])), round(sum(after[name]))) for name in before)
            assert shown_matrix(visit) == [[str(moved[a, b] or "·") for b in range(9)] for a in range(9)]


def test_the_queues_are_those_of_the_buffer(browser: Any, tmp_path: Path) -> None:
    """Five fresh requests: one is done, one failed and waits again, one is at a worker; and one of an evaluation."""
    store = new_store("memory", "")
    with (
        serving(store, small_config()) as client,
        serving_dashboard(RunDirectory(tmp_path / "away"), buffer_url=client.url) as url,
        visiting(browser, url) as visit,
    ):
        client.report_progress(Progress(step=1, policy_version=1))
        client.enqueue([make_request(prompt_id=f"p{i}", step=1) for i in range(5)])
        done, failed, _ = client.claim("w1", limit=3, policy_version=1)
        client.enqueue([make_request(prompt_id="held-out", purpose=Purpose.EVALUATE, step=1, label="cd@1")])
        frame = pack_group(answer(done, worker_id="w1"))
        assert client.push([frame]) == {done.request_id: "stored"}
        client.fail("w1", failed.request_id, reason="verifier_timeout", detail="killed after 10 s")
        visit.page.wait_for_selector("#queues td:has-text('verifier_timeout')")
        rows = queue_rows(visit)
        workers = rows.pop("worker w1")
        assert workers.startswith("leased 1, silent s ")
        assert rows == {
            "requests: fresh": "3 waiting, 1 at workers", "requests: evaluate": "1 waiting, 0 at workers",
            "requests: reevaluate": "0 waiting, 0 at workers", "fresh groups ready": "1",
            "re-evaluated groups ready": "0", "groups held": f"{len(frame) / 1e6:.3g} MB",
            "failures in a row": "1 (verifier_timeout: killed after 10 s)",
        }  # fmt: skip
        assert summary(visit, "queues") == (
            "Step 1 is under way with policy version 1: 4 requests wait for a worker, 1 fresh group for the learner."
        )
        assert visit.complaints == []
