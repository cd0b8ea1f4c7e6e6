"""Advice names only settings that the method has and that can still be lowered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bapo.config.advice import CAN_BE_LOWERED, lower
from bapo.config.check import known_keys
from bapo.config.tree import Config

WINDOW, LR = "algorithm.high_window", "learner.lr"
V, AHEAD = "cadence.weight_sync_interval", "cadence.max_steps_ahead"


def test_every_setting_of_the_table_exists() -> None:
    assert set(CAN_BE_LOWERED) <= set(known_keys())


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"high_window": 3}, "lower algorithm.high_window or learner.lr"),
        ({"high_window": 1}, "lower learner.lr"),
        ({"use_x3": False, "high_window": 3}, "lower learner.lr"),
        ({"name": "grpo", "high_window": 3}, "lower learner.lr"),
        ({"name": "remix", "high_window": 3, "replay": {"window": 2, "share": 0.25}}, "lower learner.lr"),
    ],
)
def test_the_reuse_window_is_named_only_above_its_minimum_and_where_groups_are_reused(
    algorithm: Mapping[str, Any], expected: str
) -> None:
    assert lower(Config.model_validate({"algorithm": algorithm}), WINDOW, LR) == expected


@pytest.mark.parametrize(
    ("cadence", "expected"),
    [
        ({"weight_sync_interval": 5, "reevaluation_interval": 5, "max_steps_ahead": 1}, f"lower {V}, {AHEAD} or {LR}"),
        ({"weight_sync_interval": 1, "reevaluation_interval": 5, "max_steps_ahead": 1}, f"lower {AHEAD} or {LR}"),
        ({"weight_sync_interval": 1, "reevaluation_interval": 5, "max_steps_ahead": 0}, f"lower {LR}"),
    ],
)
def test_staleness_settings_at_their_minimum_are_not_named(cadence: Mapping[str, Any], expected: str) -> None:
    assert lower(Config.model_validate({"cadence": cadence}), V, AHEAD, LR) == expected


def test_nothing_to_lower_is_no_advice() -> None:
    config = Config.model_validate({"rollout": {"num_workers": 1}, "checkpoint": {"keep_last": 1}})
    assert lower(config, "rollout.num_workers", "checkpoint.keep_last") == ""
