"""What a run spent: each sampled group once, by purpose."""

from __future__ import annotations

from bapo.report.ledger import Spent, first_looks, ledger_of
from bapo.types import Origin, Purpose
from tests.made_up_runs import evaluation_row, fate, metrics_row

GROUPS = [
    (1, [fate("a", "0001", step=1, origin=Origin.X1), fate("b", "0000", step=1)]),
    (
        2,
        [
            fate("a", "0001", step=1, origin=Origin.X3, reason="reused"),
            fate("b", "0011", step=2, origin=Origin.X2, purpose=Purpose.REEVALUATE),
            fate("c", "1111", step=2),
        ],
    ),
]


def test_a_reused_group_is_not_paid_for_twice() -> None:
    ledger = ledger_of(GROUPS, [], [])
    assert ledger.fresh == Spent(responses=12, tokens=120)
    assert ledger.reevaluate == Spent(responses=4, tokens=40)
    assert (ledger.rollouts, dict(ledger.rollouts_by_step)) == (16, {1: 8, 2: 16})


def test_the_first_look_at_a_group_is_where_it_counts() -> None:
    assert [(step, [f.group_id for f in fates]) for step, fates in first_looks(GROUPS)] == [
        (1, ["a@1", "b@1"]), (2, ["b@2reevaluate", "c@2"]),
    ]  # fmt: skip


def test_measurements_and_seconds_add_up() -> None:
    rows = [evaluation_row("cd4", 1, {"p": "10", "q": "00"}), evaluation_row("cd4", 3, {"p": "11"})]
    ledger = ledger_of([], rows, [metrics_row(1), metrics_row(2, checkpoint_s=None)])
    assert ledger.evaluate == Spent(responses=6, tokens=60)
    assert ledger.train_s == 4.5
