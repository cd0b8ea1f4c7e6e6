"""Dashboards, alerts and docs are those of the registry, and name nothing that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.registry import METRICS
from bapo.runtime.run_directory.layout import RunDirectory
from deploy.monitoring.__main__ import DASHBOARDS, REPOSITORY, files
from deploy.monitoring.alert import Clock
from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.grafana import dashboard_json, every_panel, series_of
from deploy.monitoring.health import runbook_url
from deploy.monitoring.prometheus import ALERTMANAGERS_FILE, RULES_FILE, rules, scrape_compose, scrape_runs
from services.launcher.targets import TargetFile

KNOWN = {series: metric for metric in METRICS for series in series_of(metric.name, metric.kind)}
SELECTOR = re.compile(r"\b(bapo_[a-z0-9_]+)\b(\{[^}]*\})?")


def selectors(query: str) -> Iterator[tuple[str, list[str]]]:
    """(series, labels that it is narrowed by)."""
    for match in SELECTOR.finditer(query):
        yield match.group(1), re.findall(r"(\w+)\s*(?:=~|!=|=|!~)", match.group(2) or "")


@pytest.mark.parametrize("path", sorted(files()))
def test_what_is_committed_is_what_the_registry_gives(path: str) -> None:
    text = (REPOSITORY / path).read_text()
    assert text == files()[path], f"{path} is out of date: run python -m deploy.monitoring"


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_dashboards_query_registered_series_by_their_own_labels(name: str) -> None:
    for panel in every_panel(dashboard_json(DASHBOARDS[name])["panels"]):
        for target in panel.get("targets", []):
            for series, labels in selectors(target["expr"]):
                assert series in KNOWN, (panel["title"], series)
                assert set(labels) <= {"run", "process", "le", *KNOWN[series].label_names}, (panel["title"], series)
                assert "run" in labels, (panel["title"], series)


def test_the_row_that_a_metric_names_exists() -> None:
    files = {"ledger": "compute-ledger"}
    for metric in METRICS:
        name, _, title = metric.panel.partition("/")
        assert title in {row.title for row in DASHBOARDS[files.get(name, name)].rows}, metric.name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_panel_shows_what_each_alert_is_about_and_links_to_its_runbook(alert: Any) -> None:
    panels = [panel for shown in DASHBOARDS.values() for panel in every_panel(dashboard_json(shown)["panels"])]
    assert any(link["url"] == runbook_url(alert) for panel in panels for link in panel.get("links", []))
    number = int(runbook_url(alert).rpartition("=")[2])
    (entry,) = (
        panel for panel in every_panel(dashboard_json(DASHBOARDS["runbook"])["panels"]) if panel["id"] == number
    )
    assert entry["title"] == alert.full_name
    assert alert.runbook in entry["options"]["content"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_query_registered_series_by_their_own_labels(alert: Any) -> None:
    for series, labels in selectors(alert.expr(Clock())):
        assert series in KNOWN
        assert set(labels) <= {"run", "process", "le", *KNOWN[series].label_names}


def test_a_run_says_where_its_processes_listen_until_they_end(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine")
    run.write_port("learner", 8702)
    run.write_port("buffer_service", 8700)
    file = TargetFile(run, "mine", dict.fromkeys(map(str, Process), "127.0.0.1"))
    file.write(iter(["redis", "buffer_service", "learner", "scheduler"]))  # the scheduler has not announced its port
    assert json.loads((run.path / "prometheus.json").read_text()) == [
        {"targets": ["127.0.0.1:8700"], "labels": {"run": "mine", "process": "buffer_service"}},
        {"targets": ["127.0.0.1:8702"], "labels": {"run": "mine", "process": "learner"}},
    ]
    file.write([])
    assert json.loads((run.path / "prometheus.json").read_text()) == []


def test_alerts_go_to_the_alertmanagers_that_are_named_with_what_to_do(tmp_path: Path) -> None:
    named = scrape_runs([tmp_path], tmp_path / RULES_FILE, alertmanagers=["127.0.0.1:9093"])
    assert named["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["127.0.0.1:9093"]}]}]
    assert "alerting" not in scrape_runs([tmp_path], tmp_path / RULES_FILE)
    in_compose = scrape_compose()["alerting"]["alertmanagers"]
    assert in_compose == [{"file_sd_configs": [{"files": [ALERTMANAGERS_FILE]}]}], "read while Prometheus runs"
    told = {rule["alert"]: rule for rule in rules()["groups"][0]["rules"]}["BapoProcessDown"]
    assert told["annotations"]["runbook_url"] == "docs/monitoring.md#when-an-alert-fires"
    assert told["labels"]["severity"] == "critical"


def test_every_alert_has_a_case_that_fires_it_and_one_that_does_not() -> None:
    tests = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules_test.yml").read_text())["tests"]
    found = [(rule["alertname"], bool(rule["exp_alerts"])) for test in tests for rule in test["alert_rule_test"]]
    assert sorted(found) == sorted((alert.full_name, fires) for alert in ALERTS for fires in (False, True))
