"""A resume on other data, another reward, model or config is named and refused, and goes on only when told to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo.config.agents import AgentsConfig
from bapo.config.load import diff, dump_toml, load_resolved
from bapo.core.errors import ConfigError, RecordError
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.doctor.inputs import check_inputs, listen_on_free_ports
from services.launcher.doctor.situation import Situation
from tests.support.launcher_config import make_config


class Place:
    """A run that has started, and what it trains on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.train, self.test = folder / "train.jsonl", folder / "test.jsonl"
        self.write(self.train, 10)
        self.write(self.test, 3, prefix="t")
        (folder / "rewards.py").write_text("import helper\ndef score(prompt, text):\n    return 1.0\n")
        (folder / "helper.py").write_text("from deeper.inner import X\n")
        (folder / "deeper").mkdir()
        (folder / "deeper" / "inner.py").write_text("X = 1\n")
        options = {"path": str(self.train), "held_out": {"test": str(self.test)}}
        task = {"name": "dataset", "options": options, "reward": f"trl:{folder / 'rewards.py'}:score"}
        self.config = make_config(folder, task=task)
        self.run = RunDirectory.create(folder / "run", dump_toml(self.config))

    def write(self, path: Path, num: int, prefix: str = "p") -> None:
        rows = [{"prompt": f"{prefix}{i}", "answer": str(i), "level": 1} for i in range(num)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, *, resumed: bool, accepts: bool = False) -> str:
        situation = Situation(config=self.config, is_resumed=resumed)
        return check_inputs(situation, self.run, accepts=accepts, how_to_accept="bapo train --accept-changes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_resume_on_the_same_goes_on(place: Place) -> None:
    assert place.start(resumed=False) == ""
    assert place.start(resumed=True) == ""


def _touch(place: Place) -> None:
    os.utime(place.train, (1, 1))


def _move(place: Place) -> None:
    place.run = RunDirectory(place.run.path.rename(place.folder / "moved"))


@pytest.mark.parametrize("change", [_touch, _move])
def test_what_leaves_the_content_as_it_was_is_no_change(place: Place, change: Callable[[Place], None]) -> None:
    place.start(resumed=False)
    change(place)
    assert place.start(resumed=True) == ""


def test_a_resume_on_free_ports_is_no_change_and_the_run_keeps_them(place: Place) -> None:
    fixed = load_resolved(place.run.config_path, ["--buffer.port=8701", "--learner.port=8702"])
    place.run.config_path.write_text(dump_toml(fixed))
    place.start(resumed=False)
    moved = listen_on_free_ports(place.run, fixed)
    assert diff(fixed, moved) == ["learner.port: 8702 -> 0", "buffer.port: 8701 -> 0"]
    assert load_resolved(place.run.config_path) == moved
    assert place.start(resumed=True) == ""


def test_a_config_that_was_edited_is_still_named_on_free_ports(place: Place) -> None:
    place.start(resumed=False)
    place.run.config_path.write_text(dump_toml(place.config).replace("num_steps = ", "num_steps = 1"))
    listen_on_free_ports(place.run, place.config)
    with pytest.raises(ConfigError, match=r"config\.toml has changed"):
        place.start(resumed=True)


def test_a_changed_agent_and_a_changed_advantage_are_named(place: Place) -> None:
    agent, advantage = place.folder / "agent.py", place.folder / "mine.py"
    for path in (agent, advantage):
        path.write_text("X = 1\n")
    loss = place.config.loss.model_copy(update={"advantage": f"{advantage}:Mine"})
    agents = AgentsConfig(rollout=f"{agent}:rollout")
    place.config = place.config.model_copy(update={"loss": loss, "agents": agents})
    place.start(resumed=False)
    for path in (agent, advantage):
        path.write_text("X = 2\n")
    with pytest.raises(ConfigError, match=r"agent .*/agent\.py has changed\n +method .*/mine\.py has changed"):
        place.start(resumed=True)


def _replace_a_row(place: Place) -> None:
    place.train.write_text(place.train.read_text().replace("p3", "q3"))


def _change_a_column(place: Place) -> None:
    place.train.write_text(place.train.read_text().replace('"level": 1', '"level": 2', 1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_replace_a_row, "data {folder}/train.jsonl has changed"),
        (_change_a_column, "data {folder}/train.jsonl has changed"),
        (lambda place: place.write(place.test, 4, "t"), "data {folder}/test.jsonl has changed"),
        (lambda place: (place.folder / "rewards.py").write_text("import helper\n"), "reward {folder}/rewards.py has"),
        (lambda place: (place.folder / "deeper/inner.py").write_text("X = 2"), "reward {folder}/deeper/inner.py has"),
        (lambda place: (place.folder / "helper.py").write_text(""), "reward {folder}/deeper/inner.py is gone"),
        (lambda place: (place.folder / "model/config.json").write_text('{"a": 1}'), "model {folder}/model/config.json"),
        (lambda place: (place.folder / "model/model.safetensors").write_bytes(b"other12"), "model.safetensors has"),
        (lambda place: (place.folder / "model/more.safetensors").write_bytes(b""), "model/more.safetensors is new"),
        (lambda place: place.run.config_path.write_text("[run]\n"), "config config.toml has changed"),
    ],
)
def test_every_change_is_named_and_refused(place: Place, change: Callable[[Place], object], what: str) -> None:
    place.start(resumed=False)
    change(place)
    with pytest.raises(ConfigError, match="--accept-changes") as refused:
        place.start(resumed=True)
    assert what.format(folder=place.folder) in str(refused.value)


def test_accepted_changes_are_recorded_and_are_the_new_state(place: Place) -> None:
    place.start(resumed=False)
    _replace_a_row(place)
    assert "train.jsonl has changed" in place.start(resumed=True, accepts=True)
    assert place.run.read_run()["accepted_changes"] == [{"after_step": 0, "what": [f"data {place.train} has changed"]}]
    assert place.start(resumed=True) == ""


def test_a_run_of_an_earlier_version_resumes_with_a_note(place: Place) -> None:
    assert "no digests" in place.start(resumed=True)
    assert place.start(resumed=True) == ""


def test_damaged_digests_are_told(place: Place) -> None:
    (place.run.path / "inputs.json").write_text("[1]")
    with pytest.raises(RecordError):
        place.start(resumed=True)
