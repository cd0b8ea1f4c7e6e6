"""`bapo init`, `runs`, `status`, `logs` and `stop` on files: what they write, list, print and refuse."""

from __future__ import annotations

import json
import os
import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.cli.running.runs import state_of
from bapo.config.load import dump_toml, load_config
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.logs import LogFollower
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.run_rows import easy_first, make_evaluation, make_row

GONE = 2**22 + 1
"""A process id that Linux never gives."""


def refused(*arguments: str) -> str:
    error = CliRunner().invoke(app, arguments).exception
    assert error is not None
    return str(error)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user stands: a model, data whose prompts are in a column `question`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


INIT = ("init", "--model", "model", "--data", "train.jsonl")


def test_init_writes_a_file_that_loads_with_the_columns_and_sizes_of_the_data(folder: Path) -> None:
    result = CliRunner().invoke(app, [*INIT, "--held-out", "train.jsonl", "--preset", "grpo"])
    assert result.exit_code == 0, result.exception
    config = load_config(["run.toml"], [])
    assert (config.preset, config.model.path, config.task.name) == ("grpo", "model", "dataset")
    assert config.task.options["prompt_column"] == "question"
    assert "answer_column" not in config.task.options  # recognized by itself
    assert (config.algorithm.batch_size, config.learner.minibatch_size) == (12, 3)  # a quarter, as in the preset
    text = (folder / "run.toml").read_text()
    assert len(text.splitlines()) <= 38
    assert tomllib.loads(text)["checkpoint"]["every"] == 10
    assert "reward" not in tomllib.loads(text)["task"]


def test_init_keeps_prompt_and_response_within_the_context_of_the_model(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 300}')
    assert CliRunner().invoke(app, INIT).exit_code == 0
    rollout = load_config(["run.toml"], []).rollout
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (100, 200)


def test_init_starts_with_grpo_and_says_that_partial_credit_counts(folder: Path) -> None:
    assert CliRunner().invoke(app, INIT).exit_code == 0
    config = load_config(["run.toml"], [])
    assert (config.preset, config.rollout.num_workers) == ("grpo", 1)
    assert "partial credit" in (folder / "run.toml").read_text()


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(600_000, 1e-4), (9_999_999, 1e-4), (135_000_000, 1e-5), (500_000_000, 1e-6), (8 * 10**9, 1e-6)],
)
def test_init_writes_a_rate_for_the_size_of_the_model(folder: Path, parameters: int, rate: float) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 0]}}).encode()
    (folder / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert CliRunner().invoke(app, INIT).exit_code == 0
    assert load_config(["run.toml"], []).learner.lr == rate


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1e-6), ("HuggingFaceTB/SmolLM2-135M", 1e-5), ("Qwen/Qwen3-0.6B", 1e-6),
        ("acme/tiny-3M", 1e-4), ("acme/unknown", 1e-6), ("acme/gpt4-2B3", 1e-6), ("Qwen/Qwen3-30B-A3B", 1e-6),
    ],
)  # fmt: skip
def test_init_reads_the_size_of_a_model_on_the_hub_from_its_name(folder: Path, name: str, rate: float) -> None:
    assert CliRunner().invoke(app, ["init", "--model", name, *INIT[3:]]).exit_code == 0
    assert load_config(["run.toml"], []).learner.lr == rate


def test_init_overwrites_only_by_force(folder: Path) -> None:
    (folder / "run.toml").write_text("mine")
    assert "overwrite it with --force" in refused(*INIT)
    assert (folder / "run.toml").read_text() == "mine"
    assert CliRunner().invoke(app, [*INIT, "--force"]).exit_code == 0
    assert (folder / "run.toml").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "folder nowhere not found, and it is not a Hugging Face id"),
        (["--data", "none.jsonl"], "none.jsonl not found"),
        (["--data", "train.csv"], "csv.read_csv('train.csv'), 'train.parquet')"),
        (["--held-out", "none.jsonl"], "none.jsonl not found"),
        (["--preset", "bapp"], "did you mean 'bapo'"),
        (["--prompt-column", "questoin"], "no column 'questoin' (did you mean 'question'?); set it with"),
    ],
)
def test_init_refuses_what_cannot_be_trained_and_leaves_no_file(folder: Path, arguments: list[str], words: str) -> None:
    assert words in refused(*INIT, *arguments)
    assert not (folder / "run.toml").exists()


