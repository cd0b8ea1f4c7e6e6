"""MLflow: the server or database that MLFLOW_TRACKING_URI names, else ./mlflow.db; offline, RUN/mlflow/mlflow.db."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bapo.config.layers import dotted, flatten
from bapo.config.tracking import TrackingConfig
from services.trackers.base import TrackedRun, missing_package

URI = "MLFLOW_TRACKING_URI"
LOCAL = "sqlite:///mlflow.db"
LONGEST_PARAM = 500
"""Letters that every version of MLflow accepts as the value of a parameter."""
NO_NAME = re.compile(r"[^/\w.\- ]")
"""What no name of a metric may have, such as the @ of a split at another temperature; a fact may."""


class Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param  # optional
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=_uri(run.settings, f"sqlite:///{run.folder.resolve()}/mlflow.db"))
        if run.tracker_id is not None:
            self.tracker_id = run.tracker_id
            self._client.update_run(self.tracker_id, status="RUNNING")
            return
        tags = dict.fromkeys(run.settings.tags, "true") | ({"group": run.settings.group} if run.settings.group else {})
        found = self._client.get_experiment_by_name(run.settings.project)
        place = f"file://{run.folder.resolve()}/artifacts" if run.settings.offline else None
        experiment = found.experiment_id if found else self._client.create_experiment(run.settings.project, place)
        self.tracker_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(dotted(key), str(value)[:LONGEST_PARAM]) for key, value in flatten(run.config)]
        for start in range(0, len(params), 100):  # of one request
            self._client.log_batch(self.tracker_id, params=params[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        at_ms = int(1000 * values.get("time", time.time()))
        metrics = [self._metric(NO_NAME.sub("_", name), value, at_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self.tracker_id, metrics=metrics[start : start + 1000])

    def log_responses(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        file = f"responses/step-{step:06}.json"
        # MLflow appends to a table of this name, which a process that ended before it could note it has sent already.
        if all(known.path != file for known in self._client.list_artifacts(self.tracker_id, "responses")):
            table = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
            self._client.log_table(self.tracker_id, data=table, artifact_file=file)

    def close(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self.tracker_id, status="FINISHED" if is_complete else "KILLED")


def _uri(settings: TrackingConfig, offline: str) -> str:
    return offline if settings.offline else os.environ.get(URI) or LOCAL


def problem(settings: TrackingConfig) -> str | None:
    """Why it cannot be used here; None: it can. mlflow-skinny can send to a server alone."""
    is_database = _uri(settings, LOCAL).startswith("sqlite:")
    return missing_package("mlflow", "mlflow", *(["sqlalchemy"] if is_database else []))


def make_tracker(run: TrackedRun) -> Mlflow:
    return Mlflow(run)
