"""Trackers: each recorded number reaches a tracker once, in order, also when the run or the tracker starts again."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.config.tracking import TrackerName, TrackingConfig
from bapo.core.errors import ConfigError, RecordError
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.processes import Starter
from services.launcher.supervision.child_process import Restarts
from services.trackers.base import TrackedRun, load_tracker, refuse_unusable, tracker_names
from services.trackers.mlflow import NO_NAME
from services.trackers.sender import Sender, measured, numbers_of, send_run
from tests.support.recorded_responses import text_row, token_row
from tests.support.run_rows import easy_first

EVALUATION = {
    "split": "cd4", "version": 1, "step": 0, "accuracy": 0.25, "low": 0.2, "high": 0.3, "mean_tokens": 30,
    "rewards": {},
}  # fmt: skip


class Service:
    """What a tracker's server has: survives the processes that send to it."""

    def __init__(self, tracker_id: str | None = "id-1") -> None:
        self.tracker_id = tracker_id
        self.started: list[tuple[str | None, int]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, list[dict[str, Any]]]] = []
        self.closed: list[bool] = []

    def start(self, run: TrackedRun) -> "Service":
        self.started.append((run.tracker_id, run.num_sent))
        if self.tracker_id is None:
            self.rows.clear()
        return self

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def log_responses(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((step, [dict(zip(columns, row, strict=True)) for row in rows]))

    def close(self, *, is_complete: bool) -> None:
        self.closed.append(is_complete)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run", dump_toml(load_config(["bapo"], [])))
    for step in (1, 2):
        directory.append_metrics({"step": step, "loss": step / 2})
    directory.append_evaluation(EVALUATION)
    directory.update_run(status="finished", pid=os.getpid())
    return directory


def follow(run: RunDirectory, service: Service, project: str = "bapo", responses_every: int = 0) -> Sender:
    folder = run.path / "service"
    folder.mkdir(exist_ok=True)
    settings = TrackingConfig(project=project, responses_every=responses_every)
    tracked = TrackedRun(name="run", folder=folder, settings=settings, config={"run": {"num_steps": 3}})
    return Sender(run, tracked, service.start)


def train_again_from_step_1(run: RunDirectory) -> None:
    """What a resume does: cut the records to the checkpoint, write the later steps again."""
    run.truncate_after(1)
    for step in (2, 3):
        run.append_metrics({"step": step, "loss": step / 2 + 0.1})


def test_each_row_is_sent_once(run: RunDirectory) -> None:
    service = Service()
    sender = follow(run, service)
    assert sender.send_new() == 3
    assert sender.send_new() == 0
    run.append_metrics({"step": 3, "loss": 1.5})
    assert sender.send_new() == 1
    assert service.steps == [1, 2, 0, 3]
    assert service.rows[2][1]["cd4/accuracy"] == 0.25
    assert service.rows[3] == (3, {"loss": 1.5})


def test_tables_of_responses_are_sent_once_for_steps_that_are_asked_for_and_have_texts(run: RunDirectory) -> None:
    for step in (1, 2):
        right, wrong = (text_row(row, f"12+5+{row}", step=step, reward=float(row == 0)) for row in (0, 1))
        run.token_files.write(step, [[right, wrong]])
    service = Service()
    assert follow(run, service, responses_every=2).send_new() == 4
    assert follow(run, service, responses_every=2).send_new() == 0
    ((step, rows),) = service.tables
    assert step == 2
    assert [(row["response"], row["reward"]) for row in rows] == [("12+5+0", 1.0), ("12+5+1", 0.0)]
    assert rows[0]["prompt"] == right.prompt

    run.token_files.write(4, [[token_row(0, ["4", "2"], step=4)]])
    assert follow(run, service).send_new() == 0  # nobody has asked for texts
    assert follow(run, service, responses_every=2).send_new() == 1
    assert service.tables[1][1][0]["response"] == "42"


def test_texts_cannot_be_sent_that_are_not_recorded() -> None:
    with pytest.raises(ConfigError, match=r"set diagnostics\.texts = 1"):
        load_config(["bapo"], ["--tracking.responses_every", "5", "--diagnostics.texts", "0"])


def test_a_new_process_resumes_the_trackers_run_and_sends_only_what_is_new(run: RunDirectory) -> None:
    service = Service()
    first = follow(run, service)
    first.send_new()
    first.close()
    run.append_metrics({"step": 3, "loss": 1.5})
    second = follow(run, service)
    assert second.send_new() == 1
    second.close()
    assert service.started == [(None, 0), ("id-1", 3)]
    assert service.steps == [1, 2, 0, 3]
    assert service.closed == [False, True]  # 2 of 3 steps, then all


@pytest.mark.parametrize("in_one_process", [True, False])
def test_steps_that_a_resumed_run_trains_again_are_not_doubled(run: RunDirectory, in_one_process: bool) -> None:
    service = Service()
    sender = follow(run, service)
    sender.send_new()
    train_again_from_step_1(run)
    if not in_one_process:
        sender = follow(run, service)
    assert sender.send_new() == 1
    assert service.steps == [1, 2, 0, 3]
    assert service.rows[1] == (2, {"loss": 1.0})  # what the first attempt sent


@pytest.mark.parametrize("in_one_process", [True, False])
def test_a_tracker_that_cannot_be_resumed_gets_the_present_records_from_the_start(
    run: RunDirectory, in_one_process: bool
) -> None:
    service = Service(tracker_id=None)
    sender = follow(run, service)
    sender.send_new()
    train_again_from_step_1(run)
    if not in_one_process:
        sender = follow(run, service)
    assert sender.send_new() == 4
    assert service.rows[:3] == [(1, {"loss": 0.5}), (2, {"loss": 1.1}), (3, {"loss": 1.6})]


def test_another_project_gets_all_rows_as_a_new_run(run: RunDirectory) -> None:
    service = Service()
    follow(run, service).send_new()
    assert follow(run, service, project="other").send_new() == 3
    assert service.started == [(None, 0), (None, 0)]


def test_a_damaged_note_of_what_was_sent_is_an_error_and_not_a_second_sending(run: RunDirectory) -> None:
    follow(run, Service())
    (run.path / "service" / "sent.json").write_text("{")
    with pytest.raises(RecordError, match=r"sent\.json"):
        follow(run, Service())


def test_two_processes_never_send_a_run_to_one_tracker(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trackers.sender.load_tracker", lambda name, tracked: Service())
    first = send_run(run, "service", TrackingConfig(), {}, lambda seconds: True)
    assert next(first) == 3
    with pytest.raises(ConfigError, match="already sending"):
        next(send_run(run, "service", TrackingConfig(), {}, lambda seconds: True))
    assert list(first) == []


@pytest.mark.parametrize("early", [{}, {"ended": "no gain"}], ids=["all steps", "an early end"])
def test_a_run_without_a_launcher_is_followed_until_its_last_weights_are_measured(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, early: dict[str, str]
) -> None:
    (run.path / "run.json").unlink()
    run.update_run(commit="abc")  # what `bapo create` writes
    last, service = 3 if early else 4, Service()
    records = [
        lambda: run.append_metrics({"step": 3, **early}),
        *([] if early else [lambda: run.append_metrics({"step": 4})]),
        lambda: run.append_evaluation(EVALUATION | {"version": last + 1, "step": last}),
    ]
    polls = [3, *(1 for _ in records), 0]

    def wait(seconds: float) -> bool:
        if service.rows:
            records.pop(0)()  # IndexError: it waits for more
        return False

    monkeypatch.setattr("services.trackers.sender.load_tracker", lambda name, tracked: service)
    assert list(send_run(run, "service", TrackingConfig(), {"run": {"num_steps": 4}}, wait)) == polls
    assert (records, service.closed) == ([], [True])


def test_a_run_on_another_machine_is_followed_until_its_record_says_that_it_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.update_run(status="running", host="another", pid=1 << 40)
    service, later = Service(), iter([3, 4])

    def wait(seconds: float) -> bool:
        step = next(later)  # StopIteration: it waits for more
        run.append_metrics({"step": step})
        if step == 4:
            run.update_run(status="finished")
        return False

    monkeypatch.setattr("services.trackers.sender.load_tracker", lambda name, tracked: service)
    assert list(send_run(run, "service", TrackingConfig(), {"run": {"num_steps": 4}}, wait)) == [4, 1, 0]


def test_numbers_of_inner_maps_have_both_names_and_what_is_not_a_number_is_left_out() -> None:
    row: dict[str, Any] = {"step": 1, "kl": None, "seconds": {"batch": 2, "update": {"x": 0.5}}, "rows": [1], "a": "b"}
    assert numbers_of(row) == {"seconds/batch": 2.0, "seconds/update/x": 0.5}
    binary = {"cd4/mean_reward": 0.25, "cd4/high": 0.3, "cd4/mean_tokens": 30.0, "cd4/accuracy": 0.25}
    assert measured({**EVALUATION, "low": None}) == binary


def test_an_evaluation_of_fewer_prompts_is_sent_as_compared_with_the_base_model(run: RunDirectory) -> None:
    for row in easy_first():
        run.append_evaluation(row)
    service = Service()
    follow(run, service).send_new()
    names = ("easy/accuracy", "easy/mean_reward", "easy/num_prompts")
    sent = [(step, *(row[name] for name in names)) for step, row in service.rows if "easy/low" in row]
    assert sent == [(0, 0.625, 0.625, 4.0), (4, 0.375, 0.375, 2.0)]


# -- names and packages


def test_the_configuration_knows_the_trackers_that_there_are() -> None:
    assert tracker_names() == get_args(TrackerName)


def test_an_unknown_tracker_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = TrackedRun(name="run", folder=tmp_path, settings=TrackingConfig(), config={})
    with pytest.raises(ConfigError, match=r"tracker 'wanbd'.*did you mean 'wandb'"):
        load_tracker("wanbd", tracked)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        load_tracker("wandb", tracked)


def test_no_name_is_one_that_mlflow_refuses() -> None:
    names = ["easy@0.3/accuracy", "test/reward_facts/exact/share (%)", "reward_parts/format-1.a"]
    wanted = ["easy_0.3/accuracy", "test/reward_facts/exact/share ___", "reward_parts/format-1.a"]
    assert [NO_NAME.sub("_", name) for name in names] == wanted


@pytest.mark.parametrize(
    ("uri", "offline", "is_refused"),
    [("http://127.0.0.1:5000", False, False), ("http://127.0.0.1:5000", True, True), ("", False, True)],
)
def test_mlflow_needs_a_database_only_where_no_server_is_named(
    monkeypatch: pytest.MonkeyPatch, uri: str, offline: bool, is_refused: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else sys)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match="sqlalchemy") if is_refused else nullcontext():
        refuse_unusable(["mlflow"], TrackingConfig(offline=offline))


@pytest.mark.parametrize(
    ("variables", "offline", "is_refused"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"WANDB_MODE": "offline"}, False, False),
        ({"WANDB_API_KEY": "k"}, False, False),
    ],
)
def test_wandb_without_a_login_is_refused_before_the_run_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], offline: bool, is_refused: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sys)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": str(tmp_path)} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="wandb login") if is_refused else nullcontext():
        refuse_unusable(["wandb"], TrackingConfig(offline=offline))


def test_one_name_from_the_command_line_is_a_list_and_the_same_name_twice_is_refused() -> None:
    assert load_config([], ["--tracking.to", "wandb"]).tracking.to == ("wandb",)
    with pytest.raises(ConfigError, match="twice"):
        load_config([], ["--tracking.to", '["wandb", "wandb"]'])


# -- in the launcher


def test_the_launcher_starts_a_process_per_tracker_whose_end_does_not_end_the_run(run: RunDirectory) -> None:
    config = load_config([], ["--tracking.to", '["wandb", "tensorboard"]'])
    specs = Starter(config, run).trackers()
    assert [spec.name for spec in specs] == ["tracker-wandb", "tracker-tensorboard"]
    assert all(spec.is_optional and spec.restarts is Restarts.CRASHED and spec.may_end for spec in specs)
    assert Starter(load_config([], []), run).trackers() == []
