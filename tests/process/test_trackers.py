"""Tracker processes with the real packages, offline: the numbers arrive, and after a resume no step is doubled."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.recorded_responses import token_row
from tests.support.wait import wait_until

Points = list[tuple[int, float]]
"""(step, loss) in the order in which the tracker got them."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    settings = ["--tracking.offline", "true", "--tracking.group", "pairs", "--run.num_steps", "4"]
    settings += ["--tracking.responses_every", "2"]
    directory = RunDirectory.create(tmp_path / "run", dump_toml(load_config(["bapo"], settings)))
    train(directory, 1, 3)
    directory.token_files.write(2, [[token_row(0, ["6*", "7"])]])
    evaluation = {"split": "cd4", "version": 1, "step": 0, "accuracy": 0.25, "rewards": {}}
    directory.append_evaluation(evaluation)
    directory.update_run(status="running", pid=os.getpid())
    return directory


def train(run: RunDirectory, first: int, last: int, loss: float = 0.5) -> None:
    for step in range(first, last + 1):
        run.append_metrics({"step": step, "loss": step * loss, "time": 1.7e9 + step, "seconds": {"update": 0.25}})


def start(run: RunDirectory, name: str) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable,
        "-m",
        "services.trackers",
        "--config",
        str(run.config_path),
        "--run-dir",
        str(run.path),
    ]
    env = os.environ | {"TRACKIO_DIR": str(run.path / "trackio"), "WANDB_API_KEY": "0" * 40}
    return subprocess.Popen([*argv, "--to", name], env=env)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_numbers_arrive_and_a_resumed_run_doubles_no_step(name: str, run: RunDirectory) -> None:
    module = {"tensorboard": "tensorboardX"}.get(name, name)
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is optional: pip install -r requirements/tracking.txt")
    read: Callable[[RunDirectory], Points] = {
        "tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow
    }[name]  # fmt: skip

    process = start(run, name)
    sent = run.path / name / "sent.json"

    def has_all() -> bool:
        if name == "tensorboard":  # it keeps no note: it is written again at each start
            return len(read(run)) == 3
        return sent.is_file() and "/responses" in sent.read_text()

    wait_until(has_all)
    process.send_signal(signal.SIGTERM)  # as when the user interrupts the run
    assert process.wait(30) == 0
    assert read(run) == [(1, 0.5), (2, 1.0), (3, 1.5)]

    run.truncate_after(2)  # resumed from the checkpoint of step 2: step 3 is trained again
    train(run, 3, 4, loss=0.75)
    run.update_run(status="finished")
    assert start(run, name).wait(60) == 0
    third = 2.25 if name == "tensorboard" else 1.5  # only TensorBoard's file can be written again
    assert read(run) == [(1, 0.5), (2, 1.0), (3, third), (4, 3.0)]
    assert ["6*7" in table for table in tables(name, run)] == [True] * (name != "tensorboard")
    kept = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert b"0" * 40 not in kept, "an API key is not written anywhere"


# -- reading back what each package has written


def tables(name: str, run: RunDirectory) -> list[str]:
    """The tables of responses, each as text."""
    if name == "trackio":
        with sqlite3.connect(run.path / "trackio" / "bapo.db") as database:
            texts = [bytes(text).decode() for (text,) in database.execute("SELECT metrics FROM metrics")]
        return [text for text in texts if "responses" in text]
    return [path.read_text() for path in sorted((run.path / name).rglob("*.json")) if "6*7" in path.read_text()]


def tensorboard(run: RunDirectory) -> Points:
    from tensorboardX.proto.event_pb2 import Event

    points: Points = []
    for path in sorted((run.path / "tensorboard").glob("events.*")):
        data = path.read_bytes()
        while len(data) > 12:  # length (u64), its checksum, the event, its checksum
            (size,) = struct.unpack_from("<Q", data)
            if len(data) < 16 + size:
                break  # it is being written
            event = Event.FromString(data[12 : 12 + size])
            points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
            data = data[12 + size + 4 :]
    return points


def wandb(run: RunDirectory) -> Points:
    records = [record for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")) for record in _wandb(path)]
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    # W&B draws a row once per `_step`: `wandb sync` uploads the two folders one after the other.
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def _wandb(path: Path) -> Iterator[Any]:
    """LevelDB's log format: blocks of 32 KiB; checksum (u32), length (u16), kind (u8), then a record or a part."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<4xHB", data, at)
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, last
            yield Record.FromString(part)
            part = b""


def trackio(run: RunDirectory) -> Points:
    with sqlite3.connect(run.path / "trackio" / "bapo.db") as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    return [(step, row["loss"]) for step, row in rows if "loss" in row]


def mlflow(run: RunDirectory) -> Points:
    with sqlite3.connect(run.path / "mlflow" / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        return list(database.execute("SELECT step, value FROM metrics WHERE key = 'loss' ORDER BY step"))
