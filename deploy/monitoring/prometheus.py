"""What Prometheus reads: where to scrape, the rules, and their unit tests for promtool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo.config.tree import Config
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.token_store import FOLDER, TokenSet
from bapo.runtime.metrics.metric import Process
from deploy.monitoring.alert import Alert, Clock
from deploy.monitoring.alerts import ALERTS
from services.launcher.targets import FILE

SCRAPE_S = 5
RULES_FILE = "rules.yml"
ALERTMANAGERS_FILE = "alertmanagers.yml"
"""Next to the configuration for compose; yours, and read as soon as it is there."""
VIEWER_TOKEN = "/bapo/secrets/viewer/token"  # noqa: S105 - the path of a file in the container
COMPOSE_NAMES = {
    Process.BUFFER_SERVICE: "buffer",
    Process.ROLLOUT_SERVER: "rollout",
    Process.LEARNER: "learner",
    Process.SCHEDULER: "scheduler",
    Process.EVALUATOR: "evaluator",
    Process.DASHBOARD: "dashboard",
}
"""Process -> service of docker-compose.yml."""


def ports() -> dict[Process, int]:
    """Where each process listens, if its configuration does not say otherwise."""
    config = Config()
    return {
        Process.BUFFER_SERVICE: config.buffer.port,
        Process.ROLLOUT_SERVER: config.rollout.port,
        Process.LEARNER: config.learner.port,
        Process.SCHEDULER: config.scheduler.port,
        Process.EVALUATOR: config.evaluation.port,
        Process.DASHBOARD: config.dashboard.port,
    }


def scrape_compose() -> dict[str, Any]:
    """For docker-compose.yml: every container of a service is found by its name, also when it is scaled."""
    jobs = [
        {
            "job_name": process.value,
            "honor_labels": True,
            "authorization": {"credentials_file": VIEWER_TOKEN},
            "dns_sd_configs": [
                {"names": [COMPOSE_NAMES[process]], "type": "A", "port": port, "refresh_interval": f"{SCRAPE_S}s"}
            ],
            "relabel_configs": [{"target_label": "process", "replacement": process.value}],
        }
        for process, port in ports().items()
    ]
    return _global() | _alerting({"file_sd_configs": [{"files": [ALERTMANAGERS_FILE]}]}) | {"scrape_configs": jobs}


def scrape_runs(
    runs: Sequence[Path],
    rules_file: Path,
    *,
    scrape_s: int = SCRAPE_S,
    credentials: Path | None = None,
    alertmanagers: Sequence[str] = (),
) -> dict[str, Any]:
    """For runs on this machine: each launcher writes where its processes listen, and the tokens of its run.

    Args:
        runs: run directories; they need not exist yet.
        credentials: file with a viewer's token, where that is not the one in the run directory (BAPO_TOKEN_SET).
        alertmanagers: host:port of those that alerts are sent to; none: they are seen in Prometheus alone.
    """
    jobs = [
        {
            "job_name": f"bapo {run.resolve()}",
            "honor_labels": True,
            "authorization": {"credentials_file": str((credentials or token_of(run)).resolve())},
            "file_sd_configs": [{"files": [str(run.resolve() / FILE)], "refresh_interval": f"{scrape_s}s"}],
        }
        for run in runs
    ]
    told = _alerting({"static_configs": [{"targets": list(alertmanagers)}]}) if alertmanagers else {}
    return _global(scrape_s, str(rules_file.resolve())) | told | {"scrape_configs": jobs}


def token_of(run: Path) -> Path:
    """The viewer's token that the launcher makes for a run."""
    return TokenSet(run / FOLDER).path_of(Role.VIEWER)


def _global(scrape_s: int = SCRAPE_S, rules_file: str = RULES_FILE) -> dict[str, Any]:
    every = f"{scrape_s}s"
    return {
        "global": {"scrape_interval": every, "evaluation_interval": every, "scrape_timeout": every},
        "rule_files": [rules_file],
    }


def _alerting(source: dict[str, Any]) -> dict[str, Any]:
    return {"alerting": {"alertmanagers": [source]}}


def rules(clock: Clock | None = None, alerts: Sequence[Alert] = ALERTS) -> dict[str, Any]:
    """The rules file. `clock`: for tests that cannot wait for minutes."""
    return {"groups": [{"name": "bapo", "rules": [alert.rule(clock or Clock()) for alert in alerts]}]}


def rules_test() -> dict[str, Any]:
    """The unit tests of the rules: each alert once where it fires and once where it is near."""
    tests = [
        test for alert in ALERTS for test in (alert.test(alert.fires, fires=True), alert.test(alert.quiet, fires=False))
    ]
    return {"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": tests}
