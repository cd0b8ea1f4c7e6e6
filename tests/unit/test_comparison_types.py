"""The paper's numbers beside ours, and which methods count as on-policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo.analysis.compare.composition import is_on_policy
from bapo.analysis.compare.gather import gather
from bapo.analysis.compare.tables import table_1
from bapo.core.types import Fate, Origin, Purpose
from tests.support.synthetic_runs import fate, write_run

# -- on- or off-policy


OLD_ROWS = fate("a", "0001", step=1, origin=Origin.X1, reason="replayed")
OTHERS = {1: [fate("a", "0001", step=1, origin=Origin.X1)], 2: [fate("b", "0011", step=2, origin=Origin.X1, version=2)]}


@pytest.mark.parametrize(
    ("extra", "overrides", "want"),
    [
        ([], [], True),
        ([], ["--cadence.slack", "1"], True),
        ([], ["--cadence.slack", "2"], False),  # AReaL: sampled up to two steps before
        ([], ["--learner.epochs", "2"], False),
        ([OLD_ROWS], [], False),  # RePO: rows that trained at step 1 are part of an item of X1 at step 2
        ([fate("c", "0001", step=2, origin=Origin.X1, version=0)], [], False),  # begun two steps ago
        ([fate("c", "0001", step=2, version=0)], [], True),  # the same, but it did not train
        ([fate("c", "0001", step=2, origin=Origin.X2, version=2, purpose=Purpose.REEVALUATE)], [], True),
        ([replace(fate("c", "0001", step=2, origin=Origin.X1, version=2), outcomes=b"\0\0\0\2")], [], False),  # LUFFY
        ([replace(fate("c", "0001", step=2, origin=Origin.X1, version=2), kind="sft")], [], False),  # ReLIFT
    ],
)
def test_a_method_is_on_policy_when_its_rows_train_once_and_at_once(
    tmp_path: Path, extra: list[Fate], overrides: list[str], want: bool
) -> None:
    groups = OTHERS | {2: [*OTHERS[2], *extra]}
    compared = gather([write_run(tmp_path / "one", preset="grpo", groups=groups, overrides=overrides).path])
    assert is_on_policy(compared.reference) is want
    assert table_1(compared).rows[1][-2] == ("on" if want else "off")
