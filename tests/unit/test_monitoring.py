"""Dashboards, alerts and docs are those of the registry, and name nothing that is not there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo.metrics.metric import Process
from bapo.metrics.registry import METRICS
from bapo.records import RunDirectory
from bapo.telemetry import Telemetry, show_disk
from deploy.monitoring.__main__ import DASHBOARDS, REPOSITORY, files, main
from deploy.monitoring.alert import Clock
from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.grafana import DATASOURCE, dashboard_json, only, series_of
from deploy.monitoring.prometheus import COMPOSE_NAMES, scrape_runs
from services.launcher.targets import TargetFile

KNOWN = {series: metric for metric in METRICS for series in series_of(metric.name, metric.kind)}
SELECTOR = re.compile(r"\b(bapo_[a-z0-9_]+)\b(\{[^}]*\})?")


def selectors(query: str) -> Iterator[tuple[str, list[str]]]:
    """(series, labels that it is narrowed by)."""
    for match in SELECTOR.finditer(query):
        yield match.group(1), re.findall(r"(\w+)\s*(?:=~|!=|=|!~)", match.group(2) or "")


def rows_of(dashboard: dict[str, Any]) -> dict[str, str]:
    """Row -> all queries below it."""
    found: dict[str, str] = {}
    title = ""
    for panel in dashboard["panels"]:
        title = panel["title"] if panel["type"] == "row" else title
        found[title] = found.get(title, "") + " ".join(target["expr"] for target in panel.get("targets", []))
    return found


@pytest.mark.parametrize("path", sorted(files()))
def test_what_is_committed_is_what_the_registry_gives(path: str) -> None:
    text = (REPOSITORY / path).read_text()
    assert text == files()[path], f"{path} is out of date: run python -m deploy.monitoring"


def test_every_metric_is_shown_in_the_row_that_it_names() -> None:
    pages = {"run": "run", "system": "system", "ledger": "compute-ledger"}
    rows = {short: rows_of(dashboard_json(DASHBOARDS[name])) for short, name in pages.items()}
    missing = []
    for metric in METRICS:
        page, _, row = metric.panel.partition("/")
        shown = {series for series, _ in selectors(rows[page].get(row, ""))}
        if not shown & set(series_of(metric.name, metric.kind)):
            missing.append(f"{metric.name} in {metric.panel}")
    assert missing == []


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_dashboards_query_registered_series_by_their_own_labels(name: str) -> None:
    for panel in dashboard_json(DASHBOARDS[name])["panels"]:
        for target in panel.get("targets", []):
            for series, labels in selectors(target["expr"]):
                assert series in KNOWN, (panel["title"], series)
                assert set(labels) <= {"run", "process", "le", *KNOWN[series].label_names}, (panel["title"], series)
                assert "run" in labels, (panel["title"], series)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_query_registered_series_by_their_own_labels(alert: Any) -> None:
    for series, labels in selectors(alert.expr(Clock())):
        assert series in KNOWN
        assert set(labels) <= {"run", "process", "le", *KNOWN[series].label_names}


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_panels_do_not_overlap_and_have_names_of_their_own(name: str) -> None:
    panels = dashboard_json(DASHBOARDS[name])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_a_query_is_narrowed_to_the_chosen_run_and_worker() -> None:
    assert only('rate(bapo_x_total{a="b"}[5m]) + bapo_y') == (
        'rate(bapo_x_total{run=~"$run",a="b"}[5m]) + bapo_y{run=~"$run"}'
    )
    assert only("bapo_rollout_policy_version", worker=True) == (
        'bapo_rollout_policy_version{run=~"$run",worker=~"$worker"}'
    )
    assert only("bapo_rollout_workers", worker=True) == 'bapo_rollout_workers{run=~"$run"}'


def test_provisioning_agrees_with_the_dashboards_and_with_compose() -> None:
    folder = REPOSITORY / "deploy/grafana"
    (source,) = yaml.safe_load((folder / "provisioning/datasources/bapo.yml").read_text())["datasources"]
    assert source["uid"] == DATASOURCE
    for path in (folder / "dashboards").glob("*.json"):
        (variable, *_) = json.loads(path.read_text())["templating"]["list"]
        assert variable["current"]["value"] == DATASOURCE
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    assert set(COMPOSE_NAMES.values()) <= set(services)
    assert set(COMPOSE_NAMES) == set(Process)


def test_alerts_are_sent_to_the_alertmanagers_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--alertmanager", "127.0.0.1:9093", "--alertmanager", "[::1]:9093"]
    assert main(["--scrape", "outputs/mine", *here]) == 0
    told = yaml.safe_load(capsys.readouterr().out)["alerting"]
    assert told == {"alertmanagers": [{"static_configs": [{"targets": ["127.0.0.1:9093", "[::1]:9093"]}]}]}
    assert main(["--scrape", "outputs/mine"]) == 0
    assert "alerting" not in yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--scrape", "outputs/mine", "--alertmanager", "http://127.0.0.1:9093"], "is not HOST:PORT"),
        (["--scrape", "outputs/mine", "--alertmanager", "127.0.0.1"], "is not HOST:PORT"),
        (["--alertmanager", "127.0.0.1:9093"], "belong to --scrape RUN"),
    ],
)
def test_an_alertmanager_that_cannot_be_one_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert reason in capsys.readouterr().err


def test_a_faster_clock_shortens_every_duration_of_a_rule() -> None:
    (stuck,) = [alert for alert in ALERTS if alert.name == "LearnerStuck"]
    rule = stuck.rule(Clock(speed=20))
    assert rule["for"] == "2s"
    assert re.findall(r"\[(\w+)\]", rule["expr"]) == ["15s", "180s", "15s", "15s"]
    assert ", 3))" in rule["expr"], "a minute"


def test_the_disk_of_a_run_is_shown_and_unknown_when_it_is_away(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    telemetry = Telemetry(Process.BUFFER_SERVICE, run="r")
    show_disk(telemetry, tmp_path / "run")
    _, _, found = telemetry.exposition().decode().partition('bapo_run_disk_size_bytes{run="r"} ')
    assert float(found.split()[0]) == shutil.disk_usage(tmp_path).total
    (tmp_path / "run").rmdir()
    assert 'bapo_run_disk_free_bytes{run="r"} NaN\n' in telemetry.exposition().decode()


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


def test_the_configuration_for_runs_names_their_files_and_their_tokens(tmp_path: Path) -> None:
    made = scrape_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "rules.yml")
    files = [job["file_sd_configs"][0]["files"] for job in made["scrape_configs"]]
    assert files == [[str(tmp_path / name / "prometheus.json")] for name in "ab"]
    tokens = [job["authorization"]["credentials_file"] for job in made["scrape_configs"]]
    assert tokens == [str(tmp_path / name / "tokens/viewer/token") for name in "ab"]
    assert made["rule_files"] == [str(tmp_path / "rules.yml")]


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on PATH (Debian: apt-get install prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ],
)
def test_promtool_takes_the_files_and_each_alert_fires_in_its_case_and_not_in_the_near_one(
    arguments: list[str],
) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=REPOSITORY / "deploy/prometheus", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_it_and_one_that_does_not() -> None:
    tests = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules_test.yml").read_text())["tests"]
    found = [(rule["alertname"], bool(rule["exp_alerts"])) for test in tests for rule in test["alert_rule_test"]]
    assert sorted(found) == sorted((alert.full_name, fires) for alert in ALERTS for fires in (False, True))