def make_run(path: str, **fields: object) -> RunDirectory:
    run = RunDirectory.create(path, dump_toml(load_config([], ["--run.num_steps", "9"])))
    if fields:
        run.update_run(**fields)
    return run


def test_the_state_of_a_run_is_what_its_launcher_did(folder: Path) -> None:
    expected = {
        "new": ({}, "created"),
        "live": ({"status": "running", "pid": os.getpid()}, "running"),
        "killed": ({"status": "running", "pid": GONE}, "crashed"),
        "elsewhere": ({"status": "running", "pid": GONE, "host": "another"}, "running"),
        "ended": ({"status": "interrupted", "pid": GONE}, "stopped"),
        "broken": ({"status": "failed", "pid": GONE}, "crashed"),
        "done": ({"status": "finished", "pid": GONE}, "finished"),
    }
    found = {name: state_of(make_run(f"outputs/{name}", **fields)).state for name, (fields, _) in expected.items()}
    assert found == {name: state for name, (_, state) in expected.items()}


def test_the_state_of_a_run_in_containers_is_what_its_records_say(folder: Path) -> None:
    now = time.time()
    rows = {
        "live": make_row(4, time=now),
        "silent": make_row(4, time=now - 900, step_s=2.0),
        "over": make_row(9, time=now - 900),
        "slow": make_row(4, time=now - 900, step_s=480.0),  # the next step is expected within 3 x 480 s
        "slow and silent": make_row(4, time=now - 1500, step_s=480.0),
    }
    for name, row in rows.items():
        make_run(f"outputs/{name}").append_metrics(row)
    found = {name: state_of(RunDirectory.open(f"outputs/{name}")).state for name in rows}
    expected = {"live": "running", "silent": "stopped", "over": "finished"}
    assert found == expected | {"slow": "running", "slow and silent": "stopped"}
    assert "docker compose logs -f learner" in CliRunner().invoke(app, ["status", "outputs/live"]).stdout
    assert "has no launcher: stop it with docker compose stop" in refused("stop", "outputs/live", "--yes")


def test_runs_lists_step_accuracy_and_page_and_survives_a_damaged_run(folder: Path) -> None:
    url = "http://127.0.0.1:8704"
    run = make_run("outputs/live", status="running", pid=os.getpid(), addresses={"dashboard_url": url})
    run.append_metrics(make_row(4))
    run.append_evaluation(make_evaluation("cd4", 1, 0.25))
    (make_run("outputs/odd").path / "run.json").write_text("{")
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)}
    live = rows["live"]
    assert (live["step"], live["num_steps"], live["accuracy"], live["page"]) == (4, 9, 0.25, url)
    assert rows["odd"]["state"] == "unreadable"
    text = CliRunner().invoke(app, ["runs"]).stdout
    for cell in ("outputs/live", "running", "4/9", "cd4 25.0 %", url):
        assert cell in text
    assert "folder nowhere not found" in refused("runs", "nowhere")


def test_a_measurement_of_fewer_prompts_is_shown_as_compared_with_the_base_model(folder: Path) -> None:
    run = make_run("outputs/live", status="running", pid=os.getpid())
    for row in easy_first():
        run.append_evaluation(row)
    assert state_of(run).accuracies == {"easy": 0.375}
    shown = "easy accuracy 37.5 % after step 4 (base model 62.5 %; the change is of 2 prompts)"
    assert shown in " ".join(CliRunner().invoke(app, ["status", "latest"]).stdout.split())
    assert "easy 37.5 %" in CliRunner().invoke(app, ["runs"]).stdout


