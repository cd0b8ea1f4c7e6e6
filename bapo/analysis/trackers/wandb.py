"""Weights & Biases, by its own client, which finds your key: `wandb login`, or WANDB_API_KEY.

Offline, its files are in RUN/wandb, and `wandb sync` uploads them: the parts of a resumed run have one id.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from bapo.analysis.trackers.base import TrackedRun
from bapo.config.tracking import TrackingConfig

STEP = "step"


class WeightsAndBiases:
    def __init__(self, run: TrackedRun) -> None:
        import wandb  # optional

        settings = run.settings
        self.tracker_id = run.tracker_id or secrets.token_hex(4)
        self._num_sent = run.num_sent
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            id=self.tracker_id,
            resume=None if settings.offline else "allow",
            name=run.name,
            config=dict(run.config),
            dir=str(run.folder.parent),
            mode="offline" if settings.offline else None,  # else WANDB_MODE, else online
            settings=wandb.Settings(console="off"),
        )
        # Evaluations end later than steps that follow them; W&B's own step may only rise.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # W&B drops a row whose own step it has already: a row that is sent twice is not a second point.
        self._run.log({**values, STEP: step}, step=self._num_sent)
        self._num_sent += 1

    def close(self, *, is_complete: bool) -> None:
        """Wait until W&B has everything. A run that may be resumed is shown as failed until then."""
        self._run.finish(exit_code=0 if is_complete else 1)


def requires(settings: TrackingConfig) -> tuple[str, tuple[str, ...]]:
    """What pip installs, and the modules that must be there."""
    return "wandb", ("wandb",)


def make_tracker(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(run)
