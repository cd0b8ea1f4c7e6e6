"""Every number that the overview draws, in a real Chromium, against the records and the buffer that it comes from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bapo.core.types import Fate, Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from tests.browser import Visit, visiting
from tests.web_setup import (
    BATCH,
    GROUP,
    NUM_STEPS,
    all_values,
    drawn,
    opened,
    rows_of,
    summary,
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
