"""TensorBoard: event files in RUN/tensorboard, by tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping

from bapo.analysis.trackers.base import TrackedRun

PACKAGE = "tensorboardX"
EVENTS = "events.out.tfevents.*"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter  # optional

        # It is written again from the run's records each time: an older file would draw every step twice.
        for old in run.folder.glob(EVENTS):
            old.unlink()
        self._writer = SummaryWriter(str(run.folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def make_tracker(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)
