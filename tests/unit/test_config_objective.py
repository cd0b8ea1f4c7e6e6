"""Losses that cannot be, each with what to write instead; the manual is the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from bapo.config.document import document
from bapo.config.layers import Layer
from bapo.config.load import load_layers
from bapo.config.tree import Config
from bapo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"name": "geppo_add"}, "importance_level = none"),
        ({"name": "luffy", "kl_coef": 0.0}, "importance_level = none"),
        ({"name": "kimi", "importance_level": "none", "ratio_mode": "direct"}, "ratio_mode = decoupled"),
        ({"name": "kimi", "importance_level": "none", "ratio_mode": "interpolated"}, "ratio_mode = decoupled"),
        (
            {"ratio_mode": "interpolated", "importance_mode": "mask", "importance_denominator": "kept"},
            "write importance_denominator = all",
        ),
        ({"name": "dppo"}, "ratio_mode = direct"),
        ({"name": "gspo", "clip_high": None}, "clip_high to numbers"),
        ({"importance_mode": "mask", "ratio_mode": "direct"}, "ratio_mode = decoupled"),
        ({"importance_veto": 0.1, "importance_level": "none"}, "importance_level = token"),
        ({"importance_level": "sequence", "ratio_mode": "direct"}, "set ratio_mode = decoupled"),
        ({"advantage": "gae", "advantage_batch_norm": True}, "advantage_batch_norm = false"),
        ({"advantage": "gae", "advantage_pool": "split"}, "or loss.advantage = group"),
        ({"advantage_pool": "on_policy"}, "set advantage_norm = center"),
        ({"importance_denominator": "kept"}, "set importance_mode = mask"),
        ({"importance_floor": 0.5}, "set that, or importance_floor = null"),
        ({"importance_mode": "mask", "importance_cap": None}, "set importance_cap, importance_floor or both"),
        ({"importance_mode": "mask", "importance_cap": 2.0, "importance_floor": 2.0}, "lower it"),
        ({"kl_estimator": "is_rev", "kl_ref": "reference"}, "set kl_estimator = k3"),
        ({"kl_ref": "convex", "ratio_mode": "official"}, "set ratio_mode = decoupled"),
        ({"kl_restart_step": 5}, "set kl_ref = convex or reference"),
        ({"kl_restart_step": 5, "kl_ref": "reference", "kl_coef": 0.0}, "kl_coef above 0"),
        ({"name": "luffy", "importance_level": "none"}, "kl_coef = 0"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_with_what_to_write(fields: dict[str, object], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        load_layers([Layer(source="a test", values={"loss": fields})])


def test_a_cache_longer_than_a_response_is_refused() -> None:
    with pytest.raises(ValidationError, match="use at most that"):
        Config.model_validate({"shaping": {"overlong_cache": 65}, "rollout": {"max_response_tokens": 64}})


# -- docs/configuration.md


PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run: python -m bapo.config.document"