def test_the_mean_of_a_run_is_over_splits_at_their_own_temperature(folder: Path) -> None:
    run = make_run("outputs/done", status="finished", pid=GONE)
    for split, mean in (("easy", 0.25), ("hard", 0.5), ("easy@0.3", 0.875), ("hard@0.3", 0.75)):
        run.append_evaluation(make_evaluation(split, 10, mean))
    state = state_of(run)
    assert (state.accuracy, state.accuracies["easy@0.3"]) == (0.375, 0.875)


def test_status_of_a_live_run_says_where_the_token_of_its_page_is(folder: Path) -> None:
    run = make_run("outputs/live", status="running", pid=os.getpid(), addresses={"dashboard_url": "http://here"})
    assert "token" not in CliRunner().invoke(app, ["status", "latest"]).stdout
    set_of_run(run.path).create()
    assert "outputs/live/tokens/operator/token (the page asks" in CliRunner().invoke(app, ["status", "latest"]).stdout


def test_status_of_a_stopped_run_says_how_to_resume_it(folder: Path) -> None:
    run = make_run("outputs/mine", status="interrupted", pid=GONE, started_at=1.7e9)
    run.append_metrics(make_row(4))
    text = CliRunner().invoke(app, ["status", "latest"]).stdout
    assert "stopped" in text
    assert "4 of 9" in text
    assert "bapo train --resume outputs/mine" in text
    assert (
        run.resume_point
        == "from step 1, as it has no checkpoint yet (4 finished steps are repeated with the same batches)"
    )
    run.checkpoint_dir(3).mkdir()
    (run.checkpoint_dir(3) / "state.json").write_text("{}")
    assert run.resume_point == "from the checkpoint of step 3 (1 finished step is repeated)"


def test_logs_prints_the_latest_lines_of_a_part_and_names_the_parts_for_an_unknown_one(folder: Path) -> None:
    run = make_run("outputs/mine")
    run.log_path("learner").write_text("one\ntwo\nthree\n")
    run.log_path("scheduler").write_text("issued\n")
    assert CliRunner().invoke(app, ["logs", "latest", "learner", "-n", "2"]).exception is not None  # no run.json yet
    run.update_run(status="finished")
    assert CliRunner().invoke(app, ["logs", "latest", "learner", "-n", "2"]).stdout == "two\nthree\n"
    followed = CliRunner().invoke(app, ["logs", "-f", "latest"]).stdout  # of a run that has ended: it ends, too
    assert followed.splitlines() == ["== learner ==", "one", "two", "three", "== scheduler ==", "issued"]
    assert "no log 'lerner' (did you mean 'learner'?); it has learner, scheduler" in refused("logs", "latest", "lerner")


def test_a_follower_reads_whole_lines_once_and_begins_again_after_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    log.write_text("old\nhal")
    follower = LogFollower(tmp_path)
    assert follower.latest("learner", 5) == ["old"]
    with log.open("a") as file:
        file.write("f\nnew\n")
    assert list(follower.new_lines()) == [("learner", "half"), ("learner", "new")]
    assert list(follower.new_lines()) == []
    log.write_text("fresh\n")
    assert list(follower.new_lines()) == [("learner", "fresh")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": "finished", "pid": GONE}, "is not running: it is finished"),
        ({"status": "running", "pid": GONE}, "is not running: it is crashed"),
        ({"status": "running", "pid": os.getpid()}, "has exited"),  # the id is another program's now
        ({"status": "running", "pid": 1, "host": "another"}, "was started on another: run bapo stop there"),
    ],
)
def test_stop_ends_no_process_that_is_not_the_launcher_of_a_running_run(
    folder: Path, fields: dict[str, object], words: str
) -> None:
    run = make_run("outputs/mine", **fields)
    assert words in refused("stop", "outputs/mine", "--yes")
    (run.path / "metrics.jsonl").write_text("damaged\n" * 2)
    assert words in refused("stop", "outputs/mine", "--yes")


def test_stop_needs_a_name(folder: Path) -> None:
    assert CliRunner().invoke(app, ["stop"]).exit_code == 2
