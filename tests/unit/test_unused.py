"""Settings that a user wrote and that change nothing are said at the start, with the reason; presets' are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.algorithms.methods import KINDS
from bapo.cli.training.start import layers_of
from bapo.config.check import known_keys
from bapo.config.layers import Layer, file_layer, preset_names
from bapo.config.load import dump_toml, load_config, load_layers
from bapo.config.unused import STILL_READ, WITHOUT_EFFECT, unused_settings
from bapo.core.errors import ConfigError


def said(*tokens: str) -> list[str]:
    layers = layers_of(tokens)
    return unused_settings(load_layers(layers), layers)


@pytest.mark.parametrize(
    ("preset", "override", "why"),
    [
        ("grpo", "--loss.importance_cap=2", "set ratio_mode = decoupled"),
        ("grpo", "--loss.importance_level=token", "set ratio_mode = decoupled"),
        ("kimi", "--loss.importance_cap=2", "importance_level is none"),
        ("ppo", "--loss.advantage_pass_k=4", "loss.advantage = gae does not use it"),
        ("ppo", "--loss.advantage_norm=center", "loss.advantage = gae"),
        ("gspo", "--loss.dual_clip=3", "loss.name = gspo"),
        ("kimi", "--loss.clip_low=0.1", "loss.name = kimi"),
        ("balanced-clip", "--loss.clip_high=0.1", "loss.name = balanced_clip"),
        ("dapo", "--loss.kl_ref=reference", "kl_coef is 0"),
        ("grpo", "--loss.advantage_pool=split", "algorithm.composer = grpo"),
        ("grpo", "--shaping.shift=-0.5", "less the mean"),
        ("grpo", "--shaping.scale=10", "divides"),
        ("dapo", "--shaping.length_warmup_steps=5", "length_weight is 0"),
        ("grpo", "--shaping.overlong_factor=2", "overlong_cache is null"),
        ("dapo", "--algorithm.online_filter=gaussian", "algorithm.composer = dapo"),
        ("grpo", "--algorithm.use_x3=true", "algorithm.composer = grpo"),
        ("repo", "--algorithm.c1=0.25", "algorithm.composer = repo"),
        ("bapo", "--algorithm.max_rounds=9", "algorithm.composer = bapo"),
        ("popo", "--algorithm.threshold_schedule=inverted", "x3_policy = youngest"),
        ("grpo", "--learner.epochs_until=5", "epochs is 1"),
        ("grpo", "--learner.lr_final=0.5", "constant"),
    ],
)
def test_a_setting_without_effect_is_said_with_the_reason(preset: str, override: str, why: str) -> None:
    (line,) = said(preset, override)
    assert line.startswith(override.partition("=")[0])
    assert why in line


@pytest.mark.parametrize(
    "tokens",
    [
        ("tis", "--loss.importance_cap=2"),
        ("grpo", "--loss.dual_clip=3"),
        ("dapo", "--algorithm.max_rounds=9"),
        ("mopps", "--algorithm.max_rounds=9"),  # its selector proposes for all rounds
        ("repo", "--shaping.shift=-0.5"),  # a pool of one row has no mean
        ("grpo", "--loss.advantage_norm=center", "--shaping.scale=10"),
        ("grpo", "--shaping.scale=10", "--shaping.overlong_cache=64"),
        ("bapo", "--algorithm.use_x2=false", "--loss.kl_estimator=null"),
        ("grpo", "--algorithm.use_x2=false"),  # asks for nothing
    ],
)
def test_what_has_an_effect_or_asks_for_nothing_is_not_said(tokens: tuple[str, ...]) -> None:
    assert said(*tokens) == []


@pytest.mark.parametrize("name", preset_names())
def test_nothing_is_said_of_presets_and_of_the_config_of_a_run(name: str, tmp_path: Path) -> None:
    assert said(name) == []
    resolved = tmp_path / "config.toml"
    resolved.write_text(dump_toml(load_config([name], [])))
    assert said(str(resolved)) == []


def test_a_preset_that_a_complete_file_overrules_is_refused_and_an_edited_one_is_named(tmp_path: Path) -> None:
    resolved = tmp_path / "config.toml"
    resolved.write_text(dump_toml(load_config(["bapo"], [])))
    for preset in (["--preset", "grpo"], ["--preset=dapo"]):
        with pytest.raises(ConfigError, match=r"would change nothing: .*config\.toml has every key \(preset bapo\)"):
            load_config([str(resolved)], preset)
    resolved.write_text(resolved.read_text().replace('preset = "bapo"', 'preset = "grpo"'))
    (line,) = said(str(resolved))
    assert 'preset = "grpo" sets none; other than there: ' in line
    assert "algorithm.composer" in line


def test_a_users_own_part_says_what_it_ignores(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from learner.losses.ppo import Ppo\n\n\nclass Mine(Ppo):\n    ignores = ('loss.dual_clip',)\n",
        encoding="utf-8",
    )
    values = {"loss": {"name": f"{file}:Mine", "dual_clip": 5.0}}
    layers = [file_layer("bapo"), Layer(source="my.toml", values=values)]
    (line,) = unused_settings(load_layers(layers), layers)
    assert line.startswith("my.toml: loss.dual_clip = 5.0 changes nothing")


def test_every_key_that_is_said_to_be_without_effect_exists() -> None:
    ignored = {key for kind in KINDS for name in kind.names() for key in kind.find(name).ignores}
    assert {*ignored, *STILL_READ, *(key for key, *_ in WITHOUT_EFFECT)} <= set(known_keys())


def test_an_experts_row_is_refused_where_it_would_train_as_a_sampled_one() -> None:
    assert load_config(["luffy"], []).algorithm.num_experts == 1
    for preset in ("grpo", "bapo", "dapo", "remix", "repo"):
        with pytest.raises(ConfigError, match="does not know an expert's row"):
            load_config([preset], ["--algorithm.num_experts=1"])
