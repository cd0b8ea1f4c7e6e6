"""Advice names only settings that the method has and that can still be lowered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.advice import CAN_BE_LOWERED, lower
from bapo.config.check import known_keys
from bapo.config.tree import Config

LR = "learner.lr"
V, AHEAD = "cadence.weight_sync_interval", "cadence.max_steps_ahead"


def test_every_setting_of_the_table_exists() -> None:
    assert set(CAN_BE_LOWERED) <= set(known_keys())


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"high_window": 3}, ("algorithm.high_window",)),
        ({"high_window": 1}, ()),
        ({"use_x3": False, "high_window": 3}, ()),
        ({"composer": "grpo", "high_window": 3}, ()),
        (
            {"composer": "remix", "options": {"window": 2, "share": 0.25}},
            ("algorithm.options.window", "algorithm.options.share"),
        ),
        ({"composer": "remix", "options": {"window": 1}}, ()),
    ],
)
def test_a_composer_names_what_bounds_the_age_of_its_stored_groups(
    algorithm: Mapping[str, Any], expected: tuple[str, ...]
) -> None:
    assert load_composer(AlgorithmConfig.model_validate(algorithm)).ages_by == expected


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
