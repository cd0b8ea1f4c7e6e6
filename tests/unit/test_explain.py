"""One sentence per prompt and step, with the inequality that decided it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bapo.algorithms
from bapo.algorithms.composer import Reason
from bapo.cli import app
from bapo.config.tree import Config
from bapo.errors import ConfigError, ContractError
from bapo.types import Fate, Origin
from bapo.whatif.clauses import Case, clause
from bapo.whatif.explanation import explain, find_prompt
from bapo.whatif.reasons import meanings
from bapo.whatif.recording import Recording, read_recording
from bapo.whatif.simulation import as_recorded
from tests.whatif_setup import again_fate, fresh_fate, recording_of, trace_config, trace_fates, write_trace

WORDS = sorted(value for name, value in vars(Reason).items() if name.isupper())


@pytest.fixture
def trace() -> Recording:
    """All four steps of V10."""
    return recording_of([trace_fates(step) for step in (1, 2, 3, 4)])


def sentence(recording: Recording, prompt: str, step: int) -> str:
    return explain(recording, as_recorded(recording), prompt, step).sentence


def told(steps: Sequence[Sequence[Fate]], prompt: str, config: Config | None = None) -> str:
    """About the last of these steps."""
    return sentence(recording_of(steps, config), prompt, len(steps))


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


def test_a_stored_group_outside_the_window_or_too_old_says_so(trace: Recording) -> None:
    narrow = trace_config(threshold_schedule="eq8", c2_range=(1 / 8, 4 / 8), c3_range=(2 / 8, 5 / 8))
    steps = [
        [fresh_fate("a", 3, 1, "informative", Origin.X1), fresh_fate("b", 4, 1, "informative", Origin.X1)],
        [fresh_fate("c", 1, 2, "informative", Origin.X1)],
    ]
    # Step 1: r_tot = 7/16, so [c2, c3] = [0.289, 0.414] takes a; step 2: r_tot = 1/8, so [0.172, 0.297] does not.
    assert told(steps, "a", narrow).endswith(
        "in B_high since 1 with mu = 0.375, outside [c2 = 0.1719, c3 = 0.2969] (k = 3 of 8)"
    )
    off = trace_config(use_x3=False)
    assert told([steps[0], [fresh_fate("c", 1, 2, "informative", Origin.X1)]], "b", off).endswith("but use_x3 = false")


def test_an_answer_that_is_still_on_its_way_is_told() -> None:
    steps = [
        [fresh_fate("a", 0, 1, "all_wrong"), fresh_fate("b", 4, 1, "informative", Origin.X1)],
        [fresh_fate("c", 4, 2, "informative", Origin.X1)],
        [fresh_fate("e", 4, 3, "informative", Origin.X1), again_fate("a", 2, 3, "improved", Origin.X2, asked=2)],
    ]
    recording = recording_of(steps)
    assert sentence(recording, "a", 2).endswith("it was asked again, but its group arrived for step 3")
    assert "(asked in step 2, arrived for step 3): c1 = 0.125 < mu' = 0.25 < 1" in sentence(recording, "a", 3)


def test_an_improved_prompt_without_room_is_told_with_b_and_its_rivals() -> None:
    full = trace_config(batch_size=3)
    config = full.model_copy(update={"learner": full.learner.model_copy(update={"minibatch_size": 3})})
    steps = [
        [fresh_fate(p, 0, 1, "all_wrong") for p in "abc"],
        [
            *(fresh_fate(p, 4, 2, "informative", Origin.X1) for p in "def"),
            again_fate("a", 3, 2, "no_room"),
            again_fate("b", 3, 2, "no_room"),
        ],
    ]
    assert "but not drawn: room 0 (B = 3 less |X1| = 3), candidates 2; it stays in B_bad" in told(steps, "a", config)


@pytest.mark.parametrize(
    ("online_filter", "want"),
    [
        ("gaussian", "the gaussian filter keeps it with p(mu = 0.25) = 0.4578 and its draw said no"),
        ("gaussian_quota", "the gaussian_quota filter had drawn the quota of its level without it"),
        ("uniform", "the uniform filter keeps a share of 0.6 and did not draw it"),
    ],
)
def test_each_filter_says_how_it_left_out_a_group_with_signal(online_filter: str, want: str) -> None:
    left_out = fresh_fate("a", 2, 1, "filtered")
    assert want in told([[left_out]], "a", trace_config(online_filter=online_filter))


@pytest.mark.parametrize(
    ("fates", "want"),
    [
        ([replace(fresh_fate("a", 0, 1, "no_variance"), rewards=(0.5,) * 8)],
         "all 8 rewards of its fresh group were 0.5, so every advantage would be 0"),
        ([replace(again_fate("a", 0, 1, "no_variance"), rewards=(0.5,) * 8), fresh_fate("b", 4, 1, "informative")],
         "but all 8 rewards of its new group were 0.5, so every advantage would be 0; it stays in B_bad"),
        ([replace(fresh_fate("a", 4, 1, "stale"), policy_version=-6), fresh_fate("b", 4, 1, "informative")],
         "sampled at version -6: 1 - -6 = 7 > 2 = cadence.max_staleness; it was dropped and its prompt asked again"),
        ([again_fate("a", 3, 1, "left_bad"), fresh_fate("b", 4, 1, "informative")],
         "with k = 3 of 8, but when it arrived its prompt was not in B_bad any more: it had been trained, solved or "
         "pushed out meanwhile"),
        ([fresh_fate("a", 4, 1, "informative"), replace(fresh_fate("a", 4, 1, "duplicate_prompt"), group_id="z")],
         "its fresh group z came behind another fresh group of the same prompt"),
    ],
)  # fmt: skip
def test_rarer_reasons_are_told_too(fates: list[Fate], want: str) -> None:
    assert want in told([fates], "a")


def test_a_group_that_the_ablation_does_not_use_says_so() -> None:
    steps = [[fresh_fate("b", 4, 1, "informative", Origin.X1), again_fate("a", 3, 1, "not_used")]]
    assert told(steps, "a", trace_config(use_x2=False)).endswith("with k = 3 of 8, but use_x2 = false")
    assert told(steps, "a", trace_config(name="grpo")).endswith("with k = 3 of 8, but the composer grpo has no X2")


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_a_meaning_and_a_clause(word: str, trace: Recording) -> None:
    assert meanings("bapo")[word]
    state = as_recorded(trace)[1]
    assert len(clause(Case(config=trace.config, step=state, fate=again_fate("a", 3, 2, word)))) > 20


def test_a_composer_brings_words_of_its_own_and_their_docstrings_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Recording
) -> None:
    (tmp_path / "lucky.py").write_text(
        'class Words:\n    TOO_LATE = "too_late"\n    """Came after\n    the bell."""\n\n'
        'CHANCE = "chance"\n"""Drawn."""\n'
    )
    monkeypatch.setattr(bapo.algorithms, "__path__", [*bapo.algorithms.__path__, str(tmp_path)])
    assert (meanings("lucky")["too_late"], meanings("lucky")["chance"]) == ("Came after the bell.", "Drawn.")
    settings = trace.config.algorithm.model_copy(update={"name": "lucky"})
    config = trace.config.model_copy(update={"algorithm": settings})
    case = Case(config=config, step=as_recorded(trace)[0], fate=fresh_fate("a", 3, 1, "too_late"))
    assert clause(case) == "its fresh group had k = 3 of 8 and is 'too_late' for lucky: Came after the bell"


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


def test_a_step_without_groups_is_damaged_records(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    run.write_groups(2, [])
    with pytest.raises(ContractError, match=r"the group records of step 2 of run .* lack groups"):
        read_recording(run)
