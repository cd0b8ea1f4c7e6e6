"""Which run of a study comes next, how long the rest takes, and what is said: made-up runs, no processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.records import RunDirectory
from bapo.study.plan import Study
from bapo.study.progress import end_lines, plan_lines, progress_line
from bapo.study.results import Results
from bapo.study.runner import Outcome, Runner, StudyProgress, reason_of, tidy
from bapo.study.schedule import Estimates, mean_seconds, next_run, provisional, rest_s
from bapo.study.state import Found, State, look
from bapo.types import Fate, Purpose
from tests.factories import make_fate
from tests.unit.test_launcher_display import make_evaluation, make_row
from tests.unit.test_study_plan import make, plan, study_values

MEASURED = Estimates({"plain": 100.0, "ours": 200.0})


def found_of(study: Study, index: int, state: State = State.NEW, step: int = 0) -> Found:
    return Found(run=study.runs[index], state=state, step=step)


def test_only_runs_that_one_start_finished_are_measured() -> None:
    rows = [
        {"method": "a", "status": "finished", "in_one_start": True, "wall_s": 10.0},
        {"method": "a", "status": "finished", "in_one_start": True, "wall_s": 20.0},
        {"method": "a", "status": "finished", "in_one_start": False, "wall_s": 99.0},
        {"method": "b", "status": "failed", "in_one_start": True, "wall_s": 1.0},
    ]
    assert mean_seconds(rows).by_method == {"a": 15.0}


def test_an_unknown_method_takes_the_mean_of_the_known_ones_and_a_resumed_run_its_rest(tmp_path: Path) -> None:
    study = plan(tmp_path)
    assert Estimates({"plain": 100.0, "other": 300.0}).of(found_of(study, 1)) == 200.0
    assert MEASURED.of(found_of(study, 0, State.RESUME, step=2)) == pytest.approx(100.0 / 3)  # of 3 steps one is left
    assert Estimates({}).of(found_of(study, 0)) is None


@pytest.mark.parametrize(
    ("left_s", "want"),
    [(None, "ours-s1"), (250.0, "ours-s1"), (150.0, "plain-s2"), (50.0, None), (-1.0, None)],
)
def test_a_budget_starts_no_run_that_would_not_fit(tmp_path: Path, left_s: float | None, want: str | None) -> None:
    study = plan(tmp_path)
    waiting = [found_of(study, 1), found_of(study, 2), found_of(study, 3)]
    chosen = next_run(waiting, MEASURED, left_s)
    assert (chosen and chosen.run.name) == want


def test_without_a_measured_run_a_budget_lets_the_first_one_start(tmp_path: Path) -> None:
    study = plan(tmp_path)
    assert next_run([found_of(study, 0)], Estimates({}), 1.0) is not None


def test_the_rest_is_laid_on_the_free_places(tmp_path: Path) -> None:
    study = plan(tmp_path)
    waiting = [found_of(study, 1), found_of(study, 2), found_of(study, 3)]  # 200, 100, 200 s
    assert rest_s(waiting, [], MEASURED, 1) == 500.0
    # The one that goes on ends after 60 s: its place takes the 100 s run, the other 200 s; then 160 + 200.
    assert rest_s(waiting, [(found_of(study, 0), 40.0)], MEASURED, 2) == 360.0
    assert rest_s(waiting, [], Estimates({}), 1) is None
    assert rest_s([], [(found_of(study, 0), 400.0)], MEASURED, 1) == 0.0


def test_before_anything_is_measured_the_pace_of_a_run_gives_an_eta(tmp_path: Path) -> None:
    study = plan(tmp_path, study_values() | {"common": study_values()["common"] | {"run": {"num_steps": 100}}})
    resumed = found_of(study, 1, State.RESUME, step=50)
    guess = provisional(
        Estimates({}), [(found_of(study, 0), 20, 60.0), (resumed, 60, 40.0), (found_of(study, 2), 4, 9.0)]
    )
    assert guess.by_method == {"plain": 300.0, "ours": 400.0}
    assert provisional(MEASURED, [(found_of(study, 0), 20, 60.0)]) == MEASURED


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

    def begin(found: Found, log_path: Path) -> FakeProcess:
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


def test_as_many_runs_as_allowed_go_on_at_a_time(tmp_path: Path) -> None:
    assert run_fake(plan(tmp_path), {}, parallel=3)[2] == 3


def test_a_budget_leaves_the_runs_that_would_not_fit(tmp_path: Path) -> None:
    # Every run takes ten looks of a second: the first shows it, the second fits into 25 s, the third does not.
    outcome, begun, _ = run_fake(plan(tmp_path), {}, budget_s=25.0)
    assert begun == ["plain-s1", "ours-s1"]
    assert outcome.left == ["plain-s2", "ours-s2"]


def test_the_plan_names_methods_seeds_steps_and_time(tmp_path: Path) -> None:
    study = plan(tmp_path)
    make(study, 0, "finished")
    lines = list(plan_lines(study, [look(run) for run in study.runs], MEASURED, 1))
    assert lines[0].endswith("mine: 4 runs, 1 at a time")
    words = "plain preset grpo, seeds 1 2, 3 steps: 1 to be made, 1 finished, 100 s each (measured)"
    assert " ".join(lines[1].split()) == words
    assert lines[-1] == "time for the 3 that are left: about 8:20"


def test_the_progress_line_has_what_is_done_what_goes_on_and_an_eta(tmp_path: Path) -> None:
    study = plan(tmp_path)
    seen = StudyProgress(
        num_runs=4, finished=1, failed=1, waiting=(found_of(study, 3),), running=((found_of(study, 2), 2, 40.0),),
        estimates=MEASURED, parallel=1, elapsed_s=125.0,
    )  # fmt: skip
    assert progress_line(seen) == "1/4 finished, 1 failed | plain-s2 2/3 | 2:05 | ETA 4:20"


def test_the_end_names_what_failed_why_and_how_to_go_on(tmp_path: Path) -> None:
    study = plan(tmp_path)
    failed = {"run": "ours-s1", "exit_code": 4, "reason": "DivergenceError: loss is nan"}
    lines = list(end_lines(study, Outcome(failed=[failed], left=["ours-s2"]), "STUDY.toml"))
    assert lines[0] == "ours-s1 failed with exit code 4: DivergenceError: loss is nan"
    assert lines[1].startswith("1 of 4 runs failed")
    assert lines[2:] == [
        "not started: ours-s2", "go on with the same command; finished runs are kept: bapo study STUDY.toml",
    ]  # fmt: skip
    assert "bapo report" in next(end_lines(study, Outcome(), "STUDY.toml"))


# -- results.jsonl


def finish(run: RunDirectory) -> None:
    """Records of three steps: 4 + 8 fresh responses and 8 re-evaluated ones."""
    run.append_metrics(make_row(1, step_s=1.0, checkpoint_s=0.0))
    run.append_metrics(make_row(2, step_s=2.0, checkpoint_s=0.5))
    run.write_groups(1, [make_fate(group_id="a", rewards="1000", num_tokens=40)])
    run.write_groups(2, [make_fate(group_id="a", rewards="1000", num_tokens=40), *later()])
    run.append_evaluation(make_evaluation("cd4", 1, 0.25))
    run.append_evaluation(make_evaluation("cd4", 3, 0.5))
    run.update_run(status="finished")


def later() -> list[Fate]:
    return [
        make_fate(group_id="b", rewards="10000000", num_tokens=80),
        make_fate(group_id="c", rewards="00000000", num_tokens=64, purpose=Purpose.REEVALUATE),
    ]


def test_a_line_says_what_a_run_did_spent_and_reached(tmp_path: Path) -> None:
    study = plan(tmp_path)
    finish(make(study, 0, None))
    (study.path / "results.jsonl").write_text(
        '{"run":"plain-s1","method":"plain","status":"interrupted","starts":1,"wall_s":10.0}\n'
        '{"run":"ours-s1","method":"ours","status":"failed","starts":1,"wall_s":1.0}\n'
    )
    results = Results(study.path)
    row = results.remember(study.runs[0], exit_code=0, reason="", wall_s=5.0, is_new=True)
    assert row == {
        "method": "plain", "seed": 1, "run": "plain-s1", "status": "finished", "exit_code": 0, "reason": "",
        "starts": 2, "in_one_start": False, "wall_s": 15.0, "steps": 2, "rollouts": 20,
        "responses": {"fresh": 12, "reevaluate": 8, "evaluate": 800},
        "tokens": {"fresh": 120, "reevaluate": 64, "evaluate": 48000},
        "train_s": 3.5,
        "accuracy": {"cd4": {"before": 0.25, "after": 0.5, "num_prompts": 200}},
    }  # fmt: skip
    assert [line["run"] for line in results.read()] == ["ours-s1", "plain-s1"]


def test_the_reason_of_a_failure_is_the_runs_own_word_or_the_last_of_its_log(tmp_path: Path) -> None:
    study = plan(tmp_path)
    log = tmp_path / "log.txt"
    log.write_text("started\nTraceback\n\nMemoryError\n\n")
    assert reason_of(study.runs[0], log) == "MemoryError"
    make(study, 0, "failed").update_run(message="the learner ended with 4\nContinue from step 1")
    assert reason_of(study.runs[0], log) == "the learner ended with 4"


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


def test_a_study_keeps_batches_only_when_it_is_told_to(tmp_path: Path) -> None:
    study = plan(tmp_path)
    for index, replayable in enumerate([False, True]):
        run = make(study, index, "finished", checkpoint=2)
        run.checkpoint_dir(3).mkdir()
        (run.checkpoint_dir(3) / "state.json").write_text("{}")
        run.write_batch(3, b"frame")
        (run.redis_path / "appendonly").write_text("x")
        tidy(run, replayable=replayable)
        assert run.batch_steps() == ([3] if replayable else [])
        assert run.checkpoint_steps() == ([2, 3] if replayable else [3])
        assert not run.redis_path.exists()
