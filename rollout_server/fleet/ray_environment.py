"""Environment of a Ray node of our own. Ray's core reads it once, when it is imported: apply it before that."""

from __future__ import annotations

import os
import secrets

NODE_ENVIRONMENT = {
    # Idle workers that Ray would start ahead: ours have an environment of their own and could not use them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    # Events of tasks are for Ray's dashboard, which does not run; collecting them costs CPU in every worker.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would run workers at niceness 15: beside a busy learner the engine would get what is left of the cores.
    "RAY_worker_niceness": "0",
    # By default Ray 2.60 shows all GPUs of the node to a worker that asks for none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


def apply() -> None:
    """Settings of the node, and a token of this run alone, because Ray's ports are open on all interfaces.

    With RAY_ADDRESS in the environment the cluster has its own settings.
    """
    # Ray would take SIGTERM from us, print a stack and abort.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    if "RAY_ADDRESS" in os.environ:
        return
    os.environ.update(NODE_ENVIRONMENT)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
