"""The command line: overrides, names, refusals with exit codes, and help with examples."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from bapo.cli.app import app
from bapo.cli.arguments import free_name, load_named
from bapo.config.load import dump_toml, load_config
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError, UnavailableError
from bapo.runtime.run_directory.layout import RunDirectory


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


ANY_PORT = dump_toml(load_config([], ["--buffer.port", "0", "--rollout.port", "0"]))


def refusal(*arguments: str) -> BapoError:
    """The error that `main` turns into a message and an exit code."""
    error = call(*arguments).exception
    assert isinstance(error, BapoError), error
    return error


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'preset = "bapo"\n[run]\nroot = "{tmp_path / "outputs"}"\nnum_steps = 3\n'
        '[model]\npath = "models/countdown-tiny"\n[task]\nname = "countdown"\n'
    )
    return path


def test_create_says_that_containers_send_to_no_tracker(config_file: Path, tmp_path: Path) -> None:
    to = ["--tracking.to", '["tensorboard", "wandb"]']
    found = call("create", str(config_file), "--run.name", "tracked", *to)
    path = tmp_path / "outputs" / "tracked"
    assert found.stdout == f"run directory {path}\n"
    assert f"bapo track {path} --to tensorboard" in found.stderr
    assert f"bapo track {path} --to wandb" in found.stderr
    assert call("create", str(config_file), "--run.name", "plain").stderr == ""


def test_create_refuses_a_config_without_a_model_and_names_what_an_existing_run_does_not_take(
    config_file: Path,
) -> None:
    assert "does not set a model" in str(refusal("create", "grpo", "--task.name", "countdown"))
    call("create", str(config_file), "--run.name", "plain")
    again = call("create", str(config_file), "--run.name", "plain", "--learner.lr", "0.5")
    assert "learner.lr: " in again.stderr
    assert "-> 0.5" in again.stderr


def test_a_set_of_tokens_is_made_and_rotated_and_none_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    made = call("tokens", "create", str(folder), "--redis")
    rotated = call("tokens", "rotate", str(folder), "worker")
    retired = call("tokens", "retire", str(folder), "worker")
    assert (made.exit_code, rotated.exit_code, retired.exit_code) == (0, 0, 0)
    assert str(folder / "worker" / "token") in made.output
    secrets = [path.read_text().strip() for path in folder.rglob("token")] + [(folder / "redis/password").read_text()]
    assert len(secrets) == 8
    for secret in secrets:
        assert secret.strip() not in made.output + rotated.output + retired.output
    assert "has no tokens" in str(refusal("tokens", "rotate", str(tmp_path / "none"), "worker"))


def test_config_show_prints_the_resolved_configuration(config_file: Path) -> None:
    result = call("config", "show", str(config_file), "--learner.lr", "2e-5")
    shown = tomllib.loads(result.output)
    assert (result.exit_code, shown["learner"]["lr"], shown["run"]["num_steps"]) == (0, 2e-5, 3)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "bapo init --model"),
        (["bapo"], "preset bapo does not set a model: pass --model.path"),
        (["bapo", "--model.path", "models/countdown-tiny"], "preset bapo does not set a task: pass --task.name"),
        (["--learner.lr", "1e-4"], "the config does not set a model"),
        (["bapo", "grpo"], "presets bapo and grpo are both given"),
        (["bapp"], "did you mean 'bapo'"),
    ],
)
def test_a_start_that_names_too_little_or_too_much_is_refused(tokens: list[str], words: str) -> None:
    error = refusal("train", *tokens)
    assert isinstance(error, ConfigError)
    assert words in str(error)


def test_what_is_not_there_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("eval", "outputs/nosuch")
    assert "neither a run directory, nor a model folder" in str(result.exception)
    assert result.output == ""


def test_a_run_that_exists_is_refused_with_both_ways_out(config_file: Path) -> None:
    RunDirectory.create(config_file.parent / "outputs" / "mine")
    error = refusal("train", str(config_file), "--run.name", "mine")
    assert "bapo train --resume" in str(error)
    assert "--run.name" in str(error)


def test_auto_numbers_runs_by_the_name_of_the_file(config_file: Path) -> None:
    tokens = [str(config_file), "--run.name", "auto"]
    assert load_named(tokens).run.name == "tiny-001"
    (config_file.parent / "outputs" / "tiny-001").mkdir(parents=True)
    assert load_named(tokens).run.name == "tiny-002"
    assert free_name(config_file.parent / "outputs", "tiny") == "tiny-002"


def test_resume_takes_no_other_configuration(config_file: Path) -> None:
    error = refusal("train", str(config_file), "--resume", "outputs/mine")
    assert "remove " in str(error)


@pytest.mark.parametrize(
    ("verb", "words"),
    [("evaluate", "It is an evaluation: bapo eval measures again"), ("buffer", "bapo up buffer --run ")],
)
def test_what_does_not_train_is_not_resumed_as_training(
    verb: str, words: str, config_file: Path, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path / "other", dump_toml(load_config([config_file], [])))
    run.update_run(status="interrupted", command=["launcher", verb, "--run-dir", str(run.path)])
    assert f"{run.path} does not train. " in (error := str(refusal("train", "--resume", str(run.path))))
    assert words in error
    run.append_metrics({"step": 1})
    assert run.is_of_training, "the buffer of a training run was served last"


def test_a_finished_run_is_not_resumed(config_file: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "done", dump_toml(load_config([config_file], [])))
    run.update_run(status="finished")
    assert "is finished: all 3 steps are trained" in str(refusal("train", "--resume", str(run.path)))


def evaluate_refusal(tmp_path: Path, config_file: Path, **options: Any) -> str:
    run = RunDirectory.create(tmp_path / "run", dump_toml(load_config([config_file], [])))
    for step in options.get("checkpoints", ()):
        run.checkpoint_dir(step).mkdir()
        (run.checkpoint_dir(step) / "state.json").write_text("{}")
    return str(refusal("eval", str(run.path), *options.get("flags", ())))


def test_eval_of_a_run_needs_a_checkpoint_that_is_there(tmp_path: Path, config_file: Path) -> None:
    assert "has no checkpoint yet" in evaluate_refusal(tmp_path / "a", config_file)
    flags = ("--step", "3")
    text = evaluate_refusal(tmp_path / "b", config_file, checkpoints=(2, 4), flags=flags)
    assert "no checkpoint of step 3; available: 2, 4" in text
    text = evaluate_refusal(tmp_path / "c", config_file, checkpoints=(2,), flags=(str(config_file),))
    assert "has its own config" in text


def test_export_needs_a_checkpoint_and_a_new_folder(tmp_path: Path, config_file: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", dump_toml(load_config([config_file], [])))
    assert "has no checkpoint yet" in str(refusal("export", str(run.path)))
    assert "exists already" in str(refusal("export", str(run.path), "--out", str(tmp_path)))


def test_scale_of_a_run_that_is_not_up_says_so(tmp_path: Path, config_file: Path) -> None:
    config = load_config([config_file], ["--rollout.port", "0"])
    run = RunDirectory.create(tmp_path / "run", dump_toml(config))
    error = refusal("scale", str(run.path), "2")
    assert isinstance(error, UnavailableError)
    assert "does not respond" in str(error)


def default_ports() -> dict[str, int]:
    """Section -> port that a process of a run takes unless told otherwise, by the configuration itself."""
    sections = Config().model_dump()
    return {
        name: section["port"] for name, section in sections.items() if isinstance(section, dict) and "port" in section
    }


def test_free_ports_are_those_that_no_override_names() -> None:
    config = load_named(["deploy/configs/smoke.toml", "--buffer.port", "8800"], free_ports=True).model_dump()
    assert {name: config[name]["port"] for name in default_ports()} == dict.fromkeys(default_ports(), 0) | {
        "buffer": 8800
    }


def test_a_run_can_be_looked_at_while_another_one_trains() -> None:
    from services.dashboard import view as server

    assert {"buffer", "scheduler", "learner", "evaluation", "rollout", "dashboard"} <= default_ports().keys()
    assert len(set(default_ports().values())) == len(default_ports())
    assert server.PORT not in default_ports().values()
    (option,) = (p for p in typer.main.get_command(app).commands["view"].params if p.name == "port")  # type: ignore[attr-defined]
    assert option.default == server.PORT == 8709


@pytest.mark.parametrize(
    "command",
    [
        ["buffer", "drop", "latest", "prompt", "p", "--yes"],
        ["buffer", "drop", "latest", "run", "run", "--yes"],
        ["buffer", "restore", "latest", "buffer.snap", "--yes"],
        ["scale", "latest", "2", "--yes"],
    ],
)
def test_what_changes_a_run_must_name_it_and_prints_who_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(Path("outputs/demo"), ANY_PORT)
    run.update_run(status="running", pid=12345, started_at=1.7e9)
    Path("buffer.snap").write_bytes(b"snapshot")
    found = CliRunner().invoke(app, command)
    assert "run outputs/demo, started by process 12345 at 2023-11-1" in found.stderr
    assert isinstance(found.exception, UnavailableError), "it has never listened"


def test_latest_is_the_run_that_was_written_to_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no run in outputs" in str(refusal("scale", "latest", "2"))
    for seconds, name in enumerate(("new", "old")):
        RunDirectory.create(Path("outputs") / name, ANY_PORT).update_run(status="running")
        os.utime(Path("outputs") / name / "run.json", (1000 - seconds, 1000 - seconds))
    assert "cannot scale run outputs/new" in str(refusal("scale", "latest", "2"))
    assert "cannot scale run outputs/new" in str(refusal("scale", "new", "2"))  # a bare name is below outputs
    assert "cannot scale run outputs/old" in str(refusal("scale", "outputs/old", "2"))


def test_where_the_studies_are_not_installed_their_commands_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "studies.commands", raising=False)
    monkeypatch.setitem(sys.modules, "studies", None)
    for command in (["compare", "a", "b", "--paper"], ["study", "mine.toml"], ["report", "a", "b", "--out", "c"]):
        assert "needs the package `studies`" in str(refusal(*command))
    assert "compare" in call("--help").output
