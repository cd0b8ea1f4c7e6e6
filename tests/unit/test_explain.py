"""One sentence per prompt and step, with the inequality that decided it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.analysis.whatif.explanation import explain, find_prompt
from bapo.analysis.whatif.recording import Recording
from bapo.analysis.whatif.simulation import as_recorded
from bapo.cli.app import app
from bapo.core.errors import ConfigError
from tests.support.whatif import fresh_fate, recording_of, trace_fates, write_trace


@pytest.fixture
def trace() -> Recording:
    """All four steps of V10."""
    return recording_of([trace_fates(step) for step in (1, 2, 3, 4)])


def sentence(recording: Recording, prompt: str, step: int) -> str:
    return explain(recording, as_recorded(recording), prompt, step).sentence


@pytest.mark.parametrize(
    ("prompt", "step", "want"),
    [
        ("b", 1, "was in batch 1 as X1: its fresh group had k = 2 of 8, and the range filter needs 1 <= k <= 7; "
                 "it entered B_high (c2 = 0.25 <= mu = 0.25 <= c3 = 0.5)"),
        ("a", 1, "was not in batch 1: its fresh group had k = 0 of 8, and the range filter needs 1 <= k <= 7; "
                 "it entered B_bad (mu = 0 <= c1 = 0.125)"),
        ("c", 1, "was not in batch 1: its fresh group had k = 8 of 8, and the range filter needs 1 <= k <= 7"),
        ("a", 2, "was in batch 2 as X2: it was re-evaluated (asked in step 2): c1 = 0.125 < mu' = 0.375 < 1"),
        ("d", 2, "was not in batch 2: it was re-evaluated (asked in step 2): mu' = 0.125 <= c1 = 0.125, so it stays in "
                 "B_bad"),
        ("h", 4, "was not in batch 4: it was re-evaluated (asked in step 4): mu' = 1, so nothing is left to learn and "
                 "it leaves B_bad"),
        ("b", 2, "was in batch 2 as X3: its stored group of step 1 (k = 2 of 8) was drawn from B_high: "
                 "c2 = 0.25 <= mu = 0.25 <= c3 = 0.5, room 4, candidates 2"),
        ("g", 3, "was not in batch 3: it was not among the fresh prompts of step 3; in B_bad since 2 with mu = 0 <= "
                 "c1 = 0.125, and step 3 is no round of re-evaluation (3 mod 2 = 1)"),
        ("d", 3, "was not in batch 3: it was not among the fresh prompts of step 3; in B_bad since 1 with mu = 0.125 "
                 "<= c1 = 0.125, once re-evaluated without success, and step 3 is no round of re-evaluation "
                 "(3 mod 2 = 1)"),
        ("f", 2, "was not in batch 2: it was not among the fresh prompts of step 2; it was in neither B_bad nor "
                 "B_high; assemblies looked at it once, last in 1"),
    ],
)  # fmt: skip
def test_each_prompt_of_the_trace_is_told_with_its_inequality(
    trace: Recording, prompt: str, step: int, want: str
) -> None:
    assert sentence(trace, prompt, step) == f"prompt {prompt} {want}"


def test_a_candidate_of_x3_that_was_not_drawn_is_told_with_room_and_candidates(trace: Recording) -> None:
    replayed = as_recorded(trace)
    left = next(p for p in "bejmq" if p not in {name[-1] for name in replayed[3].decision.x3})
    born, mu = {"b": (1, 0.25), "e": (1, 0.5), "j": (2, 0.375), "m": (3, 0.5), "q": (3, 0.25)}[left]
    found = explain(trace, replayed, left, 4)
    assert (found.origin, found.reasons) == (None, ())
    assert found.sentence.endswith(
        f"in B_high since {born} with mu = {mu} in [c2 = 0.25, c3 = 0.5], but not drawn: room 3, candidates 5"
    )


def test_a_prompt_is_found_by_its_beginning_when_that_is_unique() -> None:
    recording = recording_of([[fresh_fate(p, 4, 1, "informative") for p in ("ab12", "ab34", "cd56")]])
    assert (find_prompt(recording, "cd"), find_prompt(recording, "ab12")) == ("cd56", "ab12")
    with pytest.raises(ConfigError, match="2 prompts of run trace begin with 'ab': ab12, ab34; write more of it"):
        find_prompt(recording, "ab")
    with pytest.raises(ConfigError, match=r"did you mean 'cd56'\?\); `bapo explain RUN all STEP`"):
        find_prompt(recording, "cd65")


def test_the_command_explains_one_prompt_or_all_of_a_step(tmp_path: Path) -> None:
    run = str(write_trace(tmp_path / "trace").path)
    one = CliRunner().invoke(app, ["explain", run, "j", "2"])
    assert one.output.startswith("prompt j was in batch 2 as X1: its fresh group had k = 3 of 8")
    every = CliRunner().invoke(app, ["explain", run, "all", "2"])
    assert [line.split()[1] for line in every.output.splitlines()] == list("ghijkladbe")
    as_json = json.loads(CliRunner().invoke(app, ["explain", run, "j", "2", "--json"]).output)
    assert (as_json["origin"], as_json["reasons"], as_json["tables_are_exact"]) == ("x1", ["informative"], True)
    error = CliRunner().invoke(app, ["explain", run, "j", "9"]).exception
    assert "records of steps 1 to 3, none of step 9" in str(error)


def test_a_replay_that_differs_from_the_run_is_not_hidden(tmp_path: Path) -> None:
    # Without its re-used groups the second step is not what the composer makes of the records.
    run = write_trace(tmp_path / "trace", fates={2: [fate for fate in trace_fates(2) if fate.reason != "reused"]})
    output = CliRunner().invoke(app, ["explain", str(run.path), "m", "3"]).output
    assert "the replay of the records differs from the run since step 2" in output
    assert "differs" not in CliRunner().invoke(app, ["explain", str(run.path), "b", "1"]).output


def test_what_somebody_wrote_into_the_records_is_no_command_for_the_terminal(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    ((step, fates),) = run.read_groups([2])
    run.write_groups(step, [replace(fate, reason="\x1b]0;mine\x07" + fate.reason) for fate in fates])
    for command in (["explain", str(run.path), "all", "2"], ["simulate", str(run.path)]):
        output = CliRunner().invoke(app, command).output
        assert "\x1b" not in output
        assert "\\x1b]0;mine" in output, command
