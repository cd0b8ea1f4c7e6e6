"""The dashboards are what Grafana's own types say: TypeScript checks each against @grafana/schema.

    npm install --ignore-scripts --prefix FOLDER @grafana/schema@12 typescript
    BAPO_TEST_GRAFANA=FOLDER/node_modules python -m pytest tests/unit/test_grafana_types.py

Covers: every key and value of the page, its variables, links, annotations and field settings, and the options of each
panel by its kind. Does not cover: queries, which the package does not know, and the list of alerts, which it has no
types of.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.monitoring.__main__ import DASHBOARDS, REPOSITORY

FOLDER = "BAPO_TEST_GRAFANA"
TYPES = Path(__file__).with_name("grafana_page.ts")
WITHOUT_TYPES = {"row", "alertlist"}
STRICT = (
    "--noEmit",
    "--strict",
    "--skipLibCheck",
    "--module",
    "esnext",
    "--moduleResolution",
    "bundler",
    "--target",
    "es2022",
)


def shipped(name: str) -> dict[str, Any]:
    """A dashboard as Grafana gets it."""
    found: dict[str, Any] = json.loads((REPOSITORY / f"deploy/grafana/dashboards/{name}.json").read_text())
    return found


def in_typescript(page: dict[str, Any]) -> str:
    """The page, and what each panel leaves to its kind, as constants with types."""
    lines = [TYPES.read_text(), f"export const page: Page = {json.dumps(page)};"]
    for panel in page["panels"]:
        kind, number = panel["type"], panel["id"]
        if kind in WITHOUT_TYPES:
            continue
        custom = panel["fieldConfig"]["defaults"]["custom"]
        lines.append(f'export const options{number}: Options["{kind}"] = {json.dumps(panel["options"])};')
        lines.append(f'export const custom{number}: Custom["{kind}"] = {json.dumps(custom)};')
    return "\n".join(lines)


def complaints(folder: Path, pages: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Page -> what the compiler says of it."""
    modules = os.environ.get(FOLDER)
    if not modules:
        pytest.skip(f"{FOLDER} names no node_modules with @grafana/schema and typescript: types are not checked")
    (folder / "node_modules").symlink_to(Path(modules).resolve())
    for name, page in pages.items():
        (folder / f"{name}.ts").write_text(in_typescript(page))
    compiler = folder / "node_modules/.bin/tsc"
    command = [str(compiler), *STRICT, *(f"{name}.ts" for name in pages)]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = re.findall(r"^(.+)\.ts\(.*error (TS\d+: .*)$", said.stdout, re.M)
    assert bool(found) == bool(said.returncode), said.stdout + said.stderr
    return {name: [what for file, what in found if file == name] for name in pages}


def test_the_dashboards_have_the_types_of_grafana(tmp_path: Path) -> None:
    assert complaints(tmp_path, {name: shipped(name) for name in DASHBOARDS}) == {name: [] for name in DASHBOARDS}


def broken(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The page of the run with one value changed, or added."""
    page = copy.deepcopy(shipped("run"))
    place: Any = page
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return page


def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    panels = shipped("run")["panels"]
    first = next(place for place, panel in enumerate(panels) if panel["type"] == "timeseries")
    settings = ("panels", first, "fieldConfig", "defaults")
    pages = {
        "key": broken(("style",), "dark"),
        "mode": broken((*settings, "thresholds", "mode"), "relative"),
        "variable": broken(("templating", "list", 0, "type"), "prometheus"),
        "option": broken(("panels", first, "options", "tooltips"), {"mode": "multi"}),
        "custom": broken((*settings, "custom", "showPoints"), "sometimes"),
    }
    found = complaints(tmp_path, pages)
    assert {name: len(said) for name, said in found.items()} == dict.fromkeys(pages, 1)
    said = {name: " ".join(lines) for name, lines in found.items()}
    for name, word in (("key", "style"), ("mode", "relative"), ("option", "tooltips"), ("custom", "sometimes")):
        assert word in said[name]
