"""Environment variables of a local Ray node. Ray reads them when it is imported: apply them before that."""

from __future__ import annotations

import os
import secrets

NODE_ENVIRONMENT = {
    # No prestarted workers: BAPO's have their own environment and cannot use them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    # Task events are for Ray's dashboard, which is off; they cost CPU in every worker.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray runs workers at niceness 15: a busy learner would starve the engine.
    "RAY_worker_niceness": "0",
    # By default Ray 2.60 exposes all GPUs of the node to a worker that requests none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


def apply() -> None:
    """Set the variables, and a token of this run, because Ray's ports are open on all interfaces.

    With RAY_ADDRESS set the cluster keeps its own settings.
    """
    # Ray's handler of SIGTERM would print a stack and abort.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    if "RAY_ADDRESS" in os.environ:
        return
    os.environ.update(NODE_ENVIRONMENT)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
