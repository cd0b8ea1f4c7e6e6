"""Well-formed records with rows that no run writes: one sentence that names file and row, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bapo.cli import app
from bapo.core.errors import RecordError
from bapo.runtime.run_directory.files import read_lines
from bapo.runtime.run_directory.layout import RunDirectory
from studies.state import Results
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run

RIGHT = {"p": "1000", "q": "1100"}
CELL = {"policy": "theta_t", "origin": "x1", "age": None, "num_groups": 1}
METRICS: list[tuple[dict[str, Any], str]] = [
    ({"step": -1}, "Expected `int` >= 1 - at `$.step`"),
    ({"step": True}, "`$.step`"),
    ({"step": 10**400}, "`$.step`"),
    ({"x1": "2"}, "Expected `int | null`, got `str` - at `$.x1`"),
    ({"x1": None}, "`$.x1`"),
    ({"reward_mean": float("nan")}, "`$.reward_mean`"),
    ({"step_s": float("inf")}, "`$.step_s`"),
    ({"entropy": 1e308}, "`$.entropy`"),
    ({"time": -1}, "`$.time`"),
    ({"warning": "\ud800"}, "surrogates"),
    ({"divergences": None}, "`$.divergences`"),
    ({"divergences": [CELL | {"origin": "x9"}]}, "Invalid enum value 'x9' - at `$.divergences[0].origin`"),
    ({"divergences": [CELL]}, "required field `tv_tok`"),
    ({"bounds": [{"origin": "x1"}]}, "`$.bounds[0]`"),
]
EVALUATIONS: list[tuple[dict[str, Any], str]] = [
    ({"version": "1"}, "`$.version`"),
    ({"split": 7}, "`$.split`"),
    ({"accuracy": 1.5}, "`$.accuracy`"),
    ({"num_prompts": -4}, "`$.num_prompts`"),
    ({"rewards": {"p": []}}, "`$.rewards[...]`"),
    ({"rewards": {"p": [0.0, None]}}, "`$.rewards[...][1]`"),
    ({"rewards": [[0.0]]}, "`$.rewards`"),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    groups = {1: [result("p", "0000", step=1), result("q", "0110", step=1)], 2: [result("p", "0100", step=2)]}
    rows = [evaluation_row("cd4", version, RIGHT) for version in (1, 3)]
    return write_run(tmp_path / "bapo-s1", groups=groups, evaluations=rows)


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What a command says that ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["bapo", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(("forged", "told"), METRICS)
def test_a_forged_step_is_named(run: RunDirectory, forged: dict[str, Any], told: str) -> None:
    run.append_metrics(metrics_row(3) | forged)
    with pytest.raises(RecordError) as caught:
        run.read_metrics(whole=True)
    assert "metrics.jsonl line 3" in str(caught.value)
    assert told.replace(" | null", "") in str(caught.value).replace(" | null", "")


@pytest.mark.parametrize(("forged", "told"), EVALUATIONS)
def test_a_forged_measurement_is_named(run: RunDirectory, forged: dict[str, Any], told: str) -> None:
    run.append_evaluation(evaluation_row("cd4", 4, RIGHT) | forged)
    with pytest.raises(RecordError) as caught:
        run.read_evaluations(whole=True)
    assert "evaluations.jsonl line 3: " in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "forged",
    [
        {"rewards": []}, {"rewards": [float("nan")]}, {"rewards": "x"}, {"birth": -1}, {"birth": None}, {"group_id": 7},
        {"purpose": "train"}, {"origin": "x9"}, {"rows": [-1]}, {"num_tokens": 1.5}, {"outcomes": [256]},
        {"claimed_at": float("inf")},
    ],
)  # fmt: skip
def test_a_forged_group_is_named(run: RunDirectory, forged: dict[str, Any]) -> None:
    path = run.path / "groups" / "step-000001.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | forged for row in rows]), path)
    with pytest.raises(RecordError, match=r"step-000001\.parquet row 1"):
        list(run.read_groups())


@pytest.mark.parametrize(
    "forged",
    [{"started_at": "now"}, {"status": 1}, {"processes": {"learner": 7}}, {"addresses": ["x"]}, {"versions": None}],
)
def test_a_forged_run_json_is_named(run: RunDirectory, forged: dict[str, Any]) -> None:
    (run.path / "run.json").write_text(json.dumps(forged))
    with pytest.raises(RecordError, match=r"run\.json: Expected "):
        run.read_run()


def test_a_forged_line_of_a_study_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"run":"bapo-s1","method":"bapo","seed":1,"status":"x","starts":"1"}\n')
    with pytest.raises(RecordError, match=r"results\.jsonl line 1: .*starts"):
        Results(tmp_path).read()


@pytest.mark.parametrize("command", ["compare", "simulate", "explain"])
def test_every_command_that_reads_it_says_so_and_ends_with_2(
    run: RunDirectory, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"explain": ["all", "1"], "report": ["--out", "x"]}.get(command, [])
    run.append_metrics(metrics_row(3) | {"x1": "2"})
    assert "metrics.jsonl line 3: Expected `int" in refused(capsys, monkeypatch, command, str(run.path), *more)


def test_keys_that_nobody_knows_stay(run: RunDirectory) -> None:
    run.append_metrics(metrics_row(3) | {"mine": [None, "x"]})
    assert run.read_metrics(whole=True)[2]["mine"] == [None, "x"]
    assert read_lines(run.path / "metrics.jsonl")[2]["mine"] == [None, "x"]
