"""The presets say what the papers say: table 3, the released code, the mini-test, GRPO."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.algorithms.thresholds import scheduled_window
from bapo.config.layers import dotted, flatten, preset_layers
from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.errors import ConfigError


def preset(name: str) -> Config:
    return load_config([name], [])


def test_bapo_is_table_3() -> None:
    config = preset("bapo")
    rollout, algorithm, cadence = config.rollout, config.algorithm, config.cadence
    assert (rollout.top_p, rollout.temperature) == (1.0, 1.0)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens, rollout.num_workers) == (2048, 8192, 8)
    assert (algorithm.group_size, algorithm.batch_size, config.run.seed) == (8, 256, 42)
    assert (config.learner.lr, config.learner.minibatch_size) == (1e-6, 64)
    assert (config.loss.kl_coef, config.loss.entropy_coef) == (0.001, 0.001)
    assert (algorithm.c1, algorithm.c2_range, algorithm.c3_range) == (1 / 8, (1 / 8, 4 / 8), (2 / 8, 5 / 8))
    assert (
        algorithm.capacity,
        cadence.weight_sync_interval,
        cadence.reevaluation_interval,
        algorithm.most_reevaluated,
    ) == (256, 5, 5, 128)
    assert (algorithm.gaussian_width, algorithm.gaussian_center) == (0.2, 0.5)


METHODS: dict[str, tuple[str, dict[str, object]]] = {
    # preset of the core -> (the one beneath, every key that differs); of TRL and verl: test_config_peers.py
    "dr-grpo": (
        "grpo",
        {"loss.advantage_norm": "center", "loss.aggregation": "const_len", "loss.kl_coef": 0.0,
         "loss.entropy_coef": 0.0},
    ),
    "gspo": (
        "grpo",
        {"loss.name": "gspo", "loss.ratio_mode": "decoupled", "loss.importance_level": "none", "loss.clip_low": 3e-4,
         "loss.clip_high": 4e-4, "loss.kl_coef": 0.0, "loss.entropy_coef": 0.0},
    ),
    "cispo": (
        "grpo",
        {"loss.name": "cispo", "loss.clip_low": None, "loss.aggregation": "token_mean", "loss.kl_coef": 0.0,
         "loss.entropy_coef": 0.0},
    ),
    "dppo": (
        "grpo",
        {"cadence.max_steps_ahead": 8, "loss.name": "dppo", "loss.aggregation": "token_mean",
         "loss.advantage_norm": "center",
         "loss.kl_ref": "behavior", "loss.kl_estimator": "k2", "loss.kl_coef": 2e-3, "loss.entropy_coef": 0.0},
    ),
    "bapo-v1": ("bapo", {"cadence.weight_sync_interval": 1}),
    "bapo-reuse": (
        "bapo-v1",
        {"algorithm.batch_size": 512, "algorithm.group_size": 4, "algorithm.use_x2": False,
         "algorithm.x3_policy": "youngest", "algorithm.high_window": 1, "rollout.max_groups_in_flight": 64,
         "loss.kl_coef": 0.0, "loss.entropy_coef": 0.0},
    ),
    "pass-k": ("grpo", {"loss.advantage_norm": "center", "loss.advantage_pass_k": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_method_differs_from_the_preset_beneath_it_in_these_keys_alone(name: str) -> None:
    beneath, changes = METHODS[name]
    before, after = dict(flatten(preset(beneath).model_dump())), dict(flatten(preset(name).model_dump()))
    found = {dotted(key): value for key, value in after.items() if before.get(key) != value and dotted(key) != "preset"}
    assert found == changes


def test_bapo_has_the_papers_order_and_lag() -> None:
    config = preset("bapo")
    assert (config.cadence.max_steps_ahead, config.cadence.wait_for_reevaluation) == (0, True)
    assert config.cadence.max_staleness == 4
    assert (config.algorithm.threshold_schedule, config.algorithm.online_filter) == ("eq8", "range")
    assert (config.loss.kl_ref, config.loss.ratio_mode, config.loss.advantage_norm) == (
        "behavior",
        "decoupled",
        "pop_var",
    )


def test_bapo_official_is_the_released_script() -> None:
    config = preset("bapo-official")
    algorithm, rollout, loss = config.algorithm, config.rollout, config.loss
    assert (algorithm.group_size, rollout.temperature, rollout.top_p) == (8, 0.99, 1.0)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (1024, 4096)
    assert (algorithm.batch_size, config.learner.minibatch_size, config.learner.lr) == (32, 16, 1e-6)
    assert (config.learner.warmup_steps, config.learner.weight_decay, config.learner.grad_clip) == (10, 0.1, 1.0)
    assert (loss.kl_coef, loss.entropy_coef) == (0.0, 0.0)
    assert (
        config.cadence.weight_sync_interval,
        config.cadence.reevaluation_interval,
        algorithm.max_reevaluated,
        algorithm.capacity,
    ) == (2, 2, 32, 120)
    assert (algorithm.c1, algorithm.c2_range[0], algorithm.c3_range[0]) == (1 / 8, 1 / 8, 2 / 8)
    assert algorithm.threshold_schedule == "fixed"
    assert (loss.ratio_mode, loss.advantage_norm, loss.importance_cap) == ("official", "std_ddof1", 3.0)
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.aggregation) == (0.2, 0.28, 10.0, "token_mean")


FIXED_LOW = (
    "--algorithm.threshold_schedule=fixed", "--algorithm.c2_range=[0,0.5]", "--algorithm.drop_zero_variance_x3=false",
)  # fmt: skip
"""As docs/paper.md has it (Decisions)."""


@pytest.mark.parametrize(
    ("name", "overrides", "window", "drops"),
    [("bapo", FIXED_LOW, (0.0, 0.25), False), ("bapo-fixed-high", (), (0.375, 0.5), True)],
)
def test_the_fixed_rows_of_table_2_are_settings_alone(
    name: str, overrides: tuple[str, ...], window: tuple[float, float], drops: bool
) -> None:
    algorithm = load_config([name], overrides).algorithm
    assert [scheduled_window(algorithm, r_tot) for r_tot in (None, 0.0, 1.0)] == [window] * 3
    assert algorithm.drop_zero_variance_x3 is drops


def test_presets_that_name_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text('preset = "b"')
    (tmp_path / "b.toml").write_text('preset = "a"')
    monkeypatch.setattr("bapo.config.layers.PRESETS", tmp_path)
    with pytest.raises(ConfigError, match="a -> b -> a"):
        preset_layers("a")


def test_the_three_places_of_remixs_t_must_agree() -> None:
    config = preset("remix")
    assert (config.algorithm.options["last_step"], config.loss.kl_restart_step, config.learner.epochs_until) == (
        50,
        50,
        50,
    )
    with pytest.raises(ConfigError, match=r"last_step = 40, loss\.kl_restart_step = 50"):
        load_config(["remix"], ["--algorithm.options.last_step=40"])
    everywhere = ("algorithm.options.last_step", "loss.kl_restart_step", "learner.epochs_until")
    assert load_config(["remix"], [f"--{key}=40" for key in everywhere]).learner.epochs_until == 40
    assert load_config(["remix"], ["--learner.epochs_until=null"]).learner.epochs_until is None
    assert load_config(["grpo"], ["--learner.epochs_until=4", "--learner.epochs=2"]).learner.epochs_until == 4
