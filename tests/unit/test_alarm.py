"""Warnings about policies that are far apart: which cell, which words, and how often."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bapo.config.learner import DiagnosticsConfig
from bapo.config.tree import Config
from bapo.core.types import Origin
from learner.diagnostics.divergences import pooled, response_gaps
from learner.diagnostics.off_policy_alarm import Alarm, AlarmLog, alarm_of
from learner.diagnostics.theorem_meter import Cell

NEAR = pooled(response_gaps(np.zeros(1), np.zeros(1), np.ones(1, dtype=int)))
LIMITS = Config(diagnostics=DiagnosticsConfig(tv_warn=0.05, ess_warn=0.5))


def make_cell(
    origin: Origin, age: int | None, *, tv: float = 0.0, ess: float = 1.0, responses: int = 32, policy: str = "theta_t"
) -> Cell:
    return Cell(
        policy=policy,  # type: ignore[arg-type]
        origin=origin,
        age=age,
        num_groups=responses // 8,
        num_responses=responses,
        num_tokens=10 * responses,
        means=dataclasses.replace(NEAR, tv_tok=tv, ess=ess),
        delta=0.0,
        spreads={},
    )


def text_of(*cells: Cell) -> str | None:
    alarm = alarm_of(7, cells, LIMITS)
    return alarm.text if alarm else None


@pytest.mark.parametrize(
    ("cell", "want"),
    [
        (
            make_cell(Origin.X3, 2, tv=0.071),
            "x3 of age 2 (4 groups): tv_tok=0.071 is more than 0.05; lower algorithm.high_window or learner.lr",
        ),
        (
            make_cell(Origin.X1, 4, ess=0.31),
            "x1 of age 4 (4 groups): ess=0.31 is less than 0.5; lower "
            "cadence.weight_sync_interval, cadence.max_steps_ahead or learner.lr",
        ),
        (
            make_cell(Origin.X2, 0, tv=0.06),
            "x2 of age 0 (4 groups): tv_tok=0.060 is more than 0.05; the weights are the same, so engine and learner "
            "disagree: compare model.dtype and rollout.engine_options",
        ),
        (
            make_cell(Origin.X1, None, tv=0.06),
            "x1 (4 groups): tv_tok=0.060 is more than 0.05; lower "
            "cadence.weight_sync_interval, cadence.max_steps_ahead or learner.lr",
        ),
    ],
)
def test_an_alarm_names_subset_age_value_and_remedy(cell: Cell, want: str) -> None:
    assert text_of(make_cell(Origin.X1, 1), cell) == want


@pytest.mark.parametrize(
    "cell",
    [
        make_cell(Origin.X1, 1, tv=0.05, ess=0.5),  # at the limits, not beyond them
        make_cell(Origin.X3, 2, tv=0.9, ess=0.1, responses=8),  # one group says too little
        make_cell(Origin.X3, None, tv=0.9, policy="theta"),  # after the update the distance is meant
    ],
)
def test_no_alarm(cell: Cell) -> None:
    assert text_of(cell) is None


def test_a_subset_that_stays_far_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    log = AlarmLog()
    for step in range(1, 43):
        log.warn(Alarm(step=step, origin=Origin.X1, text="x1"))
    log.warn(Alarm(step=43, origin=Origin.X3, text="x3"))
    assert [record.getMessage().split()[1] for record in caplog.records] == ["1", "21", "41", "43"]
