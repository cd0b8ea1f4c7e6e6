"""The run directory: round trips, torn lines, full disks, truncation at resume, steps that can be repeated."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet
import pytest

from bapo.core.codec import pack_batch
from bapo.core.errors import ConfigError, ContractError, StorageError
from bapo.runtime.run_directory import layout
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.replayable import plan_replay, plan_replay_of, replayable_steps
from tests.support.factories import FULL_RESULT, make_batch, make_result


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "demo-001", "[run]\nname = 'demo-001'\n")


def test_a_new_run_has_its_configuration_and_no_records(run: RunDirectory) -> None:
    again = RunDirectory.open(run.path)
    assert again.config_path.read_text() == "[run]\nname = 'demo-001'\n"
    assert (again.name, again.read_run(), again.read_metrics(), again.read_evaluations()) == ("demo-001", {}, [], [])
    assert (list(again.read_groups()), again.latest_checkpoint(), again.read_port("buffer")) == ([], None, None)


def test_two_runs_never_share_a_directory(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="--resume") as refused:
        RunDirectory.create(run.path)
    assert str(run.path) in str(refused.value)


def test_a_run_of_another_format_is_refused(run: RunDirectory) -> None:
    run.update_run(status="finished")
    assert RunDirectory.open(run.path).read_run()["format"] == 1
    run.update_run(format=2)
    with pytest.raises(ConfigError, match="format 2"):
        RunDirectory.open(run.path)


def test_a_folder_without_config_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        RunDirectory.open(tmp_path)


def test_lines_come_back_in_the_order_in_which_they_were_appended(run: RunDirectory) -> None:
    run.append_metrics({"step": 1, "reward_mean": 0.25})
    run.append_metrics({"step": 2, "reward_mean": 0.5})
    run.append_evaluation({"split": "cd34", "version": 1})
    assert run.read_metrics() == [{"step": 1, "reward_mean": 0.25}, {"step": 2, "reward_mean": 0.5}]
    assert run.read_evaluations() == [{"split": "cd34", "version": 1}]


def test_a_torn_last_line_is_ignored_by_readers_and_cut_off_by_the_next_writer(run: RunDirectory) -> None:
    run.append_metrics({"step": 1})
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step":2,"rew')
    assert run.read_metrics() == [{"step": 1}]
    run.append_metrics({"step": 2})
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_a_damaged_line_in_the_middle_is_named(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ContractError, match=r"metrics\.jsonl line 2"):
        run.read_metrics()


@pytest.mark.parametrize("change", [{"rewards": None}, {"purpose": "\x1b]0;x"}, {}])
def test_group_records_of_another_shape_are_damaged(run: RunDirectory, change: dict[str, object]) -> None:
    run.write_groups(1, [make_result()])
    path = run.path / "groups" / "step-000001.parquet"
    (row,) = pyarrow.parquet.read_table(path).to_pylist()
    changed = row | change if change else {"step": 1}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([changed]), path)
    with pytest.raises(ContractError, match=r"step-000001\.parquet row 1"):
        list(run.read_groups())


def test_group_records_keep_every_field_of_a_result(run: RunDirectory) -> None:
    left_out = make_result(group_id="g2", origin=None, reason="all_incorrect", rewards="0000")
    run.write_groups(12, [FULL_RESULT, left_out])
    run.write_groups(3, [])
    assert list(run.read_groups()) == [(3, []), (12, [FULL_RESULT, left_out])]
    assert list(run.read_groups([12])) == [(12, [FULL_RESULT, left_out])]


def test_the_latest_checkpoint_is_the_newest_complete_one(run: RunDirectory) -> None:
    for step in (10, 20, 30):
        run.checkpoint_dir(step).mkdir()
    for step in (10, 20):
        (run.checkpoint_dir(step) / "state.json").write_text("{}")
    assert run.checkpoint_dir(10).name == "step-000010"
    assert (run.checkpoint_steps(), run.latest_checkpoint()) == ([10, 20], 20)


def test_records_of_a_group_that_lost_their_end_are_named(run: RunDirectory) -> None:
    """As a power failure leaves a file that was written just before."""
    run.write_groups(1, [make_result()])
    path = run.path / "groups" / "step-000001.parquet"
    for size in (path.stat().st_size // 2, 0):
        os.truncate(path, size)
        with pytest.raises(ContractError, match=r"step-000001\.parquet"):
            list(run.read_groups())


def test_records_are_made_durable_with_the_folders_that_name_them(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.write_groups(step, [make_result()])
    run.make_durable(range(2, 5))  # step 4 has none
    names = ["metrics.jsonl", "groups/step-000002.parquet", "groups/step-000003.parquet", "groups", "."]
    assert synced == [str((run.path / name).resolve()) for name in names]


def test_resuming_removes_what_a_killed_learner_was_writing(run: RunDirectory) -> None:
    """A checkpoint that was written early, at step 7, is not written again at step 7 by the learner that resumes."""
    partial = run.path / "checkpoints" / "step-000007.partial" / "hf"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half a model")
    run.checkpoint_dir(6).mkdir()
    (run.checkpoint_dir(6) / "state.json").write_text("{}")
    run.write_batch(6, b"batch")
    (run.path / "batches" / ".step-000007.frame.17-ab.tmp").write_bytes(b"half a batch")
    run.truncate_after(6)
    assert [entry.name for entry in (run.path / "checkpoints").iterdir()] == ["step-000006"]
    assert [entry.name for entry in (run.path / "batches").iterdir()] == ["step-000006.frame"]


def test_resuming_after_a_step_drops_what_that_step_did_not_know(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.write_groups(step, [make_result()])
    for version in (1, 3, 4):
        run.append_evaluation({"version": version})
    for _ in range(2):
        run.truncate_after(2)
        assert [row["step"] for row in run.read_metrics()] == [1, 2]
        assert run.group_steps() == [1, 2]
        assert [row["version"] for row in run.read_evaluations()] == [1, 3]  # version 3 = weights after step 2


def test_a_restart_beside_a_running_evaluator_keeps_its_file(run: RunDirectory) -> None:
    run.append_metrics({"step": 3})
    run.append_evaluation({"version": 4})
    run.truncate_after(2, keep_evaluations=True)
    assert (run.read_metrics(), run.read_evaluations()) == ([], [{"version": 4}])


def test_a_full_disk_is_a_storage_error_that_names_the_file(run: RunDirectory) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl", "groups/step-000001.tmp"):
        (run.path / name).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        run.append_metrics({"step": 1})
    with pytest.raises(StorageError, match=r"evaluations\.jsonl"):
        run.append_evaluation({"step": 1})
    with pytest.raises(StorageError, match=r"step-000001\.parquet"):
        run.write_groups(1, [make_result()])
    assert run.group_steps() == []


def test_group_records_from_before_outcomes_are_read() -> None:
    """The published studies have such records."""
    row = {
        "group_id": "g", "prompt_id": "p", "purpose": "fresh", "policy_version": 1, "rewards": [1.0], "origin": None,
        "reason": "informative", "birth": 1, "item": "g", "rows": None, "kind": "rl", "worker_id": "w",
        "num_tokens": 3, "sample_s": 0.5, "grade_s": 0.0, "claimed_at": 0.0,
    }  # fmt: skip
    assert layout._result_of(row, "groups row 1").outcomes == b""


# -- steps that can be repeated


def keep(run: RunDirectory, *, batches: tuple[int, ...], checkpoints: tuple[int, ...] = ()) -> None:
    for step in batches:
        run.write_batch(step, pack_batch(make_batch(step=step)))
    for step in checkpoints:
        run.checkpoint_dir(step).mkdir()
        (run.checkpoint_dir(step) / "state.json").write_text("{}")


def test_a_step_is_repeated_from_the_newest_checkpoint_before_it(run: RunDirectory) -> None:
    keep(run, batches=(3, 4, 5, 6, 7), checkpoints=(2, 4, 6))
    plan = plan_replay(run, 6)
    assert (plan.start, plan.step, [path.name for path in plan.frames]) == (
        4,
        6,
        ["step-000005.frame", "step-000006.frame"],
    )
    assert plan_replay(run, 7).start == 6
    assert replayable_steps(run) == [3, 4, 5, 6, 7]


def test_an_older_checkpoint_does_when_the_newer_one_is_gone_but_its_batches_are_not(run: RunDirectory) -> None:
    keep(run, batches=(1, 2, 3))
    assert (plan_replay(run, 3).start, len(plan_replay(run, 3).frames)) == (0, 3)


def test_a_missing_batch_in_between_is_refused_with_the_steps_that_can_be_repeated(run: RunDirectory) -> None:
    keep(run, batches=(3, 5, 6), checkpoints=(2,))
    with pytest.raises(ConfigError, match=r"step 6 .*: 3"):
        plan_replay(run, 6)
    with pytest.raises(ConfigError, match=r"step 4 .*: 3"):
        plan_replay(run, 4)


def test_a_run_without_batches_says_which_key_keeps_them(run: RunDirectory) -> None:
    keep(run, batches=(), checkpoints=(2,))
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_batches"):
        plan_replay(run, 3)


def test_a_batch_that_diverged_stands_in_for_one_that_was_not_kept(run: RunDirectory) -> None:
    keep(run, batches=(3,), checkpoints=(2,))
    run.diverged_path(4).parent.mkdir()
    run.diverged_path(4).write_bytes(pack_batch(make_batch(step=4)))
    plan = plan_replay(run, 4)
    assert [path.parent.name for path in plan.frames] == ["batches", "diverged"]
    assert plan_replay_of(run, run.diverged_path(4)) == plan
    assert replayable_steps(run) == [3, 4]


def test_kept_batches_are_forgotten_up_to_a_step_and_cut_off_at_a_resume(run: RunDirectory) -> None:
    keep(run, batches=(1, 2, 3, 4, 5))
    run.forget_batches(2)
    assert run.batch_steps() == [3, 4, 5]
    run.truncate_after(4)
    assert run.batch_steps() == [3, 4]
