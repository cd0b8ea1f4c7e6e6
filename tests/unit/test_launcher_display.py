"""What a user sees of a run: the live table at two widths, plain lines, who waits for whom, the summary."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.types import Outcome
from bapo.runtime.process import Interrupts
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.rollout_client import AgentsStatus, WorkerStatus
from services.launcher.__main__ import _end
from services.launcher.display.console import LineDisplay, make_display
from services.launcher.display.snapshot import Observer, Snapshot
from services.launcher.display.summary import losses, losses_of, over_best_base, summary
from services.launcher.display.table import accuracies, render
from services.launcher.session import Session, stall_reason
from services.launcher.supervision.children import ProcessLine
from tests.support.run_rows import make_evaluation, make_row
from tests.support.synthetic_runs import result, write_run
from tests.unit.test_scheduler import STATUS

STARTING = (
    ProcessLine(name="redis", state="ready", seconds=0.1),
    ProcessLine(name="rollout_server", state="starting", seconds=14.2, hint="vLLM engine loading"),
)


def make_snapshot(**fields: Any) -> Snapshot:
    base = Snapshot(name="demo-001", method="bapo", num_steps=120, batch_size=32, elapsed_s=118.0)
    return replace(base, **fields)


def drawn(content: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_failure_with_brackets_is_shown_as_it_is() -> None:
    status = replace(STATUS, step=5, assembled_step=4, failures_in_a_row=3, last_failure="verifier: [/b] in [tests]")
    text = "\n".join(drawn(render(make_snapshot(status=status), 120), 120))
    assert "3 groups failed in a row: verifier: [/b] in [tests]" in text


def plain_lines(snapshots: Sequence[Snapshot]) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    display = make_display(console)
    assert isinstance(display, LineDisplay)
    for snapshot in snapshots:
        display.show(snapshot)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_outside_a_terminal_each_event_is_one_line_whatever_its_length() -> None:
    ready = (STARTING[0], replace(STARTING[1], state="ready", seconds=41.0))
    lines = plain_lines(
        [
            make_snapshot(processes=STARTING),
            make_snapshot(processes=STARTING),
            make_snapshot(processes=ready),
            make_snapshot(processes=ready, evaluations=[make_evaluation("cd34", 1, 0.342)]),
            make_snapshot(processes=ready, evaluations=[make_evaluation("cd34", 1, 0.342)], metrics=[make_row(1)]),
            make_snapshot(processes=ready, metrics=[make_row(1), make_row(2)]),
        ]
    )
    assert lines == [
        "redis is ready after 0.1 s",
        "rollout_server is starting: vLLM engine loading",
        "rollout_server is ready after 41.0 s",
        "held-out cd34 at step 0: 34.2 % [32.2 %, 36.2 %] of 200 prompts",
        "step 1/120 reward=0.250 x1=18 x2=2 x3=6 groups=26/32 bad=31 high=44 staleness_x1=2 staleness_x2=0 "
        "staleness_x3=4 tokens_per_s=3.9k step_s=1.83 wait_batch_s=0.71",
        "step 2/120 reward=0.250 x1=18 x2=2 x3=6 groups=26/32 bad=31 high=44 staleness_x1=2 staleness_x2=0 "
        "staleness_x3=4 tokens_per_s=3.9k step_s=1.83 wait_batch_s=0.71 left=3:56",
    ]


def test_groups_that_wait_for_a_teacher_are_told_once_each_time_it_is_away() -> None:
    worker = WorkerStatus(
        worker_id="worker-0", state="ready", policy_version=3, tokens_per_s=900.0, inflight=4, restarts=0, pid=1,
        rss_bytes=1,
    )  # fmt: skip
    words = "4 groups are waiting for the teacher: no answer from http://gpu:8000/v1/completions"
    away, back = make_snapshot(workers=[replace(worker, waiting_for=words)]), make_snapshot(workers=[worker])
    assert plain_lines([back, away, away, back, away]) == [f"worker-0: {words}"] * 2
    assert words in " ".join(" ".join(drawn(render(away, 120), 120)).split())
    assert stall_reason(away, []) == f"worker-0: {words}"


def test_a_change_over_the_first_of_the_prompts_says_so() -> None:
    first = make_evaluation("cd34", 1, 0.5, num_prompts=4, rewards={"a": [0.0], "b": [0.0], "c": [1.0], "d": [1.0]})
    during = make_evaluation("cd34", 32, 0.5, num_prompts=2, rewards={"a": [0.0], "b": [1.0]})
    assert list(accuracies([first, during])) == ["cd34 0.0 % -> 50.0 % (step 31, first 2 prompts)"]
    whole = first | {"version": 32, "step": 31}
    assert list(accuracies([first, whole])) == ["cd34 50.0 % -> 50.0 % (step 31)"]


def test_a_wide_table_also_has_the_optimizer_and_the_interval_of_the_held_out_change() -> None:
    row = make_row(1, entropy=0.4321, grad_norm=1.25, kl=None, clip_ratio=0.0125, num_responses=8, num_truncated=2)
    before, after = {"a": [0.0, 0.0], "b": [0.0, 1.0]}, {"a": [0.0, 1.0], "b": [1.0, 1.0]}
    measured = [
        make_evaluation("cd4", version, accuracy, num_prompts=2, rewards=rewards)
        for version, accuracy, rewards in ((1, 0.25, before), (2, 0.75, after))
    ]
    snapshot = make_snapshot(metrics=[row], evaluations=measured)
    wide, narrow = ("\n".join(drawn(render(snapshot, width), width)) for width in (200, 159))
    assert "entropy grad clipped truncated" in wide
    assert "0.432 1.25  1.25 %    25.0 %" in wide
    assert "KL" not in wide  # this method has none
    assert "cd4 25.0 % -> 75.0 %: +50.0 [+50.0, +50.0] points (step 1)" in wide
    assert "entropy" not in narrow
    assert "cd4 25.0 % -> 75.0 % (step 1)" in narrow


def test_the_table_has_no_wider_line_than_its_terminal() -> None:
    row = make_row(1000, entropy=0.4, grad_norm=11.25, kl=0.0123, clip_ratio=0.1, lr=1e-6, update_s=120.5, sync_s=10.5)
    for width in (80, 100, 160, 200):
        snapshot = make_snapshot(metrics=[row | {"num_responses": 8, "num_truncated": 8}], num_steps=2000)
        header, line = drawn(render(snapshot, width), width)[2:4]
        assert header.startswith("step")
        assert line.startswith("1000")
        assert "…" not in header + line


def test_the_trained_model_is_compared_with_the_base_model_at_its_best_temperature() -> None:
    def row(split: str, version: int, temperature: float, rewards: tuple[float, float]) -> dict[str, Any]:
        found = {"rewards": {"p": [rewards[0]], "q": [rewards[1]]}, "accuracy": sum(rewards) / 2}
        return {"split": split, "version": version, "sampling": {"temperature": temperature}, **found}

    plain = [row("easy", 1, 1.0, (0.0, 0.0)), row("easy", 9, 1.0, (1.0, 0.5))]
    assert list(over_best_base(plain)) == []
    cooler = [row("easy@0.3", 1, 0.3, (0.5, 0.5)), row("easy@0.3", 9, 0.3, (1.0, 1.0))]
    (line,) = over_best_base([*plain, *cooler])
    assert line.startswith("easy: 75.0 % at temperature 1; before training at best 50.0 % at temperature 0.3: +25.0 [")


def test_the_observer_reads_on_where_it_was_and_notices_a_cut_file(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    observer = Observer(Config(), run)
    run.append_metrics(make_row(1))
    run.append_metrics(make_row(2))
    assert [row["step"] for row in observer.poll().metrics] == [1, 2]
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":3')
    assert [row["step"] for row in observer.poll().metrics] == [1, 2]
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b',"x1":1}\n')
    assert [row["step"] for row in observer.poll().metrics] == [1, 2, 3]
    run.truncate_after(1)
    for step in (2, 3, 4):
        run.append_metrics(make_row(step, x1=7))
    rows = observer.poll().metrics
    assert [(row["step"], row["x1"]) for row in rows] == [(1, 18), (2, 7), (3, 7), (4, 7)]


def start_of(run: RunDirectory, *, adds_records: bool = True) -> Session:
    display = make_display(Console(file=io.StringIO()))
    config = Config.model_validate({"buffer": {"port": 0}, "rollout": {"port": 0}})  # no service to ask
    return Session(config, run, display, Interrupts(), adds_records=adds_records)


def test_wall_time_is_that_of_all_starts_of_a_run(tmp_path: Path) -> None:
    """One that ended well, one whose launcher was killed, and a look at the buffer, which adds nothing."""
    run = RunDirectory.create(tmp_path / "run")
    run.update_run(started_at=1000.0, ended_at=1300.0, wall_s=300.0)
    with start_of(run):
        pass
    assert run.read_run()["wall_s"] == pytest.approx(300, abs=10)
    run.append_metrics(make_row(1) | {"time": 2060.0})
    run.update_run(started_at=2000.0, ended_at=None, wall_s=300.0)
    with start_of(run, adds_records=False):
        assert run.read_run()["wall_s"] == 360.0
    assert run.read_run()["wall_s"] == 360.0


COUNTERS = {
    "pushed_groups:stored": 382, "failed_groups:verifier_timeout": 17, "failed_groups:verifier_error": 1,
    "dropped_groups:stale": 3,
}  # fmt: skip


def test_what_bapo_eval_measures_is_of_no_step_and_named_as_an_average() -> None:
    processes = tuple(replace(STARTING[0], name=name, state="ready") for name in ("rollout_server", "evaluator"))
    row = make_evaluation("cd34", 1, 0.342)
    snapshot = make_snapshot(processes=processes, evaluations=[row])
    assert plain_lines([snapshot])[-1] == "held-out cd34: avg@2 34.2 % [32.2 %, 36.2 %] of 200 prompts"
    assert "step 0" not in " ".join(drawn(render(snapshot, 120), 120))
    training = replace(snapshot, processes=(*processes, replace(processes[0], name="scheduler")))
    assert "cd34 at step 0: 34.2 %" in plain_lines([training])[-1]


def test_nearly_empty_batches_are_named_with_what_to_do() -> None:
    rows = [make_row(step, x1=2, x2=0, x3=0, reward_mean=0.95) for step in range(1, 6)]
    ((kind, sentence),) = losses({}, rows)
    assert kind == "batches"
    assert sentence in " ".join(" ".join(drawn(render(make_snapshot(metrics=rows), 160), 160)).split())


LOST = (
    ("verifiers", "failed to grade 18 of 400 groups (4.5 %), most often verifier_timeout (17)"),
    ("dropped", "3 of 400 groups (0.8 %), most often stale (3)"),
    ("truncated", "2 of 64 responses (3.1 %), by rollout.max_response_tokens"),
)


TRUNCATED = [make_row(1, num_responses=32, num_truncated=2), make_row(2, num_responses=32, num_truncated=0)]


def test_the_limits_of_a_run_of_agents_are_both_named() -> None:
    ((_, sentence),) = losses({}, [make_row(1, num_responses=4, num_truncated=1, num_episodes=4)])
    assert sentence == "1 of 4 responses (25.0 %), by rollout.max_response_tokens or agents.max_tokens"


def test_what_a_run_loses_is_in_the_table_once_among_the_lines_and_in_the_summary(tmp_path: Path) -> None:
    snapshot = make_snapshot(metrics=TRUNCATED, counters=COUNTERS)
    table = "\n".join(drawn(render(snapshot, 120), 120))
    output = io.StringIO()
    display = LineDisplay(Console(file=output, width=400))
    for _ in range(2):
        display.show(snapshot)
    run = RunDirectory.create(tmp_path / "run")
    run.update_run(counters=COUNTERS)
    for row in TRUNCATED:
        run.append_metrics(row)
    ended = "\n".join(drawn(summary(run, Config()), 400))
    for what, sentence in LOST:
        assert sentence in table
        assert output.getvalue().count(f"{what}: {sentence}") == 1
        assert sentence in ended
    assert not list(losses({"pushed_groups:stored": 5}, [make_row(1, num_responses=8, num_truncated=0)]))


def test_the_solution_of_an_expert_is_no_sampled_response_of_the_summary(tmp_path: Path) -> None:
    # Two groups of LUFFY with an expert's row among 4, and one without: 3 + 3 + 4 responses.
    with_expert = [replace(result(p, "1001", step=1), outcomes=bytes([0, 0, 0, Outcome.EXPERT])) for p in "ab"]
    run = write_run(tmp_path / "luffy-s1", preset="grpo", groups={1: with_expert, 2: [result("c", "1001", step=2)]})
    assert "10 responses in 3 groups for training" in "\n".join(
        drawn(summary(run, load_resolved(run.config_path)), 120)
    )


def left_out(step: int, num: int, **reasons: int) -> dict[str, Any]:
    trained = num - sum(reasons.values())
    return make_row(
        step,
        num_responses=32,
        num_truncated=0,
        num_informative=num,
        num_informative_trained=trained,
        informative_left_out=reasons,
    )


def test_a_run_in_which_most_groups_with_different_rewards_do_not_train_says_so() -> None:
    rows = [left_out(1, 10, filtered=9), left_out(2, 10, filtered=1, still_hard=2)]
    ((kind, sentence),) = losses({}, rows)
    assert kind == "untrained"
    assert sentence.startswith("12 of 20 groups whose rewards differ did not train in the last 2 steps")
    assert "(10 filtered, 2 still_hard)" in sentence
    assert "algorithm.online_filter" in sentence
    assert sentence in "\n".join(drawn(render(make_snapshot(metrics=rows), 200), 200))


@pytest.mark.parametrize(
    "rows",
    [
        [left_out(1, 20, filtered=10)],  # half of them trained
        [left_out(1, 15, filtered=15)],  # too few to say
        [left_out(1, 1000, filtered=1000), *(left_out(step, 2, filtered=1) for step in range(2, 22))],  # long ago
        [make_row(1, num_responses=32, num_truncated=0)],  # of an earlier version
    ],
)
def test_a_run_that_trains_on_its_signal_is_not_warned(rows: list[dict[str, Any]]) -> None:
    assert "untrained" not in dict(losses({}, rows))


def test_a_failed_grading_is_told_with_prompt_row_and_exception(tmp_path: Path) -> None:
    failure = "verifier_timeout: the reward 'mine.score' raised KeyError: 'x' on prompt p7 (data.jsonl row 7)"
    last = f"; the last: {failure.partition(': ')[2]}; all: logs/worker-*.log"
    found = dict(losses(COUNTERS, [], failure))
    assert found["verifiers"].endswith(f"most often verifier_timeout (17){last}")
    assert "KeyError" not in found["dropped"]  # another kind of loss
    run = RunDirectory.create(tmp_path / "run")
    run.update_run(counters=COUNTERS, last_failure=failure)
    assert dict(losses_of(run))["verifiers"].endswith(last)


def test_a_group_whose_agents_failed_points_to_the_log_that_has_them() -> None:
    counters = {"failed_groups:episode_ungraded": 2}
    found = dict(losses(counters, [], "episode_ungraded: episode 0 failed 3 times; the last time: KeyError: 'value'"))
    assert found["failed"].endswith("the last time: KeyError: 'value'; all: logs/rollout_server.log")


def test_the_live_table_shows_the_episodes_of_agents_and_why_attempts_failed() -> None:
    agents = AgentsStatus(base_url="http://here/v1", num_open=12, num_waiting=4, failed={"silent": 1, "ungraded": 2},
                          last_failure="ungraded: [/b] KeyError: 'value'")  # fmt: skip
    text = "\n".join(drawn(render(make_snapshot(agents=agents), 160), 160))
    assert (
        "12 episodes open, 4 waiting; failed attempts: 2 ungraded, 1 silent; the last: ungraded: [/b] KeyError" in text
    )
    waits = AgentsStatus(base_url="http://here/v1", num_open=0, num_waiting=4, failed={})
    snapshot = make_snapshot(agents=waits, waits_for_agents="bapo agent outputs/mine -- PROGRAM")
    text = "\n".join(drawn(render(snapshot, 160), 160))
    assert "4 episodes wait for an agent: bapo agent outputs/mine -- PROGRAM (address http://here/v1)" in text
    assert "4 episodes wait for an agent" in stall_reason(snapshot, [])


def test_the_counters_of_the_buffer_outlive_the_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    with start_of(run) as session:
        session._observer._counters = COUNTERS
        session._find_services = lambda: None  # type: ignore[method-assign]
        session.watch(lambda: True)
    assert run.read_run()["counters"] == COUNTERS
    assert Observer(Config(), run).poll().counters == COUNTERS


def test_a_run_that_did_not_finish_says_what_it_lost(tmp_path: Path) -> None:
    run, text = RunDirectory.create(tmp_path / "run"), io.StringIO()
    run.update_run(counters={"pushed_groups:stored": 6, "failed_groups:verifier_timeout": 2})
    assert _end(run, Console(file=text), 130, "interrupted", "stopped by the user") == 130
    assert text.getvalue().splitlines() == [
        "verifiers: failed to grade 2 of 8 groups (25.0 %), most often verifier_timeout (2)",
        "stopped by the user",
    ]
