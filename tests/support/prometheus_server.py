"""A real Prometheus on a free port, where the machine has one (Debian: apt-get install prometheus)."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from bapo.runtime.rank_environment import free_port
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
