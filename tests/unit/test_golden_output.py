"""What a terminal shows, against files in tests/unit/golden; `BAPO_WRITE_GOLDEN=1 pytest ...` rewrites them."""

from __future__ import annotations

import io
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.cli.buffer import inspect
from bapo.config.tree import Config
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.display.summary import summary
from services.launcher.display.table import render
from studies.commands.compare import print_table
from studies.compare.tables import Table, table_against
from tests.support.run_rows import make_evaluation, make_row
from tests.unit.test_comparison import make_pair
from tests.unit.test_launcher_display import TRUNCATED, drawn, make_snapshot
from tests.unit.test_scheduler import STATUS

GOLDEN = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("BAPO_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_table(width: int) -> None:
    snapshot = make_snapshot(metrics=[make_row(1), make_row(2)], evaluations=[make_evaluation("cd4", 1, 0.25)])
    check(f"table-{width}", "\n".join(drawn(render(snapshot, width), width)) + "\n")


def test_the_live_table_of_agents() -> None:
    row = make_row(2) | {
        "num_episodes": 256, "episode_turns_mean": 4.510417, "episode_context_tokens_mean": 10.53125,
        "episode_forked_share": 0.125, "episode_calls_mean": {"get": 2.604167, "calc": 0.90625},
    }  # fmt: skip
    snapshot = make_snapshot(metrics=[make_row(1), row])
    check("table-agents", "\n".join(drawn(render(snapshot, 120), 120)) + "\n")


def test_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(Path("run"))
    for row in TRUNCATED:
        run.append_metrics(row)
    text = "\n".join(drawn(summary(run, Config()), 120)) + "\n"
    check("summary", text.replace(str(tmp_path), "FOLDER"))


def test_buffer_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    status = replace(STATUS, queued={"fresh": 3, "reevaluate": 1}, leased={"fresh": 2, "reevaluate": 0}, num_bad=4)
    client, admin = SimpleNamespace(status=lambda: status), SimpleNamespace(counters=lambda: {"pushed": 7})
    where = SimpleNamespace(client=client, admin=admin, url="http://127.0.0.1:8700")
    monkeypatch.setattr(inspect, "reach", lambda *_: nullcontext(where))
    check("buffer-stats", CliRunner().invoke(app, ["buffer", "stats"]).stdout)


def test_the_table_of_a_comparison(tmp_path: Path) -> None:
    output = io.StringIO()
    print_table(Console(file=output, width=160, highlight=False), table_against(make_pair(tmp_path)))
    check("compare", output.getvalue())


def test_a_table_too_wide_for_the_terminal_has_a_line_for_each_column_and_breaks_no_word() -> None:
    header = ("method", "training", "re-evaluated", "evaluation", "updates", "start to end", "paper: time, ratio")
    rows = (("bapo-s1", *(f"{10**n} [{n}, {n}]" for n in range(6))), ("grpo-s1", *"abcdef"))
    output = io.StringIO()
    table = Table(key="wide", title="Wide", header=header, rows=rows, note="")
    print_table(Console(file=output, width=60, highlight=False), table)
    lines = output.getvalue().splitlines()
    assert lines[1].split() == ["method", "bapo-s1", "grpo-s1"]
    assert all(any(line.startswith(name) for line in lines) for name in header)
