"""What batches were made of, counted by hand on a handful of groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo.analysis.compare.composition import gradient_norm, last_entropy, last_length, retained_share, stored_share
from bapo.analysis.compare.gather import Measured, gather
from bapo.analysis.compare.tables import table_composition
from bapo.core.types import Fate, Origin, Purpose
from tests.support.synthetic_runs import fate, metrics_row, write_run

AGAIN = Purpose.REEVALUATE
STEP_1 = [
    fate("a", "0001", step=1, origin=Origin.X1),
    fate("b", "0011", step=1, origin=Origin.X1),
    fate("c", "0000", step=1, origin=None, reason="all_wrong"),
    fate("d", "0000", step=1, origin=None, reason="all_wrong"),
]
STEP_2 = [
    fate("e", "0001", step=2, origin=Origin.X1),
    fate("f", "1111", step=2, origin=None, reason="all_right"),
    fate("c", "0011", step=2, origin=Origin.X2, purpose=AGAIN, reason="improved"),
    fate("d", "0000", step=2, origin=None, purpose=AGAIN, reason="still_hard"),
    fate("a", "0001", step=1, origin=Origin.X3, reason="reused"),
]
STEP_3 = [fate("d", "1111", step=3, origin=None, purpose=AGAIN, reason="solved")]
STEP_3_FULL = [fate("d", "0111", step=3, origin=None, purpose=AGAIN, reason="no_room")]
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


def test_a_method_without_a_part_has_a_dash(tmp_path: Path) -> None:
    write_run(tmp_path / "grpo-s1", preset="grpo", groups={1: STEP_1[:2]}, metrics=[metrics_row(1, x1=2)])
    write_run(tmp_path / "bapo-s1", groups={1: STEP_1[:2]}, metrics=[metrics_row(1, x1=2)])
    grpo, bapo = table_composition(gather([tmp_path / "grpo-s1", tmp_path / "bapo-s1"])).rows
    assert grpo == ("grpo", "100.0", "-", "-", "0.0", "100.0", "-", "-", "-")
    assert bapo == ("bapo", "100.0", "0.0", "0.0", "0.0", "100.0", "0", "-", "-")  # it could have had them


def test_stored_rows_inside_x1_are_counted_by_response(tmp_path: Path) -> None:
    old = replace(fate("a", "0001", step=1, origin=Origin.X1, reason="replayed"), rows=(3,), item="a@2")
    new = replace(fate("a", "0000", step=2, origin=Origin.X1), rows=(1, 2, 3), item="a@2")
    groups = {1: [fate("a", "0001", step=1, origin=Origin.X1)], 2: [new, old]}
    run = only_run(tmp_path / "arpo-s1", preset="grpo", groups=groups)
    assert stored_share(run) == 1 / 8  # 4 rows at step 1, 3 + 1 at step 2
    assert retained_share(run) == 1.0


def test_a_group_that_no_step_trained_is_not_retained_though_a_later_step_reuses_it(tmp_path: Path) -> None:
    groups: dict[int, list[Fate]] = {
        1: [fate("a", "0001", step=1, origin=None, reason="filtered")],
        2: [fate("a", "0001", step=1, origin=Origin.X3, reason="reused")],
    }
    run = only_run(tmp_path / "one", groups=groups)
    assert (retained_share(run), stored_share(run)) == (0.0, 1.0)


def test_the_end_is_the_last_twelfth_of_the_steps(tmp_path: Path) -> None:
    metrics = [metrics_row(step, entropy=1.0, grad_norm=float(step)) for step in range(1, 23)]
    metrics += [metrics_row(23, entropy=0.2, grad_norm=50.0), metrics_row(24, entropy=0.4, grad_norm=9.0)]
    tokens = {22: 400, 23: 40, 24: 80}
    groups = {step: [replace(fate("a", "0001", step=step), num_tokens=n)] for step, n in tokens.items()}
    run = only_run(tmp_path / "one", metrics=metrics, groups=groups)
    assert last_entropy(run) == pytest.approx(0.3)  # 24 // 12 = 2 steps
    assert last_length(run) == 20.0  # 3 // 12 = 0, so the last one of them: 80 tokens of 4 responses
    # 24 norms: 1 ... 22, 9 once more, and 50. ceil(.95 x 24) = 23 of them are at most 22.
    assert (gradient_norm(run, 0.95), gradient_norm(run, 1.0)) == (22.0, 50.0)
