"""A recorded run again: the same settings give the same batches, others give those that the rules say (V10)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.analysis.whatif.recording import Recording, read_recording
from bapo.analysis.whatif.simulation import SimulatedStep, Source, as_recorded, compare, what_if
from bapo.cli.app import app
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.types import Origin
from tests.support.whatif import BATCHES, fresh_fate, recording_of, trace_config, trace_fates, write_trace


@pytest.fixture
def trace() -> Recording:
    """All four steps of V10."""
    return recording_of([trace_fates(step) for step in (1, 2, 3, 4)])


def changed(cadence_m: int = 2, **algorithm: object) -> Config:
    config = trace_config(**algorithm)
    return config.model_copy(update={"cadence": config.cadence.model_copy(update={"m": cadence_m})})


def prompts(step: SimulatedStep, origin: Origin) -> str:
    """ "fresh-1-b", "reevaluate-000002-a@4" -> "ba"."""
    return "".join(group_id.split("@")[0].rpartition("-")[2] for group_id in step.batch[origin])


def hard(step: SimulatedStep) -> str:
    return "".join(entry.prompt_id for entry in step.decision.bad)


def test_the_records_alone_give_the_batches_of_the_trace(trace: Recording) -> None:
    for step, (x1, x2, x3) in zip(as_recorded(trace), BATCHES, strict=True):
        assert (prompts(step, Origin.X1), prompts(step, Origin.X2)) == (x1, x2)
        if x3 is not None:
            assert prompts(step, Origin.X3) == x3


def test_what_a_run_wrote_is_reproduced_exactly(tmp_path: Path) -> None:
    recording = read_recording(write_trace(tmp_path / "trace"))
    found = compare(recording, as_recorded(recording))
    assert (found.exact, found.sentence) == (True, "reproduces the recorded batches: 3 of 3 steps")


def test_the_first_step_that_comes_out_otherwise_is_named(trace: Recording) -> None:
    # The records of step 4 lack its three reused groups.
    found = compare(trace, as_recorded(trace))
    assert (found.num_same, found.num_steps, found.exact) == (3, 4, False)
    assert found.first is not None
    assert found.first[0] == 4
    assert "X3 has 0 groups recorded, fresh-" in found.first[1]


def test_the_same_settings_give_the_same_batches_through_the_simulated_rounds(trace: Recording) -> None:
    simulated = what_if(trace, trace.config, within=10)
    assert [step.decision for step in simulated] == [step.decision for step in as_recorded(trace)]
    assert sum((step.answers for step in simulated), Counter()) == {Source.RECORDED: 6}


def test_a_higher_c1_asks_a_prompt_whose_answer_nobody_knows(trace: Recording) -> None:
    first, second, *_ = what_if(trace, changed(c1=2 / 8), within=10)
    assert hard(first) == "abd"  # b has k = 2 <= 2
    # a comes back with k' = 3 > 2 and d with k' = 1; b was never sampled again.
    assert (prompts(second, Origin.X2), hard(second)) == ("a", "bdgh")
    assert second.answers == {Source.RECORDED: 2, Source.UNKNOWN: 1}


def test_the_nearest_later_group_of_a_prompt_stands_in_for_its_answer() -> None:
    late = fresh_fate("b", 6, 3, "informative", Origin.X1)
    steps = [trace_fates(1), trace_fates(2), [late, *trace_fates(3)[1:]]]
    _, second, third = what_if(recording_of(steps), changed(c1=2 / 8), within=1)
    # b at version 3 is one step from the round of step 2: k' = 6 improves.
    assert (prompts(second, Origin.X2), hard(second)) == ("ab", "dgh")
    assert second.answers == {Source.RECORDED: 2, Source.BORROWED: 1}
    assert third.batch[Origin.X1][0] == late.group_id  # it also is what it was: a fresh group of step 3
    _, without, _ = what_if(recording_of(steps), changed(c1=2 / 8), within=0)
    assert without.answers == {Source.RECORDED: 2, Source.UNKNOWN: 1}


def test_a_group_that_was_there_before_the_prompt_became_hard_never_stands_in(trace: Recording) -> None:
    # Its own fresh group made b hard at step 1 and lies nearest: taking it would keep b hard for ever.
    _, second, *_ = what_if(trace, changed(c1=2 / 8), within=100)
    assert second.answers[Source.BORROWED] == 0


def test_a_longer_period_asks_later_and_borrows_what_the_earlier_round_gave(trace: Recording) -> None:
    steps = what_if(trace, changed(4, max_reevaluated=5), within=2)
    assert [prompts(step, Origin.X2) for step in steps] == ["", "", "", "adn"]
    assert hard(steps[2]) == "adghn"
    assert steps[3].answers == {Source.RECORDED: 4, Source.BORROWED: 1}  # a, sampled at version 2
    assert hard(steps[3]) == "gv"


def test_the_window_and_the_ablations_change_what_is_reused(trace: Recording) -> None:
    wider = what_if(trace, changed(c3_range=(7 / 8, 7 / 8)), within=10)
    assert prompts(wider[1], Origin.X3) == "bef"  # f has k = 7
    assert [prompts(step, Origin.X3) for step in what_if(trace, changed(use_x3=False), within=10)] == [""] * 4
    assert [prompts(step, Origin.X2) for step in what_if(trace, changed(use_x2=False), within=10)] == [""] * 4


def test_another_composer_may_be_asked_too(trace: Recording) -> None:
    steps = what_if(trace, changed(name="grpo", online_filter="none"), within=10)
    assert [prompts(step, Origin.X1) for step in steps] == ["abcdef", "ghijkl", "mnopqr", "suvwxy"]
    assert all(not step.answers for step in steps)


def test_records_with_a_gap_are_refused(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    (run.path / "groups" / "step-000002.parquet").unlink()
    with pytest.raises(ConfigError, match="no group records of step 2"):
        read_recording(run)
    for path in (run.path / "groups").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no group records yet"):
        read_recording(run)


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_takes_settings_by_short_and_by_full_name(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    output = run_command(
        "simulate",
        str(run.path),
        "--c1",
        "0.25",
        "--c3",
        "0.25,0.5",
        "--algorithm.use_x3",
        "false",
    )
    for change in ("algorithm.c1: 0.125 -> 0.25", "algorithm.c3_range: [0.5, 0.5] -> [0.25, 0.5]", "algorithm.use_x3"):
        assert f"with {change}" in output
    assert "2 as recorded, 0 from the prompt's nearest recorded group, 1 unknown" in output
