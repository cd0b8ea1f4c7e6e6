"""One scripted run of the whole pipeline, and everything that is asked of a finished run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bapo.config.load import load_resolved
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.browser import visiting
from tests.support.dashboard import opened, values, viewed
from tests.support.launch import START_S, alive, family, kill_family, run_at, start, train_arguments, wait_for_step

NUM_STEPS = 8
PARTS = {"redis", "buffer_service", "rollout_server", "learner", "scheduler", "evaluator"}


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and what was seen of it from outside."""

    run: RunDirectory
    output: str
    command_lines: list[str]
    secrets: list[str]
    left: list[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Eight steps with re-evaluations and evaluations, checkpoints after 4 and 8; every batch is kept."""
    tmp_path = tmp_path_factory.mktemp("shared")
    run = run_at(tmp_path)
    overrides = ("--checkpoint.every", "4", "--evaluation.every", "4")
    process = start(train_arguments(tmp_path, *overrides, num_steps=NUM_STEPS))
    try:
        wait_for_step(run, 1, process)
        members = family(process)
        secrets, command_lines = secrets_of(run), [" ".join(member.cmdline()) for member in members]
        output, _ = process.communicate(timeout=START_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    return Finished(run, output, command_lines, secrets, alive(members))


def secrets_of(run: RunDirectory) -> list[str]:
    """The tokens of the six roles and the password of the embedded Redis."""
    tokens = [path.read_text().strip() for path in (run.path / "tokens").glob("*/token")]
    config = (run.redis_path / "redis.conf").read_text()
    return [*tokens, config.partition("requirepass ")[2].split()[0]]


def readable_by_others(run: RunDirectory) -> Iterator[str]:
    """Every file of the run directory that somebody else than its owner can read."""
    for path in run.path.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077 and run.redis_path not in path.parents:
            yield path.read_bytes().decode("latin-1")


def ask(*arguments: str, code: int = 0) -> str:
    """The output of a `bapo` command."""
    process = start(arguments)
    try:
        output, _ = process.communicate(timeout=START_S)
    finally:
        kill_family(process)
    assert process.returncode == code, output
    return output


def test_everything_is_on_disk_and_nothing_is_left_running(finished: Finished) -> None:
    run = finished.run
    assert finished.left == []
    assert [row["step"] for row in run.read_metrics()] == run.group_steps() == list(range(1, NUM_STEPS + 1))
    assert all(row["x1"] + row["x2"] + row["x3"] <= 8 for row in run.read_metrics())
    fresh = [result for _, results in run.read_groups() for result in results if result.group_id.startswith("fresh-")]
    assert {result.group_id for result in fresh} == {f"fresh-{i:08d}" for i in range(8 * NUM_STEPS)}
    measured = {(row["split"], row["version"]) for row in run.read_evaluations()}
    assert {("cd34", 1), ("cd4", 1), ("cd34", 9), ("cd4", 9)} <= measured
    assert run.checkpoint_steps()[-1] == NUM_STEPS
    assert run.report_path.exists()
    assert load_resolved(run.config_path).algorithm.batch_size == 8
    fields = run.read_run()
    assert (fields["status"], fields["exit_code"], set(fields["processes"])) == ("finished", 0, PARTS)
    assert all(run.log_path(name).exists() for name in PARTS)
    assert "run is finished" in finished.output


def test_no_secret_is_printed_passed_or_left_readable(finished: Finished) -> None:
    assert len(finished.secrets) == len(Role) + 1, "and the password of Redis"
    for text in (finished.output, *finished.command_lines, *readable_by_others(finished.run)):
        assert not [secret for secret in finished.secrets if secret in text], text[:200]


def test_its_records_give_its_batches_exactly(finished: Finished) -> None:
    output = ask("simulate", str(finished.run.path))
    assert f"reproduces the recorded batches: {NUM_STEPS} of {NUM_STEPS} steps" in output
    results = [result for _, step in finished.run.read_groups() for result in step]
    assert any(result.purpose.value == "reevaluate" for result in results), "the run had nothing to reproduce"
    assert any(result.reason == "reused" for result in results)


def test_each_group_of_a_step_is_explained(finished: Finished) -> None:
    [(step, results)] = [row for row in finished.run.read_groups() if row[0] == NUM_STEPS]
    lines = ask("explain", str(finished.run.path), "all", str(step)).splitlines()
    assert len(lines) == len({result.prompt_id for result in results})
    told = {line.split()[1] for line in lines if f" was in batch {step} as X" in line}
    assert told == {result.prompt_id for result in results if result.origin is not None}


def test_a_step_replayed_in_another_process_is_the_same_to_the_last_bit(finished: Finished) -> None:
    output = ask("replay", str(finished.run.path), "--step", str(NUM_STEPS), "--json")
    found = json.loads(output[output.index("\n{") + 1 :] if not output.startswith("{") else output)
    assert (found["start"], found["exact"], found["weights_differ_by"]) == (4, True, 0.0)
    assert [step["step"] for step in found["steps"]] == [5, 6, 7, 8]


def test_a_step_that_was_not_kept_is_refused(finished: Finished) -> None:
    assert "replayable steps: 1-8" in ask("replay", str(finished.run.path), "--step", "9", code=2)


def test_the_page_shows_its_numbers(finished: Finished, browser: Any) -> None:
    with viewed(finished.run) as url, visiting(browser, url) as visit:
        opened(visit, NUM_STEPS)
        assert values(visit, "composition", "X1 fresh") == [row["x1"] for row in finished.run.read_metrics()]
        assert visit.complaints == []
