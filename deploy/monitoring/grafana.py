"""Panels, rows and dashboards: the JSON that Grafana reads, from a few words each.

Queries name no run: `$run` and `$worker` are put in by `only`, so that a selector is never forgotten.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bapo.runtime.metrics.registry import METRICS

DATASOURCE = "bapo-prometheus"
"""Uid of the provisioned data source; the variable `datasource` may name another."""
SCHEMA_VERSION = 39
WIDTH = 24
NAMES = sorted((metric.name for metric in METRICS), key=len, reverse=True)
_SERIES = re.compile(r"\b(bapo_[a-z0-9_]+|process_[a-z0-9_]+)\b(\{[^}]*\})?(?!\()")
KNOWN = "> -Inf"
"""Appended to a query: drops NaN, which would leave a panel without a scale."""
PALETTE = {"mode": "palette-classic"}
SOFT_HIGHEST = {"short": 1.0, "percentunit": 0.1, "s": 1.0, "reqps": 1.0}
"""Unit -> how far an axis from 0 reaches at least: a lag of 0 is not drawn on a scale to 100."""
ORIGIN_COLORS = {"x1": "#0072B2", "x2": "#E69F00", "x3": "#009E73"}
"""Those of the page and of the terminal; Okabe and Ito's, which colour-blind readers tell apart."""
LIMIT_COLOR = "#8e8e8e"

Kind = Literal["timeseries", "stat", "heatmap", "table", "bargauge", "alertlist", "state-timeline", "text"]


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; its place on the page is found by the row."""

    title: str
    help: str
    queries: tuple[Query, ...] = ()
    kind: Kind = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stack: bool = False
    lowest: float | None = None
    highest: float | None = None
    decimals: int | None = None
    lines_over: tuple[str, ...] = ()
    """Legends that are drawn as dashed gray lines: limits."""
    warn_above: float | None = None
    soft_highest: float | None = None
    """The axis reaches this far also where all values are lower; default: `SOFT_HIGHEST` of its unit."""
    axis: str = ""
    """Title of the axis: what is counted, where the unit does not say it."""
    without_data: str = ""
    """What the panel says where there is no series; default: Grafana's "No data"."""
    states: tuple[str, str] = ("no", "yes")
    """What 0 and 1 mean on a state timeline."""
    state_colors: tuple[str, str] = ("red", "green")
    runbooks: tuple[tuple[str, str], ...] = ()
    """(title, URL) of links in the corner of the panel."""
    text: str = ""
    """Markdown of a text panel."""

    @property
    def is_heatmap(self) -> bool:
        """Its queries give the buckets of a histogram."""
        return self.kind == "heatmap"


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    help: str
    rows: tuple[Row, ...]
    variables: tuple[str, ...] = ("run",)
    links: tuple[tuple[str, str], ...] = field(default=())
    """(title, url)"""


def only(expr: str, *, worker: bool = False) -> str:
    """The query for the chosen run; `worker`: and for the chosen workers, where a series has that label."""
    chosen = 'run=~"$run"'

    def narrowed(match: re.Match[str]) -> str:
        name, braces = match.group(1), match.group(2) or "{}"
        labels = [label for label in (chosen, braces[1:-1]) if label]
        if worker and name.startswith("bapo_rollout_") and "worker" in labels_of(name):
            labels.append('worker=~"$worker"')
        return f"{name}{{{','.join(labels)}}}"

    return _SERIES.sub(narrowed, expr)


def labels_of(series: str) -> tuple[str, ...]:
    """Labels of the metric that a series belongs to."""
    found = next((metric for metric in METRICS if series in series_of(metric.name, metric.kind)), None)
    return found.label_names if found else ()


def series_of(name: str, kind: str) -> tuple[str, ...]:
    """Names of its series in Prometheus."""
    return tuple(f"{name}_{end}" for end in ("bucket", "sum", "count")) if kind == "histogram" else (name,)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        heading: dict[str, Any] = {"type": "row", "title": row.title, "collapsed": row.collapsed, "panels": []}
        panels.append(_placed(heading, 0, y, WIDTH, 1))
        y = _lay_out(
            row.panels, heading["panels"] if row.collapsed else panels, y + 1, worker="worker" in dashboard.variables
        )
    for number, panel in enumerate(every_panel(panels), start=1):
        panel["id"] = number
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.help,
        "tags": ["bapo"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), *(_variable(name) for name in dashboard.variables)]},
        "annotations": {"list": [_alerts_as_annotations()]},
        "links": [_link(title, url) for title, url in dashboard.links],
        "panels": panels,
    }


