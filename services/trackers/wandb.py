"""Weights & Biases, by its own client, which finds your key: `wandb login`, or WANDB_API_KEY.

Offline, its files are in RUN/wandb, and `wandb sync` uploads them: the parts of a resumed run have one id.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo.config.tracking import TrackingConfig
from bapo.core.errors import ConfigError
from services.trackers.base import TrackedRun, missing_package

STEP = "step"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WeightsAndBiases:
    def __init__(self, run: TrackedRun) -> None:
        self.tracker_id = run.tracker_id or secrets.token_hex(4)
        self._num_sent = run.num_sent
        self._run = self._start(run)
        # Evaluations end later than steps that follow them; W&B's own step may only rise.
        self._run.define_metric("*", step_metric=STEP)

    def _start(self, run: TrackedRun) -> Any:
        """Raises: ConfigError for settings or a key that W&B refuses: the next start would fail like this one."""
        import wandb  # optional

        settings = run.settings
        try:
            return wandb.init(
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
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(f"W&B: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._send(step, values)

    def log_responses(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb  # optional

        self._send(step, {"responses": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        # W&B drops a row whose own step it has already: a row that is sent twice is not a second point.
        self._run.log({**values, STEP: step}, step=self._num_sent)
        self._num_sent += 1

    def close(self, *, is_complete: bool) -> None:
        """Wait until W&B has everything. A run that may be resumed is shown as failed until then."""
        self._run.finish(exit_code=0 if is_complete else 1)


def problem(settings: TrackingConfig) -> str | None:
    """Why it cannot be used here; None: it can."""
    if missing := missing_package("wandb", "wandb"):
        return missing
    if settings.offline or os.environ.get("WANDB_MODE", "online") != "online" or _may_have_key():
        return None
    return (
        "has no API key on this machine: run `wandb login`, set WANDB_API_KEY, or log locally with "
        "--tracking.offline true"
    )


def _may_have_key() -> bool:
    """Whether there is anything where W&B looks for a key; whether it is one, only W&B knows."""
    files = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc")
    return any(os.environ.get(name) for name in KEYS) or any(Path(file).expanduser().is_file() for file in files)


def make_tracker(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(run)
