"""Profile `monitoring` of the compose file: what its Prometheus scrapes and judges, and what its Grafana can show."""

from __future__ import annotations

import json
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bapo.runtime.metrics.metric import Process
from deploy.monitoring.__main__ import DASHBOARDS
from deploy.monitoring.grafana import DATASOURCE, dashboard_json, every_panel
from deploy.monitoring.prometheus import rules
from tests.full.compose.stack import CheckError, Stack, get, wait_for

WAIT_S = 300.0
VARIABLES = {"$__rate_interval": "1m", "$__interval": "5s", "$__range": "10m", "$run": ".*", "$worker": ".*"}


def look_at_prometheus(stack: Stack, expected: dict[str, int]) -> str:
    """Every process is scraped, scaled ones one by one, and every rule that is shipped is loaded and can be evaluated.

    Args:
        expected: process -> number of its containers.
    Raises: CheckError.
    """
    url = f"http://127.0.0.1:{stack.port('prometheus', 9090)}/api/v1"
    wait_for(f"prometheus reaches {expected}", WAIT_S, lambda: up(ask(f"{url}/targets?state=active")) == expected)
    shipped = {rule["alert"] for group in rules()["groups"] for rule in group["rules"]}
    wait_for("prometheus has evaluated all rules", WAIT_S, lambda: healthy_rules(ask(f"{url}/rules")) >= shipped)
    return f"prometheus reaches {sum(expected.values())} targets and evaluates {len(shipped)} rules"


def up(answer: Any) -> dict[str, int]:
    """Process -> how many targets of it are up; one that is not makes the whole differ."""
    targets = answer["activeTargets"]
    found = Counter(str(target["labels"]["process"]) for target in targets if target["health"] == "up")
    return dict(found) if sum(found.values()) == len(targets) else {}


def healthy_rules(answer: Any) -> set[str]:
    """Names of the alerts that were evaluated without an error."""
    return {rule["name"] for group in answer["groups"] for rule in group["rules"] if rule["health"] == "ok"}


def look_at_grafana(stack: Stack) -> str:
    """Its dashboards were provisioned, and through its data source no query of a panel is refused.

    Raises: CheckError; OSError for a query that is refused.
    """
    url = f"http://127.0.0.1:{stack.port('grafana', 3000)}"
    version = json.loads(get(f"{url}/api/health", ""))["version"]
    shown = {(found["title"], found["folderTitle"]) for found in json.loads(get(f"{url}/api/search?type=dash-db", ""))}
    shipped = {(dashboard_json(dashboard)["title"], "BAPO") for dashboard in DASHBOARDS.values()}
    if shown != shipped:
        raise CheckError(f"grafana shows the dashboards {sorted(shown)}, not {sorted(shipped)}")
    asked = {query: panel for panel, query in queries()}
    through = f"{url}/api/datasources/proxy/uid/{DATASOURCE}/api/v1/query?"
    empty = {
        panel for query, panel in asked.items() if not ask(through + urllib.parse.urlencode({"query": query}))["result"]
    }
    return (
        f"grafana (version {version}) has {len(shown)} dashboards; none of their {len(asked)} queries is refused; "
        f"panels of which a query has no data now: {', '.join(sorted(empty)) or 'none'}"
    )


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query with its variables filled in) of all dashboards."""
    for dashboard in DASHBOARDS.values():
        for panel in every_panel(dashboard_json(dashboard)["panels"]):
            for target in panel.get("targets", []):
                query = target["expr"]
                for name, value in VARIABLES.items():
                    query = query.replace(name, value)
                yield panel["title"], query


def ask(url: str) -> Any:
    """The data of an answer of Prometheus. Raises: OSError."""
    return json.loads(get(url, ""))["data"]


EXPECTED = {process.value: 2 if process is Process.ROLLOUT_SERVER else 1 for process in Process}
"""Once `rollout` was scaled to two."""
