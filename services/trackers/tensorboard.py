"""TensorBoard: event files in RUN/tensorboard, by tensorboardX.

They are written again from the records at each start: they hold exactly the steps that the run has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.config.tracking import TrackingConfig
from services.trackers.base import TrackedRun, missing_package

EVENTS = "events.out.tfevents.*"
FLUSH_S = 1
"""Seconds until a number is in the file. The writer's own `flush` does not wait for its queue."""


class TensorBoard:
    tracker_id = None

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter  # optional

        for old in run.folder.glob(EVENTS):
            old.unlink()
        self._writer = SummaryWriter(str(run.folder), flush_secs=FLUSH_S)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=values.get("time"))

    def log_responses(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """TensorBoard has no tables."""

    def close(self, *, is_complete: bool) -> None:
        self._writer.close()


def problem(settings: TrackingConfig) -> str | None:
    """Why it cannot be used here; None: it can."""
    return missing_package("tensorboardX", "tensorboardX")


def make_tracker(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)
