"""Weights & Biases, by its own client: log in as it says (`wandb login`, WANDB_API_KEY), or WANDB_MODE=offline.

Every call of `bapo track` is a run of W&B of its own, with all steps from the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from bapo.analysis.trackers.base import TrackedRun

PACKAGE = "wandb"
STEP = "step"


class WeightsAndBiases:
    def __init__(self, run: TrackedRun) -> None:
        import wandb  # optional

        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=run.project, name=run.name, config=dict(run.config), dir=str(run.folder))
        # Evaluations end later than steps that follow them; W&B's own step may only rise.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        """Waits until W&B has everything."""
        self._run.finish()


def make_tracker(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(run)
