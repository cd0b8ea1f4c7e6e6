"""Trackio: a local database in TRACKIO_DIR, or what TRACKIO_SPACE_ID (a Space) or TRACKIO_SERVER_URL names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from bapo.config.layers import dotted, flatten
from bapo.config.tracking import TrackingConfig
from services.trackers.base import TrackedRun, missing_package

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        if run.settings.offline:
            for name in REMOTE:
                os.environ.pop(name, None)
        import trackio  # optional

        # Trackio resumes by name, and another folder may have a run of the same name.
        self.tracker_id = run.tracker_id or f"{run.name}-{secrets.token_hex(2)}"
        self._run = trackio.init(
            project=run.settings.project,
            name=self.tracker_id,
            group=run.settings.group,
            config={dotted(key): value for key, value in flatten(run.config)},
            resume="allow" if run.tracker_id else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in values.items() if name not in RESERVED}, step=step)

    def log_responses(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import trackio  # optional

        self._run.log({"responses": trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self, *, is_complete: bool) -> None:
        """Wait until the database has everything."""
        self._run.finish()


def problem(settings: TrackingConfig) -> str | None:
    """Why it cannot be used here; None: it can."""
    return missing_package("trackio", "trackio")


def make_tracker(run: TrackedRun) -> Trackio:
    return Trackio(run)
