"""The page of a run that trains: served by its own buffer service, beside real workers, learner and scheduler."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.full.test_metrics_live import START_S, pid_of, run_under_way
from tests.support.browser import Visit, visiting
from tests.support.dashboard import all_values, queue_rows, summary
from tests.support.wait import wait_until

pytestmark = pytest.mark.long


def shown_step(visit: Visit) -> int:
    """The newest step of the page."""
    return int(summary(visit, "composition").split(":")[0].removeprefix("Step "))


def status_of(run: RunDirectory, token: str) -> dict[str, Any]:
    """`GET /status`."""
    port = (run.path / "ports/buffer_service").read_text().strip()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/status", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return dict(json.load(reply))


def queues_of(status: dict[str, Any]) -> dict[str, str]:
    """What the card says of it, but for the workers, whose silence grows."""
    purposes = {*status["queued"], *status["leased"]}
    requests = {
        f"requests: {name}": f"{status['queued'].get(name, 0)} waiting, {status['leased'].get(name, 0)} at workers"
        for name in purposes
    }
    failures = f" ({status['last_failure']})" if status["last_failure"] else ""
    return {
        **requests,
        "fresh groups ready": f"{status['fresh_ready']}",
        "re-evaluated groups ready": f"{status['reevaluated_ready']}",
        "failures in a row": f"{status['failures_in_a_row']}{failures}",
    }


def test_the_page_follows_a_run_that_trains_and_has_its_numbers(browser: Any, tmp_path: Path) -> None:
    slow = ["--rollout.engine_options.latency_s", "0.5"]
    with run_under_way(tmp_path, *slow) as (run, process):
        token = (run.path / "tokens/viewer/token").read_text().strip()
        url = str(run.read_run()["addresses"]["dashboard_url"])
        with visiting(browser, url) as visit:
            visit.page.fill("#token", token)
            visit.page.keyboard.press("Enter")
            visit.page.wait_for_selector("#composition .summary:has-text('Step ')")
            for _ in range(2):
                before = shown_step(visit)
                wait_until(lambda seen=before: shown_step(visit) > seen, what="the next step", timeout_s=START_S)  # type: ignore[misc]
            drawn, rows = all_values(visit, "composition"), run.read_metrics()
            num_steps = len(drawn["B"])
            assert num_steps >= 7, "five steps before it was opened, and two updates"
            for words, name in (("X1 fresh", "x1"), ("X2 improved", "x2"), ("X3 reused", "x3"), ("B", "batch_size")):
                assert drawn[words] == [row[name] for row in rows[:num_steps]], words

            servers = pid_of(run, "rollout_server")
            servers.suspend()  # the queues come to rest, and not empty

            def shows_the_queues() -> bool:
                assert process.poll() is None, process.communicate()[0]
                before = queues_of(status_of(run, token))
                shown = {what: number for what, number in queue_rows(visit).items() if what in before}
                return shown == before == queues_of(status_of(run, token))

            wait_until(shows_the_queues, what="the queues of the buffer", timeout_s=START_S)
            status = status_of(run, token)
            assert sum(status["queued"].values()) + sum(status["leased"].values()) > 0
            assert any(what.startswith("worker ") for what in queue_rows(visit))
            servers.resume()
            before = shown_step(visit)
            wait_until(lambda: shown_step(visit) > before, what="it goes on", timeout_s=START_S)
            assert visit.complaints == []
            assert visit.hosts() == {url.split("/")[2]}
