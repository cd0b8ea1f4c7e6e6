"""`bapo track`: each recorded number reaches the tracker once, in order, also when a resumed run writes it again."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bapo.analysis.trackers.base import Sender, TrackedRun, load_tracker, measured, numbers_of, tracker_names
from bapo.cli.app import app
from bapo.config.load import dump_toml, load_config
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory

EVALUATION = {
    "split": "cd4", "version": 1, "step": 0, "accuracy": 0.25, "low": 0.2, "high": 0.3, "mean_tokens": 30,
    "rewards": {},
}  # fmt: skip


class Remembers:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        """Nothing to send."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run", dump_toml(load_config(["bapo"], [])))
    for step in (1, 2):
        directory.append_metrics({"step": step, "loss": step / 2})
    directory.append_evaluation(EVALUATION)
    directory.update_run(status="finished", pid=os.getpid())
    return directory


def test_each_row_is_sent_once(run: RunDirectory) -> None:
    tracker = Remembers()
    sender = Sender(run, tracker)
    assert sender.send_new() == 3
    assert sender.send_new() == 0
    run.append_metrics({"step": 3, "loss": 1.5})
    assert sender.send_new() == 1
    assert [step for step, _ in tracker.rows] == [1, 2, 0, 3]
    assert tracker.rows[2][1]["cd4/accuracy"] == 0.25
    assert tracker.rows[3] == (3, {"step": 3.0, "loss": 1.5})


def test_steps_that_a_resumed_run_writes_again_are_sent_where_they_differ(run: RunDirectory) -> None:
    tracker = Remembers()
    sender = Sender(run, tracker)
    sender.send_new()
    path = run.path / "metrics.jsonl"
    path.rename(run.path / "old.jsonl")
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.9}\n')
    assert sender.send_new() == 1
    assert tracker.rows[-1] == (2, {"step": 2.0, "loss": 0.9})


def test_numbers_of_inner_maps_have_both_names_and_what_is_no_number_is_left_out() -> None:
    row: dict[str, Any] = {"step": 1, "kl": None, "seconds": {"batch": 2, "update": {"x": 0.5}}, "rows": [1], "a": "b"}
    assert numbers_of(row) == {"step": 1.0, "seconds/batch": 2.0, "seconds/update/x": 0.5}
    assert measured({**EVALUATION, "low": None}) == {"cd4/accuracy": 0.25, "cd4/high": 0.3, "cd4/mean_tokens": 30.0}


def test_an_unknown_tracker_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = TrackedRun(name="run", folder=tmp_path, project="bapo", config={})
    assert tracker_names() == ("tensorboard", "wandb")
    with pytest.raises(ConfigError, match=r"no such tracker.*tensorboard, wandb"):
        load_tracker("mlflow", tracked)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match="--to wandb needs the package wandb: pip install wandb"):
        load_tracker("wandb", tracked)


def test_tensorboard_gets_an_event_for_every_number_and_a_second_call_replaces_the_first(run: RunDirectory) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is optional: pip install tensorboardX")
    for _ in range(2):
        result = CliRunner().invoke(app, ["track", str(run.path), "--to", "tensorboard"])
        assert result.exit_code == 0, result.output
        assert "3 rows sent to tensorboard" in result.output
    (events,) = (run.path / "tensorboard").glob("events.out.tfevents.*")
    found = {(event.step, value.tag): value.simple_value for event in _events(events) for value in event.summary.value}
    assert found[1, "loss"] == 0.5
    assert found[2, "loss"] == 1.0
    assert found[0, "cd4/accuracy"] == 0.25


def _events(path: Path) -> list[Any]:
    """TFRecords: length (u64), its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[12 + size + 4 :]
    return found
