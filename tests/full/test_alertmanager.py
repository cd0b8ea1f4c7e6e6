"""An alert reaches people: a real Prometheus with our rules and an Alertmanager send it to a webhook."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from deploy.monitoring.alert import Clock
from deploy.monitoring.prometheus import ALERTMANAGERS_FILE, rules, scrape_compose, scrape_runs
from tests.support.prometheus_server import HAVE_PROMETHEUS, MISSING, running
from tests.support.wait import wait_until

ALERTMANAGER = next(filter(None, map(shutil.which, ("prometheus-alertmanager", "alertmanager"))), None)
TIMEOUT_S = 120.0

pytestmark = [
    pytest.mark.skipif(not HAVE_PROMETHEUS, reason=MISSING),
    pytest.mark.skipif(
        ALERTMANAGER is None, reason="no Alertmanager (Debian: apt-get install prometheus-alertmanager)"
    ),
]


class Webhook:
    """What was posted."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.url = ""

    def firing(self) -> dict[str, dict[str, str]]:
        """Name of an alert -> its annotations."""
        alerts = [alert for post in list(self.posts) for alert in post["alerts"] if alert["status"] == "firing"]
        return {alert["labels"]["alertname"]: alert["annotations"] for alert in alerts}


@contextmanager
def webhook() -> Iterator[Webhook]:
    found = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def alertmanager(folder: Path, url: str) -> Iterator[str]:
    """HOST:PORT of one that sends everything to a URL at once."""
    file, address = folder / "alertmanager.yml", f"127.0.0.1:{free_port()}"
    route = {"receiver": "hook", "group_wait": "0s", "group_interval": "1s"}
    receivers = [{"name": "hook", "webhook_configs": [{"url": url}]}]
    file.write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
    process = subprocess.Popen(
        [
            str(ALERTMANAGER), f"--config.file={file}", f"--storage.path={folder / 'alerts'}",
            f"--web.listen-address={address}", "--cluster.listen-address=", "--log.level=warn",
        ],
    )  # fmt: skip
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose learner does not answer: nobody listens there."""
    run = RunDirectory.create(tmp_path / "mine")
    target = {"targets": [f"127.0.0.1:{free_port()}"], "labels": {"run": "mine", "process": "learner"}}
    (run.path / "prometheus.json").write_text(json.dumps([target]))
    token = run.path / "tokens" / "viewer" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("a-token")
    return run


@pytest.mark.parametrize("way", ["--alertmanager", ALERTMANAGERS_FILE])
def test_an_alert_reaches_the_webhook_with_what_to_do(way: str, run: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    (folder / "rules.yml").write_text(yaml.safe_dump(rules(Clock(speed=60.0))))
    with webhook() as hook, alertmanager(tmp_path, hook.url) as address:
        named = [address] if way == "--alertmanager" else []
        config = scrape_runs([run.path], folder / "rules.yml", scrape_s=1, alertmanagers=named)
        if not named:
            config["alerting"] = scrape_compose()["alerting"]
        with running(folder, config):
            if not named:  # as a user does in compose, while Prometheus runs
                (folder / ALERTMANAGERS_FILE).write_text(yaml.safe_dump([{"targets": [address]}]))
            wait_until(lambda: "BapoProcessDown" in hook.firing(), what="the webhook is called", timeout_s=TIMEOUT_S)
    assert hook.firing()["BapoProcessDown"]["runbook_url"] == "docs/monitoring.md#bapoprocessdown"
    (post, *_) = hook.posts
    assert post["alerts"][0]["labels"]["process"] == "learner"
    assert post["alerts"][0]["labels"]["severity"] == "critical"
