"""Methods side by side: at equal responses, and what their batches were made of; all values by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bapo.core.errors import ConfigError, RecordError
from bapo.core.statistics import over_shared
from bapo.core.types import GroupResult, Origin, Purpose
from bapo.runtime.run_directory.curves import held_out_curves, passed
from studies.compare.accuracy import at_equal_responses, means_at
from studies.compare.composition import gradient_norm, is_on_policy, last_entropy, last_length
from studies.compare.gather import Compared, Measured, Method, against, contrasts, gather, remarks
from studies.compare.tables import table_1, table_composition, table_equal_responses, table_settings
from studies.ledger import Ledger, Spent, read_ledger, write_ledger
from tests.support.run_rows import easy_first, make_evaluation
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run

STEPS = 4
NOTHING = {"p": "0000", "q": "0000"}


def make_run(
    path: Path, measured: Mapping[int, Mapping[str, str]], *, groups: int = 1, seed: int = 1, step_s: float = 2.0
) -> Path:
    """Four steps of so many groups of 4 responses, measured after these steps (0: before training)."""
    sampled = {step: [result(f"t{step}.{i}", "0001", step=step) for i in range(groups)] for step in range(1, STEPS + 1)}
    write_run(
        path, seed=seed, metrics=[metrics_row(step, step_s=step_s) for step in range(1, STEPS + 1)],
        groups=sampled,
        evaluations=[evaluation_row("cd4", step + 1, right) for step, right in measured.items()],
    )  # fmt: skip
    return path


def one_run(path: Path, measured: Mapping[int, Mapping[str, str]], *, groups: int = 1) -> Measured:
    return gather([make_run(path, measured, groups=groups)]).reference.runs[0]


def methods_of(root: Path) -> tuple[Method, ...]:
    return gather(sorted(path.parent for path in root.glob("*/config.toml"))).methods


def make_methods(root: Path, *names: str) -> Compared:
    return gather([make_run(root / f"{name}-s1", {0: NOTHING, 4: NOTHING}) for name in names])


def pairs(compared: Compared) -> list[tuple[str, str]]:
    return [(one.method.name, one.reference.name) for one in contrasts(compared)]


# -- who is compared with whom
def test_methods_are_compared_with_the_first_one_and_bapo_with_dapo(tmp_path: Path) -> None:
    compared = make_methods(tmp_path, "grpo", "dapo", "bapo")
    assert pairs(compared) == [("dapo", "grpo"), ("bapo", "grpo"), ("bapo", "dapo")]


def test_against_makes_any_method_the_reference_of_the_others_and_a_pair_is_compared_once(tmp_path: Path) -> None:
    compared = against(make_methods(tmp_path, "grpo", "dapo", "bapo"), ["bapo", "grpo", "bapo"])
    assert compared.reference.name == "bapo"
    assert pairs(compared) == [("grpo", "bapo"), ("dapo", "bapo"), ("dapo", "grpo")]
    assert [row[0] for row in table_settings(compared).rows] == ["grpo", "dapo"]


def test_an_unknown_method_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        against(make_methods(tmp_path, "grpo", "bapo-mini"), ["bapo-min"])
    assert str(caught.value) == (
        "--against bapo-min: unknown method (did you mean 'bapo-mini'?); these runs have grpo, bapo-mini"
    )


# -- two methods at equal responses
def make_unequal(root: Path, *, middle: Mapping[str, str] | None = None) -> tuple[Method, Method]:
    """plain spends 16 responses, ours 32, 16 in two steps. Differences there: seed 1 0, 1/4; seed 2 1/4, 1/2."""
    ends = {1: {"p": "1000", "q": "1000"}, 2: {"p": "1000", "q": "0000"}}
    ours = {1: {"p": "1000", "q": "1100"}, 2: {"p": "1100", "q": "1100"}}
    last = {"p": "1111", "q": "1111"}
    for seed in (1, 2):
        make_run(root / f"plain-s{seed}", {0: NOTHING, 4: ends[seed]}, seed=seed)
        make_run(root / f"ours-s{seed}", {0: NOTHING, 2: ours[seed], 4: last}, groups=2, seed=seed)
    ours_method, plain = methods_of(root)
    return ours_method, plain


def test_at_equal_responses_methods_are_paired_by_seed_and_prompt(tmp_path: Path) -> None:
    ours, plain = make_unequal(tmp_path)
    found = at_equal_responses(ours, plain, "cd4")
    assert not isinstance(found, str)
    assert (found.budget, found.seeds, found.num_prompts) == (16, (1, 2), 2)
    # ours: 1/4, 1/2 and 1/2, 1/2; plain 1/4, 1/4 and 1/4, 0.
    assert (found.method, found.reference) == (7 / 16, 3 / 16)
    # [0, 1/4], [1/4, 1/2] is additive: both mean squares 1/16, none left; Var = 1/32 with 2 degrees of freedom.
    assert found.difference.mean == pytest.approx(0.25)
    assert found.difference.high - found.difference.mean == pytest.approx(4.302653 * math.sqrt(1 / 32), rel=1e-5)
    opposite = at_equal_responses(plain, ours, "cd4")
    assert not isinstance(opposite, str)
    assert opposite.difference.mean == pytest.approx(-0.25)
    rows = table_equal_responses(gather([run.directory.path for m in (plain, ours) for run in m.runs])).rows
    assert rows == (("ours", "plain", "cd4", "+25.0 [-51.1, +101.1]", "0.29", "2 x 2", "43.8 : 18.8 at 16"),)


def test_runs_measured_at_several_numbers_of_responses_share_the_largest_that_both_have(tmp_path: Path) -> None:
    half = {"p": "1100", "q": "1100"}
    for name, budgets, at in (
        ("plain", "[8]", {0: NOTHING, 2: NOTHING, 4: NOTHING}),
        ("ours", "[4, 8]", {0: NOTHING, 1: NOTHING, 2: half, 4: half}),
    ):
        sampled = {step: [result(f"t{step}", "0001", step=step)] for step in range(1, STEPS + 1)}
        write_run(
            tmp_path / f"{name}-s1", metrics=[metrics_row(step) for step in range(1, STEPS + 1)], groups=sampled,
            evaluations=[evaluation_row("cd4", step + 1, right) for step, right in at.items()],
            overrides=["--evaluation.at_responses", budgets],
        )  # fmt: skip
    ours, plain = methods_of(tmp_path)
    found = at_equal_responses(ours, plain, "cd4")
    assert not isinstance(found, str)
    assert (found.budget, found.method, found.reference) == (8, 0.5, 0.0)


def test_a_seed_without_an_answer_is_not_left_out_silently(tmp_path: Path) -> None:
    make_run(tmp_path / "plain-s1", {0: NOTHING, 4: NOTHING})
    make_run(tmp_path / "plain-s2", {0: NOTHING, 2: NOTHING}, seed=2)
    for seed in (1, 2):
        make_run(tmp_path / f"ours-s{seed}", {0: NOTHING, 4: NOTHING}, seed=seed)
    ours, plain = methods_of(tmp_path)
    assert (
        at_equal_responses(ours, plain, "cd4")
        == "plain-s2 was not evaluated at 16 responses: set evaluation.at_responses = [16]"
    )
    rows = table_equal_responses(gather([run.directory.path for m in (plain, ours) for run in m.runs])).rows
    assert rows[0][3:] == (
        "plain-s2 was not evaluated at 16 responses: set evaluation.at_responses = [16]",
        "-",
        "-",
        "-",
    )


def test_an_accuracy_between_two_measurements_is_not_made_up(tmp_path: Path) -> None:
    # 8 responses a step, measured at 0 and 32: 25 is less than a step from 32, 24 a whole one.
    run = one_run(tmp_path / "one", {0: {"p": "0000"}, 4: {"p": "1100"}}, groups=2)
    assert means_at(run, "cd4", 25) == {"p": 1 / 2}
    assert means_at(run, "cd4", 7) == {"p": 0}
    assert means_at(run, "cd4", 24) == "one was not evaluated at 24 responses: set evaluation.at_responses = [24]"


def test_what_was_measured_for_a_budget_counts_for_it(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", {0: {"p": "0000"}, 3: {"p": "1000"}, 4: {"p": "1100"}}, groups=2)
    rows = [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()]
    rows[1]["at_responses"] = 12  # at the end of a step of many rounds
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert means_at(gather([path]).reference.runs[0], "cd4", 12) == {"p": 1 / 4}


def test_what_a_busy_evaluator_measured_long_after_a_budget_does_not_count_for_it(tmp_path: Path) -> None:
    # 4 responses a step: the row for 8 came after 16 of them, though workers get weights after each step.
    rows = [evaluation_row("cd4", 2, {"p": "1000"}), evaluation_row("cd4", 3, {"p": "1100"})]
    rows += [evaluation_row("cd4", 6, {"p": "1111"}, at_responses=8)]
    sampled = {step: [result(f"t{step}", "0001", step=step)] for step in range(1, 6)}
    metrics = [metrics_row(step) for step in range(1, 6)]
    overrides = ["--cadence.weight_sync_interval", "1"]
    write_run(tmp_path / "one", metrics=metrics, groups=sampled, evaluations=rows, overrides=overrides)
    assert means_at(gather([tmp_path / "one"]).reference.runs[0], "cd4", 8) == {"p": 1 / 2}


def test_seeds_of_one_method_that_spent_unequally_share_one_budget(tmp_path: Path) -> None:
    make_run(tmp_path / "plain-s1", {0: NOTHING, 4: NOTHING}, groups=2)
    half = {"p": "1100", "q": "0000"}
    make_run(tmp_path / "plain-s2", {0: NOTHING, 2: half, 4: {"p": "1111", "q": "0000"}}, groups=4, seed=2)
    make_run(tmp_path / "plain-s3", {0: NOTHING, 4: NOTHING}, groups=1, seed=3)  # of no pair
    for seed in (1, 2):
        make_run(tmp_path / f"ours-s{seed}", {0: NOTHING, 3: NOTHING, 4: NOTHING}, groups=3, seed=seed)
    ours, plain = methods_of(tmp_path)
    found = at_equal_responses(plain, ours, "cd4")
    assert not isinstance(found, str)
    assert (found.budget, found.seeds) == (32, (1, 2))
    # plain-s2 has p = 1/2 after 32 of its 64 responses: mean of 0, 0, 1/2, 0.
    assert (found.method, found.reference) == (1 / 8, 0.0)


# -- on- or off-policy


OLD_ROWS = result("a", "0001", step=1, origin=Origin.X1, reason="replayed")
OTHERS = {
    1: [result("a", "0001", step=1, origin=Origin.X1)],
    2: [result("b", "0011", step=2, origin=Origin.X1, version=2)],
}


@pytest.mark.parametrize(
    ("extra", "overrides", "want"),
    [
        ([], [], True),
        ([], ["--cadence.max_steps_ahead", "1"], True),
        ([], ["--cadence.max_steps_ahead", "2"], False),  # AReaL: sampled up to two steps before
        ([], ["--learner.epochs", "2"], False),
        ([OLD_ROWS], [], False),  # RePO: rows that trained at step 1 are part of an item of X1 at step 2
        ([result("c", "0001", step=2, origin=Origin.X1, version=0)], [], False),  # begun two steps ago
        ([result("c", "0001", step=2, version=0)], [], True),  # the same, but it did not train
        ([result("c", "0001", step=2, origin=Origin.X2, version=2, purpose=Purpose.REEVALUATE)], [], True),
        ([replace(result("c", "0001", step=2, origin=Origin.X1, version=2), outcomes=b"\0\0\0\2")], [], False),  # LUFFY
        ([replace(result("c", "0001", step=2, origin=Origin.X1, version=2), kind="sft")], [], False),  # ReLIFT
    ],
)
def test_a_method_is_on_policy_when_its_rows_train_once_and_at_once(
    tmp_path: Path, extra: list[GroupResult], overrides: list[str], want: bool
) -> None:
    groups = OTHERS | {2: [*OTHERS[2], *extra]}
    compared = gather([write_run(tmp_path / "one", preset="grpo", groups=groups, overrides=overrides).path])
    assert is_on_policy(compared.reference) is want
    assert table_1(compared).rows[1][-2] == ("on" if want else "off")


def test_a_run_without_group_records_is_counted_by_its_ledger_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", preset="grpo", groups=OTHERS)
    shutil.rmtree(run.path / "groups")
    stored = {"fresh": [8, 80], "reevaluate": [4, 30], "rollouts": [[1, 8], [2, 12]]}
    (run.path / "ledger.json").write_text(json.dumps(stored))
    compared = gather([run.path])
    (found,) = compared.reference.runs
    assert found.ledger.rollouts == 12
    assert found.ledger.rollouts_by_step == {1: 8, 2: 12}
    assert table_1(compared).rows[1][-2] == "-"  # on-policy or not: nobody knows
    assert remarks(compared)[0] == "without group records, so that some cells are dashes and some tables missing: one"


def test_an_archived_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    spent = Spent(responses=8, tokens=80), Spent(responses=4, tokens=30)
    ledger = Ledger(fresh=spent[0], reevaluate=spent[1], rollouts_by_step={1: 8, 2: 12})
    write_ledger(tmp_path / "ledger.json", ledger)
    assert read_ledger(tmp_path / "ledger.json", [], []) == ledger


@pytest.mark.parametrize("content", ["{", "{}", '{"fresh": [8], "reevaluate": [0, 0], "rollouts": []}', "[1]"])
def test_a_damaged_ledger_is_refused_by_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(RecordError, match=r"ledger\.json"):
        read_ledger(tmp_path / "ledger.json", [], [])


# -- what batches were made of


AGAIN = Purpose.REEVALUATE
STEP_1 = [
    result("a", "0001", step=1, origin=Origin.X1),
    result("b", "0011", step=1, origin=Origin.X1),
    result("c", "0000", step=1, origin=None, reason="all_incorrect"),
    result("d", "0000", step=1, origin=None, reason="all_incorrect"),
]
STEP_2 = [
    result("e", "0001", step=2, origin=Origin.X1),
    result("f", "1111", step=2, origin=None, reason="all_correct"),
    result("c", "0011", step=2, origin=Origin.X2, purpose=AGAIN, reason="improved"),
    result("d", "0000", step=2, origin=None, purpose=AGAIN, reason="still_hard"),
    result("a", "0001", step=1, origin=Origin.X3, reason="reused"),
]
STEP_3 = [result("d", "1111", step=3, origin=None, purpose=AGAIN, reason="solved")]
STEP_3_FULL = [result("d", "0111", step=3, origin=None, purpose=AGAIN, reason="no_room")]
SIZES = [metrics_row(1, x1=2), metrics_row(2, x1=1, x2=1, x3=1), metrics_row(3, x1=0)]


def only_run(path: Path, **fields: object) -> Measured:
    return gather([write_run(path, **fields).path]).reference.runs[0]  # type: ignore[arg-type]


def test_composition_by_hand(tmp_path: Path) -> None:
    for seed, last in ((1, STEP_3), (2, STEP_3_FULL)):
        groups = {1: STEP_1, 2: STEP_2, 3: last}
        write_run(tmp_path / f"bapo-s{seed}", seed=seed, groups=groups, metrics=SIZES)
    (row,) = table_composition(gather([tmp_path / "bapo-s1", tmp_path / "bapo-s2"])).rows
    # 5 trained: 3 X1, 1 X2, 1 X3; 4 of 20 responses are a's of step 1; a, b, e of 6 fresh groups trained.
    assert row[:6] == ("bapo", "60.0", "20.0", "20.0", "20.0", "50.0")
    # c and d were asked again. Seed 1: c improved, d was solved. Seed 2: both improved, d without room.
    assert row[6:] == ("2", "75.0 (50.0 to 100.0)", "25.0 (0.0 to 50.0)")


def test_the_end_is_the_last_twelfth_of_the_steps(tmp_path: Path) -> None:
    metrics = [metrics_row(step, entropy=1.0, grad_norm=float(step)) for step in range(1, 23)]
    metrics += [metrics_row(23, entropy=0.2, grad_norm=50.0), metrics_row(24, entropy=0.4, grad_norm=9.0)]
    tokens = {22: 400, 23: 40, 24: 80}
    groups = {step: [replace(result("a", "0001", step=step), num_tokens=n)] for step, n in tokens.items()}
    run = only_run(tmp_path / "one", metrics=metrics, groups=groups)
    assert last_entropy(run) == pytest.approx(0.3)  # 24 // 12 = 2 steps
    assert last_length(run) == 20.0  # 3 // 12 = 0, so the last one of them: 80 tokens of 4 responses
    # 24 norms: 1 ... 22, 9 once more, and 50. ceil(.95 x 24) = 23 of them are at most 22.
    assert (gradient_norm(run, 0.95), gradient_norm(run, 1.0)) == (22.0, 50.0)


# -- curves


def test_held_out_curves_are_one_per_split_in_order_of_steps() -> None:
    rows = [make_evaluation("a", 5, 0.5), make_evaluation("b", 1, 0.1), make_evaluation("a", 1, 0.25)]
    first, second = held_out_curves(rows)
    assert (first.name, first.steps, first.values) == ("a", [0, 4], [0.25, 0.5])
    assert (second.name, second.low, second.high) == ("b", [0.1 - 0.02], [0.1 + 0.02])


def test_a_point_with_fewer_prompts_is_the_base_accuracy_plus_the_change_on_them() -> None:
    """The base has 2/3 on three prompts and 1/2 on the two that are evaluated later with 3/4: 2/3 + 1/4."""
    base = make_evaluation("a", 1, 2 / 3, num_prompts=3, rewards={"p": [1.0, 0.0], "q": [0.0, 1.0], "r": [1.0, 1.0]})
    later = make_evaluation("a", 5, 0.75, num_prompts=2, rewards={"p": [1.0, 1.0], "q": [0.0, 1.0]})
    (curve,) = held_out_curves([base, later])
    assert curve.values == pytest.approx([2 / 3, 11 / 12])
    assert (list(curve.num_prompts), curve.low[1], curve.high[1]) == (
        [3, 2],
        pytest.approx(11 / 12 - 0.02),
        pytest.approx(11 / 12 + 0.02),
    )


def test_pass_at_k_of_fewer_prompts_is_that_of_the_base_model_plus_the_change_on_them() -> None:
    (curve,) = held_out_curves([passed(row, 2) for row in easy_first()])
    assert curve.values == [3 / 4, 3 / 4]
    # One of two responses drawn: p 1, q 1/2 later; 1 and 1 before.
    (single,) = held_out_curves([passed(row, 1) for row in easy_first()])
    assert single.values == pytest.approx([5 / 8, 5 / 8 - 1 / 4])


def test_a_loss_on_easy_prompts_that_is_larger_than_the_mean_of_all_is_no_accuracy_below_zero() -> None:
    """The base has 1/4 on all four prompts and 1 on the first one, which is lost: 1/4 - 1."""
    base = make_evaluation("a", 1, 0.25, rewards={"p": [1.0], "q": [0.0], "r": [0.0], "s": [0.0]})
    (curve,) = held_out_curves([base, make_evaluation("a", 5, 0.0, low=0.0, rewards={"p": [0.0]})])
    assert (curve.values[1], curve.low[1], curve.high[1]) == (0.0, 0.0, pytest.approx(0.02))


def test_two_measurements_over_shared_prompts_are_as_if_no_other_had_been_measured() -> None:
    base, later = easy_first()
    before, after = over_shared(base, later)
    assert (before["accuracy"], before["num_prompts"], before["rewards"].keys()) == (1.0, 2, {"p", "q"})
    # Wilson's interval of 2 of 2: 2 / (2 + 1.96^2) = .342 to 1.
    assert (before["low"], before["high"]) == (pytest.approx(0.342, abs=1e-3), 1.0)
    assert after is later
    assert over_shared(base, make_evaluation("a", 5, 0.5)) == (base, make_evaluation("a", 5, 0.5))
