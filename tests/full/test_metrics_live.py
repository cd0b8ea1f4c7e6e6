"""A whole run with the scripted engine: what its processes expose, and what a real Prometheus makes of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml

from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.registry import metrics_of
from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from deploy.monitoring.__main__ import DASHBOARDS
from deploy.monitoring.alert import Clock
from deploy.monitoring.grafana import dashboard_json, every_panel
from deploy.monitoring.prometheus import rules, scrape_runs
from tests.support.launch import family, kill_family, start, train_arguments
from tests.support.wait import wait_until

MISSING = "no prometheus and promtool on PATH (Debian: apt-get install prometheus)"
HAVE_PROMETHEUS = bool(shutil.which("prometheus") and shutil.which("promtool"))


class Prometheus:
    """Asks a server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: Any) -> Any:
        """The data of one answer. Raises: HTTPError, with Prometheus' own words, for a query that is wrong."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """What the query gives now."""
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=query)["result"]
        return found

    def points(self, query: str, *, seconds: float) -> list[float]:
        """All values over the last seconds, but NaN."""
        now = time.time()
        found = self.get("/api/v1/query_range", query=query, start=now - seconds, end=now, step=5)["result"]
        return [float(value) for series in found for _, value in series["values"] if value != "NaN"]

    def targets(self) -> dict[str, str]:
        """Process -> up, down or unknown."""
        found = self.get("/api/v1/targets", state="active")["activeTargets"]
        return {target["labels"]["process"]: target["health"] for target in found}

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def running(folder: Path, configuration: Mapping[str, Any]) -> Iterator[Prometheus]:
    """A server with this configuration, ended behind the block."""
    folder.mkdir(parents=True, exist_ok=True)
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(yaml.safe_dump(configuration))
    process = subprocess.Popen(
        [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ],
        cwd=folder,
    )  # fmt: skip
    server = Prometheus(port)
    try:
        wait_until(server.is_ready, what="Prometheus answers")
        yield server
    finally:
        process.terminate()
        process.wait()


START_S = 240.0


needs_prometheus = [pytest.mark.long, pytest.mark.skipif(not HAVE_PROMETHEUS, reason=MISSING)]


SPEED = 20.0
"""Rules look back and wait so many times shorter than those that are shipped."""


EMPTY_IN_A_HEALTHY_RUN = {
    ("Errors", "refused: {{reason}}"): "no request was refused",
    ("Key-value cache", "{{worker}}"): "the scripted engine has none",
    ("Left out per minute", "{{reason}}"): "every fresh group trained",
}
"""(panel, legend) of queries that may have no series."""


@contextmanager
def run_under_way(folder: Path, *overrides: str) -> Iterator[tuple[RunDirectory, subprocess.Popen[str]]]:
    """A run that has evaluated its first weights and trains."""
    page = ("--dashboard.enabled", "true", "--dashboard.port", "0")
    process = start(
        train_arguments(folder, "--supervision.restart_backoff_s", "8", *page, *overrides, num_steps=100_000)
    )
    run = RunDirectory(folder / "outputs" / "run")

    def has_begun() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return len(run.read_metrics()) >= 5 and len(run.read_evaluations()) >= 2

    try:
        wait_until(has_begun, what="five steps and an evaluation", timeout_s=START_S)
        yield run, process
    finally:
        kill_family(process)


def targets_of(run: RunDirectory) -> dict[str, str]:
    """Process -> address, as Prometheus discovers it."""
    found = json.loads((run.path / "prometheus.json").read_text())
    assert {target["labels"]["run"] for target in found} <= {"run"}
    return {target["labels"]["process"]: target["targets"][0] for target in found}


def names_in(exposition: str) -> set[str]:
    """Families of the product that a text shows."""
    return set(re.findall(r"^# TYPE (bapo_\S+) ", exposition, re.MULTILINE))


def test_each_process_exposes_what_the_registry_says_and_nothing_else(tmp_path: Path) -> None:
    with run_under_way(tmp_path) as (run, process):
        targets, token = targets_of(run), (run.path / "tokens/viewer/token").read_text().strip()
        assert set(targets) == {str(process) for process in Process}
        for name, address in targets.items():
            request = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read().decode()
            assert names_in(text) == {metric.name for metric in metrics_of(Process(name))}, name
            assert "process_resident_memory_bytes" in text
            series = [line for line in text.splitlines() if not line.startswith("#")]
            assert [line for line in series if 'run="run"' not in line] == []
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert targets_of(run) == {}, "a run that has ended is not one that is down"


def in_prometheus(folder: Path, run: RunDirectory) -> dict[str, object]:
    """Rules with short waits, and a scrape every second."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rules.yml"
    file.write_text(yaml.safe_dump(rules(Clock(SPEED))))
    return scrape_runs([run.path], file, scrape_s=1)


