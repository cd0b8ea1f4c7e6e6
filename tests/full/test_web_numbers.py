"""Every number that the overview draws, in a real Chromium, against the records and the buffer that it comes from."""

from __future__ import annotations

from typing import Any

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.browser import visiting
from tests.support.dashboard import (
    NUM_STEPS,
    all_values,
    opened,
    rows_of,
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