def every_panel(panels: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows and panels from top to bottom, also those inside collapsed rows."""
    for panel in panels:
        yield panel
        yield from panel.get("panels", [])


def _lay_out(row: Sequence[Panel], panels: list[dict[str, Any]], y: int, *, worker: bool) -> int:
    """Left to right, then the next line; returns the first free line."""
    x, line = 0, 0
    for panel in row:
        if x + panel.width > WIDTH:
            x, y, line = 0, y + line, 0
        panels.append(_placed(_panel(panel, worker=worker), x, y, panel.width, panel.height))
        x, line = x + panel.width, max(line, panel.height)
    return y + line


def _placed(panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return panel | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel, *, worker: bool) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [_target(panel, query, place, worker=worker) for place, query in enumerate(panel.queries)],
        "fieldConfig": {
            "defaults": _defaults(panel),
            "overrides": [*map(_as_line, panel.lines_over), *itertools.starmap(_colored, ORIGIN_COLORS.items())],
        },
        "options": _options(panel),
        "links": [{"title": title, "url": url, "targetBlank": True} for title, url in panel.runbooks],
    }


def _target(panel: Panel, query: Query, place: int, *, worker: bool) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + place),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "expr": only(query.expr, worker=worker)
        + (f" {KNOWN}" if panel.kind in ("timeseries", "stat", "state-timeline") else ""),
        "legendFormat": query.legend or "__auto",
        "format": "heatmap" if panel.is_heatmap else "table" if panel.kind == "table" else "time_series",
        "instant": panel.kind in ("table", "bargauge"),
        "range": panel.kind not in ("table", "bargauge"),
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit, "color": PALETTE, "custom": {}}
    limits = {"min": panel.lowest, "max": panel.highest, "decimals": panel.decimals}
    found |= {key: value for key, value in limits.items() if value is not None}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stack else "none", "group": "A"}
        found["custom"] = {
            "lineWidth": 1, "fillOpacity": 60 if panel.stack else 8, "showPoints": "auto", "spanNulls": 60_000,
            "stacking": stacking,
        }  # fmt: skip
        found["custom"] |= _axis(panel)
    if panel.without_data:
        found["noValue"] = panel.without_data
    if panel.kind == "state-timeline":
        named = zip(panel.states, panel.state_colors, strict=True)
        options = {str(value): {"text": text, "color": color} for value, (text, color) in enumerate(named)}
        found["mappings"] = [{"type": "value", "options": options}]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warn_above is not None:
        steps.append({"color": "red", "value": panel.warn_above})
        found["color"] = {"mode": "thresholds"}
    found["thresholds"] = {"mode": "absolute", "steps": steps}
    return found


def _axis(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"axisLabel": panel.axis} if panel.axis else {}
    reaches = panel.soft_highest
    if reaches is None and panel.lowest == 0 and panel.highest is None:
        reaches = SOFT_HIGHEST.get(panel.unit)
    return found if reaches is None else found | {"axisSoftMax": reaches}


def _as_line(legend: str) -> dict[str, Any]:
    properties = {
        "custom.stacking": {"mode": "none", "group": "B"},
        "custom.fillOpacity": 0,
        "custom.lineWidth": 2,
        "custom.lineStyle": {"fill": "dash", "dash": [10, 10]},
        "color": {"mode": "fixed", "fixedColor": LIMIT_COLOR},
    }
    return {
        "matcher": {"id": "byName", "options": legend},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def _colored(legend: str, color: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": legend},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
    }


def _options(panel: Panel) -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind in ("stat", "bargauge"):
        graph = {"graphMode": "area", "colorMode": "value"} if panel.kind == "stat" else {"displayMode": "lcd"}
        return {"reduceOptions": reduce, "textMode": "auto", "orientation": "auto", **graph}
    if panel.kind == "heatmap":
        color = {"mode": "scheme", "scheme": "Oranges", "steps": 64}
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": color, "cellGap": 1}
    if panel.kind == "alertlist":
        return {"alertInstanceLabelFilter": '{alertname=~"Bapo.*"}', "datasource": "${datasource}", "maxItems": 20}
    if panel.kind == "state-timeline":
        return {"showValue": "never", "mergeValues": True, "rowHeight": 0.8, "legend": {"showLegend": False}}
    if panel.kind == "text":
        return {"mode": "markdown", "content": panel.text}
    return {"showHeader": True}


def _datasource() -> dict[str, Any]:
    current = {"text": "Prometheus", "value": DATASOURCE}
    return {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": current,
    }  # fmt: skip


def _variable(name: str) -> dict[str, Any]:
    source = {"run": "bapo_run_info", "worker": 'bapo_rollout_policy_version{run=~"$run"}'}[name]
    query = f"label_values({source}, {name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 2,
    }


def _alerts_as_annotations() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": True,
        "target": {"refId": "Anno", "expr": 'ALERTS{alertname=~"Bapo.*",alertstate="firing",run=~"$run|"}'},
        "titleFormat": "{{alertname}}",
        "textFormat": "{{run}}",
        "iconColor": "red",
    }


def _link(title: str, url: str) -> dict[str, Any]:
    return {
        "title": title, "type": "link", "url": url, "targetBlank": True, "keepTime": True, "includeVars": True,
        "asDropdown": False, "icon": "dashboard", "tags": [], "tooltip": "",
    }  # fmt: skip