def queries_of(name: str) -> Iterator[tuple[str, str, str]]:
    """(panel, query with its variables filled in, legend)."""
    for panel in every_panel(dashboard_json(DASHBOARDS[name])["panels"]):
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "30s").replace("$run", ".*").replace("$worker", ".*")
            yield panel["title"], query, target["legendFormat"]


def empty_panels(server: Prometheus, *, seconds: float) -> list[str]:
    """Panels with a query that gives no number."""
    return [
        f"{name} / {panel}: {query}"
        for name in DASHBOARDS
        for panel, query, legend in queries_of(name)
        if (panel, legend) not in EMPTY_IN_A_HEALTHY_RUN and not server.points(query, seconds=seconds)
    ]


def pid_of(run: RunDirectory, process: str) -> psutil.Process:
    """A process of the run, to be hurt."""
    return psutil.Process(run.read_run()["processes"][process]["pid"])


def redis_of(run: RunDirectory) -> redis.Redis:
    """The run's own Redis, as an operator reaches it."""
    settings = dict(
        line.split(maxsplit=1) for line in (run.redis_path / "redis.conf").read_text().splitlines() if " " in line
    )
    return redis.Redis(unix_socket_path=settings["unixsocket"].strip('"'), password=settings["requirepass"])


@pytest.mark.parametrize("mark", [pytest.param("", marks=needs_prometheus)])
def test_every_panel_shows_data_and_provoked_faults_fire_their_alerts(tmp_path: Path, mark: str) -> None:
    reward = ["--task.reward", "tests.support.bad_rewards:raises_for_some_prompts", "--task.check_gold", "false"]
    # Prompts stay as hard as they are, or else the policy soon solves all of them and nothing is left to train.
    steady = ["--rollout.engine_options.skill_gain", "0", "--rollout.engine_options.latency_s", "0.2"]
    judged = ["--autoscaling.actuator", "external", "--autoscaling.window_s", "2"]  # else its panels are empty
    with (
        run_under_way(tmp_path, *reward, *steady, *judged) as (run, process),
        running(tmp_path / "prometheus", in_prometheus(tmp_path / "prometheus", run)) as server,
    ):
        everything = dict.fromkeys(map(str, Process), "up")
        wait_until(lambda: server.targets() == everything, what="all targets are up", timeout_s=START_S)

        def fires(name: str) -> bool:
            assert process.poll() is None, process.communicate()[0]
            return name in server.firing()

        wait_until(lambda: empty_panels(server, seconds=120) == [], what="data in all panels", timeout_s=START_S)
        wait_until(lambda: fires("BapoVerifierErrors"), what="verifier errors", timeout_s=START_S)
        quiet = {"BapoRedisDown", "BapoRedisNotPersistent", "BapoProcessDown", "BapoStalenessAboveBound"}
        assert not quiet & server.firing()

        client = redis_of(run)
        client.config_set("appendonly", "no")
        wait_until(lambda: fires("BapoRedisNotPersistent"), what="persistence off", timeout_s=START_S)
        client.config_set("appendonly", "yes")
        wait_until(lambda: not fires("BapoRedisNotPersistent"), what="persistence on", timeout_s=START_S)

        learner = pid_of(run, "learner")
        learner.suspend()
        wait_until(lambda: fires("BapoLearnerStuck"), what="a learner that is stuck", timeout_s=START_S)
        wait_until(lambda: fires("BapoProcessDown"), what="a process that does not answer", timeout_s=START_S)
        learner.resume()
        wait_until(lambda: not fires("BapoLearnerStuck"), what="a learner that goes on", timeout_s=START_S)

        pid_of(run, "redis").kill()  # the launcher waits eight seconds before it starts again
        wait_until(lambda: fires("BapoRedisDown"), what="Redis down", timeout_s=START_S)
        wait_until(lambda: not fires("BapoRedisDown"), what="Redis back", timeout_s=START_S)
        assert family(process)
