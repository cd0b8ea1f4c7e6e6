"""What is said of a run of `bapo sft`: it has conversations and a loss, and neither task, method nor reward."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.cli.training.model_card import model_card
from bapo.cli.training.sft import DEFAULTS
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from studies.compare.gather import gather
from tests.support.run_rows import make_row

NOT_OF_IT = ("countdown", "bapo`", "reward", "reinforcement", "verifiable", "responses")


def config_of(*overrides: str) -> Config:
    own = ["--sft.data=chats.jsonl", "--sft.epochs=2", "--run.num_steps=8", "--model.path=acme/base-1b", *overrides]
    return load_config([], [*DEFAULTS, *own])


def make_run(path: Path, *, steps: int, at: float | None = None, overrides: tuple[str, ...] = ()) -> RunDirectory:
    run = RunDirectory.create(path, dump_toml(config_of(*overrides)))
    run.update_run(sft_data="x")
    for step in range(1, steps + 1):
        fields = {"reward_mean": 0.0, "loss": 2.0 - step / 8, "step_s": 30.0, "time": at or time.time()}
        run.append_metrics(make_row(step, **fields))
    return run


def status_of(run: RunDirectory) -> dict[str, str]:
    result = CliRunner().invoke(app, ["status", str(run.path)], env={"COLUMNS": "300"}, catch_exceptions=False)
    found, title = dict[str, str](), ""
    for line in result.stdout.splitlines():
        if not line.startswith(" "):  # else it continues the text of the line above
            title, _, line = line.partition(" ")
        found[title] = f"{found.get(title, '')} {line.strip()}".strip()
    return found


def refused(*arguments: str) -> str:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError), error
    return str(error)


def test_the_card_says_on_which_conversations_the_model_was_fine_tuned() -> None:
    card = model_card("me/chat", config_of(), 8, [], is_adapter=False)
    head, _, settings = card.partition("## Configuration")
    assert "tags:\n- bapo\n- sft\n---" in head
    assert "`acme/base-1b`, fine-tuned on conversations by BAPO" in head
    assert "- method: supervised fine-tuning, 8 of 8 steps of 64 conversations (2 epochs), seed 42\n" in head
    assert "- data: `chats.jsonl`\n" in head
    assert [words for words in NOT_OF_IT if words in head] == []
    assert 'data = "chats.jsonl"' in settings


def test_the_card_of_reinforcement_learning_is_none_of_fine_tuning() -> None:
    config = load_config(["grpo"], ["--run.num_steps=9"])
    head = model_card("me/it", config, 8, [], is_adapter=False).partition("## Configuration")[0]
    assert "- reinforcement-learning\n---" in head
    assert "- method: `grpo`, 8 of 9 learner steps of " in head


def test_status_of_a_finished_run_has_its_data_and_loss_and_how_to_use_the_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "chats", steps=8)
    found = status_of(run)
    assert found["state"] == "finished"
    assert found["trains"] == "acme/base-1b on conversations (chats.jsonl) with bapo sft"
    assert found["step"] == "8 of 8, of 64 conversations each"
    assert found["loss"] == "1.0000 nats per token (mean of the latest batch)"
    assert "reward" not in found
    assert found["next"] == f"bapo export {run.path}   bapo train CONFIG --model.path FOLDER"


def test_status_of_a_run_under_way_has_the_time_left_and_of_an_ended_one_how_to_resume_it(tmp_path: Path) -> None:
    running = make_run(tmp_path / "running", steps=6)
    assert status_of(running)["step"] == "6 of 8, of 64 conversations each, about 1:00 left"  # 2 x 30 s
    stopped = make_run(tmp_path / "stopped", steps=6, at=time.time() - 1000)
    found = status_of(stopped)
    assert found["state"] == "stopped"
    assert found["next"].endswith(f": bapo sft --resume {stopped.path}")
    assert status_of(make_run(tmp_path / "new", steps=0))["next"] == f"bapo sft --resume {tmp_path / 'new'}"


def test_an_adapter_is_merged_before_reinforcement_learning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lora", steps=8, overrides=("--model.lora", "{ rank = 4 }"))
    assert status_of(run)["next"].startswith(f"bapo export {run.path} --merged ")


def test_a_fine_tuned_model_is_not_measured_on_the_default_task(tmp_path: Path) -> None:
    run = make_run(tmp_path / "chats", steps=8)
    assert "names no task to measure it on" in refused("eval", str(run.path))
    assert "has no checkpoint yet" in refused("eval", str(run.path), "--task.name", "countdown")
    own = make_run(tmp_path / "own", steps=8, overrides=("--task.name=chain",))
    assert "has no checkpoint yet" in refused("eval", str(own.path))


def test_tables_of_rewards_refuse_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "chats", steps=8)
    assert "is supervised fine-tuning" in refused("watch", str(run.path))
    with pytest.raises(ConfigError, match="it has no rewards to compare"):
        gather([run.path])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Config]]:
    """What `bapo sft` of 40 conversations prints, and the config of its run; the learner does not start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    monkeypatch.setattr("bapo.cli.training.sft._learn", lambda run: None)

    def call(text: str, *arguments: str) -> tuple[str, Config]:
        (tmp_path / "own.toml").write_text(text)
        command = ["sft", "chats.jsonl", "own.toml", "--algorithm.batch_size", "4", "--run.name", "it", *arguments]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        return result.stdout, load_resolved("outputs/it/config.toml")

    return call


FILE = """
[run]
num_steps = 500
name = "rl"
[learner]
lr = 3e-5
warmup_steps = 8
minibatch_size = 4
[model]
dtype = "bfloat16"
"""


def test_settings_of_a_file_that_are_not_taken_are_said_in_one_line(made: Callable[..., tuple[str, Config]]) -> None:
    said, config = made(FILE)
    assert said.splitlines()[-1] == (
        "bapo sft does not take from own.toml: run.num_steps = 500 (here 10), learner.lr = 3e-05 (here 1e-05), "
        "learner.warmup_steps = 8 (here 1); set on the command line what you want"
    )
    learner = config.learner
    assert (learner.lr, learner.warmup_steps, config.run.num_steps, config.model.dtype) == (1e-5, 1, 10, "bfloat16")


def test_what_the_command_line_sets_is_taken_and_not_said(made: Callable[..., tuple[str, Config]]) -> None:
    said, config = made(FILE, "--learner.lr=3e-5", "--learner.warmup_steps=8", "--model.path=acme/base-1b")
    assert "from own.toml: run.num_steps = 500 (here 10); set" in said
    assert (config.learner.lr, config.learner.warmup_steps) == (3e-5, 8)


def test_of_the_complete_config_of_a_run_nothing_is_said(made: Callable[..., tuple[str, Config]]) -> None:
    said, config = made(dump_toml(load_config(["grpo"], [])))
    assert "does not take" not in said
    assert config.learner.lr == 1e-5


def test_what_it_sets_itself_is_refused_under_each_of_its_names(made: Callable[..., tuple[str, Config]]) -> None:
    for name in ("run.num_steps", "run.T"):
        with pytest.raises(ConfigError, match="itself: give --epochs"):
            made("", f"--{name}=7")
