"""What-if on V10: the history of each prompt, a sentence for each decision, and the run again with other settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bapo.algorithms.composer import Reason, Word
from bapo.cli.app import app
from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.types import GroupResult, Origin, Outcome, Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.recording import RecordedStep, Recording, read_recording
from bapo.whatif.explanation import explain, find_prompt, meanings
from bapo.whatif.simulation import SimulatedStep, Source, as_recorded, compare, what_if
from services.dashboard.history import History
from tests.support.factories import make_result

G = 8
FRESH = [
    {"a": 0, "b": 2, "c": 8, "d": 1, "e": 4, "f": 7},
    {"g": 0, "h": 0, "i": 8, "j": 3, "k": 8, "l": 8},
    {"m": 4, "n": 0, "o": 8, "p": 8, "q": 2, "r": 6},
    {"s": 8, "u": 8, "v": 0, "w": 5, "x": 8, "y": 8},
]
"""V10: prompt -> right answers of its fresh group, step by step."""
AGAIN = [{}, {"a": 3, "d": 1}, {}, {"d": 2, "g": 0, "h": 8, "n": 5}]
"""V10: the same of the re-evaluations, whose groups arrive in the step that asked."""
BATCHES = [("bdef", "", ""), ("j", "a", "be"), ("mqr", "", "bej"), ("w", "dn", None)]
"""V10: prompts of X1, X2, X3; the last X3 is a draw of 3 from bejmq, and not recorded here."""
R_TOT = [22 / 48, 27 / 48, 28 / 48, 37 / 48]
TABLES = [(2, 2), (3, 3), (4, 5), (2, 3)]
"""V10: sizes of B_bad and B_high after each step."""


def trace_config(**algorithm: Any) -> Config:
    """The settings of V10: v = m = 2, M = 4, S = 3, c1 = 1/8, fixed window [2/8, 4/8]."""
    settings = {
        "batch_size": 6,
        "c2_range": (2 / 8, 2 / 8),
        "c3_range": (4 / 8, 4 / 8),
        "threshold_schedule": "fixed",
        "max_reevaluated": 4,
    }
    return Config.model_validate(
        {
            "run": {"num_steps": 4, "seed": 7, "name": "trace"},
            "algorithm": settings | algorithm,
            "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 2},
            "learner": {"minibatch_size": 3},
        }
    )


def rewards(k: int, size: int = G) -> str:
    """3 -> "11100000"."""
    return "1" * k + "0" * (size - k)


def fresh_result(prompt: str, k: int, step: int, reason: str, origin: Origin | None = None) -> GroupResult:
    """A fresh group that the assembly of `step` looked at."""
    return make_result(
        group_id=f"fresh-{step}-{prompt}",
        prompt_id=prompt,
        origin=origin,
        reason=reason,
        rewards=rewards(k),
        version=step,
        birth=step,
    )


def again_result(
    prompt: str, k: int, step: int, reason: str, origin: Origin | None = None, asked: int | None = None
) -> GroupResult:
    """A re-evaluated group that arrived for `step`."""
    name = f"reevaluate-{asked or step:06d}-{prompt}"
    result = fresh_result(prompt, k, step, reason, origin)
    return replace(result, group_id=name, purpose=Purpose.REEVALUATE, policy_version=asked or step)


def trace_results(step: int) -> list[GroupResult]:
    """The records of one step of V10; the reused groups of step 4 are left out."""
    fresh, again, (x1, x2, x3) = FRESH[step - 1], AGAIN[step - 1], BATCHES[step - 1]
    words = {0: "all_incorrect", G: "all_correct"}
    results = [
        fresh_result(p, k, step, words.get(k, "informative"), Origin.X1 if p in x1 else None) for p, k in fresh.items()
    ]
    for p, k in again.items():
        reason = "solved" if k == G else "still_hard" if k <= 1 else "improved"
        results.append(again_result(p, k, step, reason, Origin.X2 if p in x2 else None))
    born = {p: (t, k) for t, groups in enumerate(FRESH, start=1) for p, k in groups.items()}
    return results + [fresh_result(p, born[p][1], born[p][0], "reused", Origin.X3) for p in x3 or ""]


def write_trace(
    path: Path, *, num_steps: int = 3, results: Mapping[int, Sequence[GroupResult]] | None = None
) -> RunDirectory:
    """A run directory with the records of V10, or with other ones."""
    run = RunDirectory.create(path, dump_toml(trace_config()))
    for step in range(1, num_steps + 1):
        run.write_groups(step, (results or {}).get(step, trace_results(step)))
        num_bad, num_high = TABLES[step - 1]
        values = {"reward_mean": R_TOT[step - 1], "c2": 0.25, "c3": 0.5, "num_bad": num_bad, "num_high": num_high}
        run.append_metrics({"step": step, **values})
    return run


def recording_of(steps: Sequence[Sequence[GroupResult]], config: Config | None = None) -> Recording:
    """Steps 1, 2, ... with these groups."""
    made = (RecordedStep(step=step, results=tuple(results)) for step, results in enumerate(steps, start=1))
    return Recording(name="trace", config=config or trace_config(), steps=tuple(made))


def recorded_steps() -> tuple[RecordedStep, ...]:
    """V10, with the draw of step 4 that the vector leaves open."""
    results = [trace_results(step) for step in range(1, 5)]
    drawn = as_recorded(recording_of(results))[3].decision.x3
    for group_id in drawn:
        _, born, prompt = group_id.split("-")
        results[3].append(fresh_result(prompt, FRESH[int(born) - 1][prompt], int(born), "reused", Origin.X3))
    return recording_of(results).steps


@pytest.fixture
def history() -> History:
    found = History(trace_config())
    for step in recorded_steps():
        found.advance(step)
    assert found.differs == ""
    return found


def story(history: History, prompt_id: str) -> list[tuple[int, str, str]]:
    return [(event.step, event.table, event.change) for event in history.transitions(prompt_id)]


def test_a_hard_prompt_enters_is_asked_again_improves_and_leaves(history: History) -> None:
    first, second = history.visits("a")
    assert (first.step, first.kind, first.stat.mu, first.result.origin) == (1, "fresh", 0.0, None)
    assert (second.step, second.kind, second.stat.mu, second.result.origin) == (2, "reevaluated", 3 / 8, "x2")
    assert second.sentence == "its re-evaluated group had k = 3 of 8, improved: re-evaluated with c1 < mu < 1"
    entered, left = history.transitions("a")
    assert (entered.step, entered.table, entered.change) == (1, "bad", "entered")
    assert entered.sentence == "group with mu = 0"
    assert (left.step, left.table, left.change) == (2, "bad", "left")
    assert left.sentence == second.sentence


def test_a_reusable_group_enters_trains_again_and_leaves_when_it_is_too_old(history: History) -> None:
    visits = history.visits("b")
    assert [(visit.step, visit.kind) for visit in visits[:3]] == [(1, "fresh"), (2, "reused"), (3, "reused")]
    assert visits[1].stat.birth == 1
    assert story(history, "b") == [(1, "high", "entered"), (4, "high", "left")]
    assert history.transitions("b")[1].sentence.startswith("no group of it was read: it was too old")


def test_a_recording_that_the_replay_does_not_give_tells_visits_and_no_tables() -> None:
    history = History(trace_config())
    steps = recorded_steps()
    wrong = replace(steps[0], results=tuple(replace(result, reason="filtered") for result in steps[0].results))
    history.advance(wrong)
    history.advance(steps[1])
    assert "since step 1" in history.differs
    assert [visit.step for visit in history.visits("a")] == [1, 2]
    assert "had k = 0 of 8, filtered: " in history.visits("a")[0].sentence
    assert history.transitions("a") == []
    assert not any(history.tables_now().values())


# -- explain


@pytest.fixture
def trace() -> Recording:
    """All four steps of V10."""
    return recording_of([trace_results(step) for step in (1, 2, 3, 4)])


def sentence(recording: Recording, prompt: str, step: int) -> str:
    return explain(recording, as_recorded(recording), prompt, step).sentence


@pytest.mark.parametrize(
    ("prompt", "step", "want"),
    [
        ("b", 1, "was in batch 1 as X1: its fresh group had k = 2 of 8, informative: it passed the online filter; "
                 "it entered B_high (mu = 0.25)"),
        ("a", 1, "was not in batch 1: its fresh group had k = 0 of 8, all_incorrect: all rewards are 0; "
                 "it entered B_bad (mu = 0)"),
        ("a", 2, "was in batch 2 as X2: its re-evaluated group had k = 3 of 8, improved: re-evaluated with c1 < mu "
                 "< 1"),
        ("b", 2, "was in batch 2 as X3: its stored group of step 1 had k = 2 of 8, reused: drawn from B_high"),
        ("d", 3, "was not in batch 3: no group of it was read by step 3; it was in B_bad since step 1 with mu = 0.125, "
                 "re-evaluated once without success; it was read 3 times, last in step 1, 2, 4"),
        ("f", 2, "was not in batch 2: no group of it was read by step 2; it was read once, last in step 1"),
    ],
)  # fmt: skip
def test_each_prompt_of_the_trace_is_told_with_the_reason_of_its_groups(
    trace: Recording, prompt: str, step: int, want: str
) -> None:
    assert sentence(trace, prompt, step) == f"prompt {prompt} {want}"


def test_a_group_that_trains_without_differing_rewards_says_so() -> None:
    flat = fresh_result("a", 8, 1, "informative", Origin.X1)
    assert sentence(recording_of([[flat]]), "a", 1).endswith("(all its rewards are equal: it has no advantage)")


def test_a_group_is_not_called_flat_where_an_experts_row_or_a_stored_one_gives_it_an_advantage() -> None:
    expert = bytes([Outcome.GRADED] * (G - 1) + [Outcome.EXPERT])
    luffy = replace(
        fresh_result("a", 1, 1, "informative", Origin.X1), rewards=(0.0,) * (G - 1) + (1.0,), outcomes=expert
    )
    assert "no advantage" not in sentence(recording_of([[luffy]]), "a", 1)
    relift = replace(luffy, rows=tuple(range(G - 1)), item="a:sampled")
    assert "no advantage" in sentence(recording_of([[relift]]), "a", 1)
    supervised = replace(luffy, rows=(G - 1,), item="a:expert", kind="sft", origin=Origin.X3)
    assert "no advantage" not in sentence(recording_of([[supervised]]), "a", 1)


def test_a_late_group_names_the_step_of_its_request_and_partial_credit_is_told_as_rewards() -> None:
    late = again_result("a", 3, 2, "left_bad", asked=1)
    assert "its re-evaluated group (requested in step 1) had k = 3 of 8, left_bad: " in sentence(
        recording_of([trace_results(1), [*trace_results(2)[:6], late]]), "a", 2
    )
    partial = make_result(group_id="g", prompt_id="p", rewards=[0, 0.1, 0.1, 0.1], reason="informative")
    assert "had rewards from 0 to 0.1, mean 0.075, informative" in sentence(recording_of([[partial]]), "p", 1)


def test_a_stored_group_that_was_not_drawn_is_told(trace: Recording) -> None:
    replayed = as_recorded(trace)
    left = next(p for p in "bejmq" if p not in {name[-1] for name in replayed[3].decision.x3})
    born, k = {"b": (1, 2), "e": (1, 4), "j": (2, 3), "m": (3, 4), "q": (3, 2)}[left]
    found = explain(trace, replayed, left, 4)
    assert (found.origin, found.reasons) == (None, ())
    assert f"it was in B_high since step {born} with k = {k} of 8, and not drawn" in found.sentence


class Own(Word):
    LUCKY = "lucky", "drawn by lot"


class Mine:
    """A composer whose file has a word of its own."""


def test_a_word_of_a_composers_own_file_has_a_meaning() -> None:
    composer: Any = Mine()
    assert meanings(composer)["lucky"] == "drawn by lot"
    assert meanings(None).keys() == set(Reason)


def test_a_prompt_is_found_by_its_beginning_when_that_is_unique() -> None:
    recording = recording_of([[fresh_result(p, 4, 1, "informative") for p in ("ab12", "ab34", "cd56")]])
    assert (find_prompt(recording, "cd"), find_prompt(recording, "ab12")) == ("cd56", "ab12")
    with pytest.raises(ConfigError, match="2 prompts of run trace begin with 'ab': ab12, ab34; be more specific"):
        find_prompt(recording, "ab")
    with pytest.raises(ConfigError, match=r"did you mean 'cd56'\?\); `bapo explain RUN all STEP`"):
        find_prompt(recording, "cd65")


def test_the_command_explains_one_prompt_or_all_of_a_step(tmp_path: Path) -> None:
    run = str(write_trace(tmp_path / "trace").path)
    one = CliRunner().invoke(app, ["explain", run, "j", "2"])
    assert one.output.startswith("prompt j was in batch 2 as X1: its fresh group had k = 3 of 8, informative: ")
    every = CliRunner().invoke(app, ["explain", run, "all", "2"])
    assert [line.split()[1] for line in every.output.splitlines()] == list("ghijkladbe")
    latest = CliRunner().invoke(app, ["explain", run])
    assert latest.output == CliRunner().invoke(app, ["explain", run, "all", "3"]).output
    as_json = json.loads(CliRunner().invoke(app, ["explain", run, "j", "2", "--json"]).output)
    assert (as_json["origin"], as_json["reasons"], as_json["tables_are_exact"]) == ("x1", ["informative"], True)
    error = CliRunner().invoke(app, ["explain", run, "j", "9"]).exception
    assert "records of steps 1 to 3, none of step 9" in str(error)


def test_a_replay_that_differs_from_the_run_is_not_hidden(tmp_path: Path) -> None:
    # Without its re-used groups the second step is not what the composer makes of the records.
    run = write_trace(
        tmp_path / "trace", results={2: [result for result in trace_results(2) if result.reason != "reused"]}
    )
    output = CliRunner().invoke(app, ["explain", str(run.path), "m", "3"]).output
    assert "the replay of the records differs from the run since step 2" in output
    assert "differs" not in CliRunner().invoke(app, ["explain", str(run.path), "b", "1"]).output


def test_what_somebody_wrote_into_the_records_is_no_command_for_the_terminal(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    ((step, results),) = run.read_groups([2])
    run.write_groups(step, [replace(result, reason="\x1b]0;mine\x07" + result.reason) for result in results])
    for command in (["explain", str(run.path), "all", "2"], ["simulate", str(run.path)]):
        output = CliRunner().invoke(app, command).output
        assert "\x1b" not in output
        assert "\\x1b]0;mine" in output, command


# -- simulate


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
    late = fresh_result("b", 6, 3, "informative", Origin.X1)
    steps = [trace_results(1), trace_results(2), [late, *trace_results(3)[1:]]]
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


def test_the_window_and_the_ablations_change_what_is_reused(trace: Recording) -> None:
    wider = what_if(trace, changed(c3_range=(7 / 8, 7 / 8)), within=10)
    assert prompts(wider[1], Origin.X3) == "bef"  # f has k = 7
    assert [prompts(step, Origin.X3) for step in what_if(trace, changed(use_x3=False), within=10)] == [""] * 4
    assert [prompts(step, Origin.X2) for step in what_if(trace, changed(use_x2=False), within=10)] == [""] * 4


def test_records_with_a_gap_are_refused(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    (run.path / "groups" / "step-000002.parquet").unlink()
    with pytest.raises(ConfigError, match="no group records of step 2"):
        read_recording(run)
    for path in (run.path / "groups").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no group records: it has no step yet"):
        read_recording(run)


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_takes_settings(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    output = run_command(
        "simulate",
        str(run.path),
        "--algorithm.c1",
        "0.25",
        "--algorithm.c3_range",
        "[0.25,0.5]",
        "--algorithm.use_x3",
        "false",
    )
    for change in ("algorithm.c1: 0.125 -> 0.25", "algorithm.c3_range: [0.5, 0.5] -> [0.25, 0.5]", "algorithm.use_x3"):
        assert f"with {change}" in output
    assert "2 as recorded, 0 from the prompt's nearest recorded group, 1 unknown" in output
