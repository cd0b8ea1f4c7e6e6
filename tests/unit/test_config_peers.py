"""TRL's and verl's keys: the presets with their defaults, and a hint for each of them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from bapo.config.check import known_keys
from bapo.config.load import load_config
from bapo.config.names import advice_for
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from tests.support.peers import stored, table

ROOT = Path(__file__).resolve().parents[2]
TRL, VERL = stored("trl"), stored("verl")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def preset(name: str, *overrides: str) -> Config:
    return load_config([name], list(overrides))


def test_trl_grpo_has_the_defaults_of_trl() -> None:
    config = preset("trl-grpo")
    learner, loss, rollout, algorithm = config.learner, config.loss, config.rollout, config.algorithm
    assert learner.lr == TRL["learning_rate"]
    assert learner.lr_schedule == TRL["lr_scheduler_type"]
    assert learner.lr_final == 0.0  # transformers' `linear` ends there
    assert learner.warmup_steps == TRL["warmup_steps"]
    assert learner.betas == (TRL["adam_beta1"], TRL["adam_beta2"])
    assert TRL["adam_epsilon"] == 1e-8  # torch's, which ours is too
    assert learner.weight_decay == TRL["weight_decay"]
    assert learner.grad_clip == TRL["max_grad_norm"]
    assert learner.epochs == TRL["num_iterations"]
    assert algorithm.group_size == TRL["num_generations"]
    assert algorithm.batch_size == TRL["per_device_train_batch_size"] // TRL["num_generations"]
    assert (TRL["gradient_accumulation_steps"], TRL["steps_per_generation"], learner.minibatch_size) == (1, None, None)
    assert rollout.max_response_tokens == TRL["max_completion_length"]
    assert (rollout.temperature, rollout.top_p) == (TRL["temperature"], TRL["top_p"])
    assert (TRL["epsilon_high"], loss.clip_low, loss.clip_high) == (None, TRL["epsilon"], TRL["epsilon"])
    assert loss.dual_clip == TRL["delta"]
    assert (loss.kl_coef, loss.entropy_coef) == (TRL["beta"], TRL["entropy_coef"])
    assert (TRL["loss_type"], loss.name, loss.aggregation) == ("dapo", "ppo", "token_mean")
    assert (TRL["scale_rewards"], loss.advantage_norm, loss.advantage_eps) == ("group", "std_ddof1", 1e-4)
    assert config.shaping.overlong_filter == TRL["mask_truncated_completions"]
    assert TRL["vllm_importance_sampling_mode"] == f"{loss.importance_level}_{loss.importance_mode}"
    assert loss.importance_cap == TRL["vllm_importance_sampling_clip_max"]
    assert loss.importance_floor == TRL["vllm_importance_sampling_clip_min"]
    assert (TRL["importance_sampling_level"], loss.ratio_mode) == ("token", "decoupled")
    assert (algorithm.online_filter, config.cadence.max_staleness) == ("none", 0)
    assert (config.run.seed, TRL["bf16"], config.model.dtype) == (TRL["seed"], None, "bfloat16")  # None: unless fp16


def test_verl_grpo_has_the_defaults_of_verl() -> None:
    config = preset("verl-grpo")
    learner, loss, rollout, algorithm = config.learner, config.loss, config.rollout, config.algorithm
    optim = f"{ACTOR}.optim"
    assert learner.lr == VERL[f"{optim}.lr"]
    assert learner.lr_schedule == VERL[f"{optim}.lr_scheduler_type"]
    assert (VERL[f"{optim}.lr_warmup_steps"], VERL[f"{optim}.lr_warmup_steps_ratio"], learner.warmup_steps) == (
        -1,
        0,
        0,
    )
    assert list(learner.betas) == VERL[f"{optim}.betas"]
    assert learner.weight_decay == VERL[f"{optim}.weight_decay"]
    assert learner.grad_clip == VERL[f"{optim}.clip_grad"] == VERL[f"{ACTOR}.grad_clip"]
    assert learner.epochs == VERL[f"{ACTOR}.ppo_epochs"]
    assert learner.minibatch_size == VERL[f"{ACTOR}.ppo_mini_batch_size"]
    assert algorithm.batch_size == VERL["data.train_batch_size"]
    assert (VERL[f"{ROLLOUT}.n"], algorithm.group_size) == (1, 5)  # 1 cannot train; 5 as in its examples
    assert rollout.max_prompt_tokens == VERL["data.max_prompt_length"]
    assert rollout.max_response_tokens == VERL["data.max_response_length"]
    assert (rollout.temperature, rollout.top_p) == (VERL[f"{ROLLOUT}.temperature"], VERL[f"{ROLLOUT}.top_p"])
    assert (loss.clip_low, loss.clip_high) == (VERL[f"{ACTOR}.clip_ratio_low"], VERL[f"{ACTOR}.clip_ratio_high"])
    assert loss.dual_clip == VERL[f"{ACTOR}.clip_ratio_c"]
    assert (VERL[f"{ACTOR}.use_kl_loss"], loss.kl_coef) == (False, 0.0)
    assert loss.entropy_coef == VERL[f"{ACTOR}.entropy_coeff"]
    assert loss.aggregation == VERL[f"{ACTOR}.loss_agg_mode"].replace("-", "_")
    assert VERL["algorithm.norm_adv_by_std_in_grpo"] is True
    assert (loss.advantage_norm, loss.advantage_eps) == ("std_ddof1", 1e-6)
    assert (VERL["algorithm.rollout_correction.rollout_is"], loss.importance_level) == (None, "none")
    assert (loss.ratio_mode, algorithm.online_filter, config.cadence.max_staleness) == ("decoupled", "none", 0)
    assert config.model.dtype == VERL[f"{ROLLOUT}.dtype"] == VERL[f"{ACTOR}.fsdp_config.dtype"]


def hint(key: str) -> str:
    """What the error for this key says behind the key, with its value in a file."""
    with pytest.raises(ConfigError) as refused:
        load_config([], [f"--{key}", "1"])
    return str(refused.value).rpartition(f"{key}: unknown key")[2]


def test_every_field_of_trl_has_a_hint_in_every_section() -> None:
    assert [field for field in TRL if not advice_for((field,))] == []
    assert [field for field in TRL if advice_for(("learner", field)) != advice_for((field,))] == []


def test_every_key_of_verl_has_a_hint() -> None:
    unknown = {*VERL} - {*known_keys()}
    assert len(unknown) > 400
    assert [key for key in unknown if not advice_for(tuple(key.split(".")))] == []


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("chat_template_kwargs", "use task.options = { chat_options ="),
        ("torch_compile", "use learner.compile = true"),
        ("distillation.enabled", "use distillation.teacher"),
        ("distillation.distillation_loss.use_task_rewards", "use [loss.advantage_options]"),
        ("distillation.distillation_loss.topk", "not there"),
        ("vllm_importance_sampling_correction", "use loss.importance_level"),
        ("push_to_hub", "use bapo export RUN --push-to-hub ORG/NAME"),
        ("hub_strategy", "a run uploads nothing by itself"),
        ("load_best_model_at_end", "use checkpoint.keep_best = 1 and bapo export RUN --best"),
        ("early_stopping_patience", "use evaluation.patience"),
        ("top_k", "refused in training: the engine would sample from another distribution"),
        ("rollout.min_tokens", "refused in training"),
        ("generation_kwargs.presence_penalty", "refused in training"),
        ("generation_kwargs.stop", "use rollout.stop"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k", "use evaluation.top_k"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample", "use evaluation.top_k = 1, which is greedy"),
        ("seed", "use run.seed"),
        ("learner.entropy_coef", "use loss.entropy_coef"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "learner.microbatch_tokens"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "use evaluation.temperature"),
        ("actor_rollout_ref.model.lora_rank", "use model.lora.rank"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "use [agents]: tools"),
        ("critic.optim.lr", "use [loss.advantage_options]"),
        ("reward_model.model.path", 'use task.reward = "judge:rubric.toml"'),
        ("algorithm.rollout_correction.rollout_is", "use loss.importance_level"),
        ("trainer.no_such_key", "not there"),
    ],
)
def test_the_hint_says_what_to_write_or_that_there_is_nothing(key: str, words: str) -> None:
    assert words in hint(key)


def test_every_option_is_on_the_page() -> None:
    trl, verl = set(), set()
    for line in re.findall(r"^\|.*\|$", (ROOT / table.PAGE).read_text(), re.MULTILINE):
        cells = line.strip("|").split("|")
        first, second = cells[1:3] if cells[0].startswith(" `") and "." in cells[0] else cells[:2]
        trl |= {*re.findall(r"[\w*]+", first)}
        at = ""
        for name in re.findall(r"[\w.*]+", second):
            at = at.removesuffix(".*").rpartition(".")[0] + name if name.startswith(".") else name
            verl.add(at)
    assert [field for field in TRL if not any(fnmatchcase(field, name) for name in trl)] == []
    assert [key for key in VERL if not any(fnmatchcase(f".{key}", f"*.{name}") for name in verl)] == []


def test_the_table_of_options_is_of_these_lists() -> None:
    assert table.page() == (ROOT / table.PAGE).read_text(), "run python -m tests.support.peers.table"


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("learning_rate", table.HAVE),
        ("loss_type", table.HAVE),
        ("actor_rollout_ref.rollout.n", table.HAVE),
        ("fsdp", table.OTHERWISE),
        ("gradient_accumulation_steps", table.HAVE),
        ("trainer.val_before_train", table.OTHERWISE),
        ("top_k", table.REFUSED),
        ("top_p", table.REFUSED),
        ("data.truncation", table.REFUSED),
        ("neftune_noise_alpha", table.MISSING),
        ("critic.profiler.enable", table.MISSING),
    ],
)
def test_the_mark_of_an_option_is_how_its_hint_begins(key: str, wanted: str) -> None:
    assert table.mark(key) == wanted


@pytest.mark.parametrize(
    ("key", "near"),
    [("loss.clip_lo", "loss.clip_low"), ("learner.lr_schedul", "lr_schedule")],
)
def test_a_misspelt_key_of_ours_is_still_led_to_the_near_one(key: str, near: str) -> None:
    assert "did you mean" in hint(key)
    assert near in hint(key)


def test_without_a_minibatch_size_a_batch_of_any_size_is_one_update() -> None:
    assert preset("trl-grpo").groups_per_update == 1
    config = preset("trl-grpo", "--algorithm.batch_size", "64", "--learner.num_ranks", "4")
    assert (config.learner.minibatch_size, config.groups_per_update) == (None, 64)
