"""The records of a run, as numbers, to a tracker: each once, in order, while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo.analysis.trackers.base import Tracker
from bapo.core.types import Version
from bapo.runtime.run_directory.files import Lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import EvaluationRow, MetricsRow


class _MeasuredRow(EvaluationRow, kw_only=True):
    split: str
    step: Version


class Sender:
    """Follows one run. Raises, everywhere: ContractError for records that cannot be read."""

    def __init__(self, run: RunDirectory, tracker: Tracker) -> None:
        self._run, self._tracker = run, tracker
        self._sent: dict[tuple[str, int], Mapping[str, float]] = {}
        self._begin()

    def _begin(self) -> None:
        self._steps = Lines(self._run.path / "metrics.jsonl", MetricsRow)
        self._measured = Lines(self._run.path / "evaluations.jsonl", _MeasuredRow)

    def send_new(self) -> int:
        """Send what is new since the last call; the number of rows sent.

        A resumed run writes the steps behind its checkpoint again: those that came out differently are sent again.
        """
        if self._steps.is_another_file() or self._measured.is_another_file():
            self._begin()
        rows = [(("", row["step"]), numbers_of(row)) for row in self._steps.read()]
        rows += [((row["split"], row["step"]), measured(row)) for row in self._measured.read()]
        new = [(key, values) for key, values in rows if self._sent.get(key) != values]
        for key, values in new:
            self._tracker.log(key[1], values)
            self._sent[key] = values
        return len(new)


def numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a step, those of inner maps as `outer/inner`; lists, texts and what is unknown are left out."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(value, f"{prefix}{name}/"))
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
            found[f"{prefix}{name}"] = float(value)
    return found


def measured(row: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy of one held-out split, with its interval."""
    names = ("accuracy", "low", "high", "mean_tokens", "truncated_share")
    return {f"{row['split']}/{name}": float(row[name]) for name in names if row.get(name) is not None}
