"""Which run of a study comes next, how long the rest takes, and what is said: made-up runs, no processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from studies.plan import Study
from studies.runner import (
    Estimates,
    Outcome,
    Runner,
    StudyProgress,
    mean_seconds,
    next_run,
    reason_of,
    tidy,
)
from studies.state import State, StudyRun
from tests.support.run_rows import make_evaluation, make_row
from tests.unit.test_study_plan import make, plan, study_values

MEASURED = Estimates({"plain": 100.0, "ours": 200.0})


def found_of(study: Study, index: int, state: State = State.NEW, step: int = 0) -> StudyRun:
    return StudyRun(run=study.runs[index], state=state, step=step)


def test_only_runs_that_one_start_finished_are_measured() -> None:
    rows = [
        {"method": "a", "status": "finished", "in_one_start": True, "wall_s": 10.0},
        {"method": "a", "status": "finished", "in_one_start": True, "wall_s": 20.0},
        {"method": "a", "status": "finished", "in_one_start": False, "wall_s": 99.0},
        {"method": "b", "status": "failed", "in_one_start": True, "wall_s": 1.0},
    ]
    assert mean_seconds(rows).by_method == {"a": 15.0}


@pytest.mark.parametrize(
    ("left_s", "want"),
    [(None, "ours-s1"), (250.0, "ours-s1"), (150.0, "plain-s2"), (50.0, None), (-1.0, None)],
)
def test_a_budget_starts_no_run_that_would_not_fit(tmp_path: Path, left_s: float | None, want: str | None) -> None:
    study = plan(tmp_path)
    waiting = [found_of(study, 1), found_of(study, 2), found_of(study, 3)]
    chosen = next_run(waiting, MEASURED, left_s)
    assert (chosen and chosen.run.name) == want


class FakeProcess:
    """A launcher that ends with a code after some looks at it."""

    def __init__(self, code: int, looks: int) -> None:
        self.code, self.looks, self.signals = code, looks, []  # type: ignore[var-annotated]

    def poll(self) -> int | None:
        self.looks -= 1
        return self.code if self.looks < 0 else None

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)


def run_fake(
    study: Study, codes: dict[str, int], *, parallel: int = 1, budget_s: float | None = None
) -> tuple[Outcome, list[str], int]:
    """(outcome, names in the order of their starts, most at a time); a second passes at each look."""
    seconds = [0.0]
    begun: list[str] = []
    most = 0

    def begin(found: StudyRun, log_path: Path) -> FakeProcess:
        begun.append(found.run.name)
        if found.state is State.NEW:
            make(study, study.runs.index(found.run), None)
        code = codes.get(found.run.name, 0)
        directory = RunDirectory(found.run.path)
        directory.update_run(status="failed" if code else "finished", message="it broke" if code else "")
        return FakeProcess(code, looks=9)

    def show(seen: StudyProgress) -> None:
        nonlocal most
        most = max(most, len(seen.running))

    def sleep(_: float) -> None:
        seconds[0] += 1.0

    runner = Runner(
        study, parallel=parallel, say=lambda text: None, show=show, budget_s=budget_s, start=begin, sleep=sleep,
        now=lambda: seconds[0],
    )  # fmt: skip
    return runner.run(), begun, most


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    study = plan(tmp_path)
    outcome, begun, most = run_fake(study, {"ours-s1": 4})
    assert (begun, most) == (["plain-s1", "ours-s1", "plain-s2", "ours-s2"], 1)
    assert [(row["run"], row["exit_code"], row["reason"]) for row in outcome.failed] == [("ours-s1", 4, "it broke")]
    outcome, begun, _ = run_fake(study, {})
    assert (begun, outcome.failed, outcome.left) == (["ours-s1"], [], [])


# -- results.jsonl


def test_the_reason_of_a_failure_is_the_runs_own_word_or_the_last_of_its_log(tmp_path: Path) -> None:
    study = plan(tmp_path)
    log = tmp_path / "log.txt"
    log.write_text("started\nTraceback\n\nMemoryError\n\n")
    assert reason_of(study.runs[0], log) == "MemoryError"
    make(study, 0, "failed").update_run(message="the learner ended with 4\nContinue from step 1")
    assert reason_of(study.runs[0], log) == "the learner ended with 4"


def test_the_best_checkpoints_of_a_finished_run_stay_as_asked(tmp_path: Path) -> None:
    values = study_values()
    values["common"] |= {"checkpoint": {"keep_best": 1}, "evaluation": {"every": 1}}
    run = make(plan(tmp_path, values), 0, "finished")
    for step, mean in ((1, 0.2), (2, 0.5), (3, 0.3), (4, 0.1)):
        run.checkpoint_dir(step).mkdir()
        (run.checkpoint_dir(step) / "state.json").write_text("{}")
        run.append_evaluation(make_evaluation("cd4", step + 1, mean))
    tidy(run)
    assert run.checkpoint_steps() == [2, 4]


def test_of_a_finished_run_the_records_and_the_newest_checkpoint_stay(tmp_path: Path) -> None:
    study = plan(tmp_path)
    run = make(study, 0, "finished", checkpoint=2)
    run.checkpoint_dir(3).mkdir()
    (run.checkpoint_dir(3) / "state.json").write_text("{}")
    run.append_metrics(make_row(1))
    (run.redis_path / "appendonly").write_text("x")
    tidy(run)
    assert (run.checkpoint_steps(), run.redis_path.exists(), run.weights_path.exists()) == ([3], False, False)
    assert len(run.read_metrics()) == 1
