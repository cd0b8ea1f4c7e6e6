"""Questions to a run of the real pipeline: its records give its batches again, and its steps can be repeated."""

from __future__ import annotations

import json

import pytest

from bapo.records import RunDirectory
from tests.launching import kill_family, start, train_arguments

RUN_S = 180.0
"""Ray and torch on two shared cores, and a start of torch for each replay."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Eight steps with re-evaluations, checkpoints after 4 and 8; three may stay, so every batch is kept."""
    tmp_path = tmp_path_factory.mktemp("recorded")
    process = start(train_arguments(tmp_path, "--checkpoint.every", "4", "--evaluation.every", "0", num_steps=8))
    try:
        output, _ = process.communicate(timeout=RUN_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    return RunDirectory(tmp_path / "outputs" / "run")


def ask(*arguments: str) -> str:
    process = start(arguments)
    try:
        output, _ = process.communicate(timeout=RUN_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    return output


def document(output: str) -> dict[str, object]:
    """The JSON behind the log lines."""
    found = json.loads(output[output.index("\n{") + 1 :] if not output.startswith("{") else output)
    assert isinstance(found, dict)
    return found


def test_the_records_of_a_real_run_give_its_batches_exactly(run: RunDirectory) -> None:
    output = ask("simulate", str(run.path))
    assert "reproduces the recorded batches: 8 of 8 steps" in output
    fates = [fate for _, step in run.read_groups() for fate in step]
    assert any(fate.purpose.value == "reevaluate" for fate in fates)  # the run had something to reproduce
    assert any(fate.reason == "reused" for fate in fates)


def test_every_group_of_a_real_run_has_its_sentence(run: RunDirectory) -> None:
    for step, fates in run.read_groups():
        lines = ask("explain", str(run.path), "all", str(step)).splitlines()
        assert len(lines) == len({fate.prompt_id for fate in fates})
        told = {line.split()[1] for line in lines if f" was in batch {step} as X" in line}
        assert told == {fate.prompt_id for fate in fates if fate.origin is not None}


def test_a_step_in_another_process_is_the_same_to_the_last_bit(run: RunDirectory) -> None:
    found = document(ask("replay", str(run.path), "--step", "8", "--json"))
    assert (found["start"], found["exact"], found["weights_differ_by"]) == (4, True, 0.0)
    assert [step["step"] for step in found["steps"]] == [5, 6, 7, 8]  # type: ignore[attr-defined]


def test_a_step_that_was_not_kept_is_refused_at_once(run: RunDirectory) -> None:
    process = start(["replay", str(run.path), "--step", "9"])
    output, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 2
    assert "cannot be repeated: its batch is not kept; steps that can: 1-8" in output
