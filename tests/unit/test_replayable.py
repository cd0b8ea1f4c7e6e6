"""Which steps can be repeated: those with a checkpoint before them and every batch since."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.analysis.whatif.replayable import plan_replay, plan_replay_of, replayable_steps
from bapo.core.codec import pack_batch
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.factories import make_batch


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "demo-001", "[run]\nname = 'demo-001'\n")


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
    with pytest.raises(
        ConfigError, match=r"step 6 .* not every batch since a checkpoint before it.*steps that can: 3\."
    ):
        plan_replay(run, 6)
    with pytest.raises(ConfigError, match=r"step 4 .* its batch is not kept; steps that can: 3\."):
        plan_replay(run, 4)


def test_a_run_without_batches_says_which_key_keeps_them(run: RunDirectory) -> None:
    keep(run, batches=(), checkpoints=(2,))
    with pytest.raises(ConfigError, match=r"no step of it can be.*checkpoint\.keep_batches"):
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
