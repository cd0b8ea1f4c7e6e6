"""Names of config keys in the paper, which are accepted, and in TRL and verl, which are reported with a hint.

Used by the config loader and for `docs/configuration.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from bapo.config.elsewhere import advice_on_trl, advice_on_verl

_TABLE = """
run.num_steps                  | T | max_steps, num_train_epochs | trainer.total_training_steps, trainer.total_epochs
run.name                       |   | run_name | trainer.experiment_name
run.root                       |   | output_dir | trainer.default_local_dir
run.seed                       |   | seed, data_seed | data.seed
model.path                     |   | model_name_or_path | *model.path
model.dtype                    |   | bf16, torch_dtype | *rollout.dtype
model.lora.rank                |   | lora_r, r | *model.lora_rank, *model.lora.rank
model.lora.alpha               |   | lora_alpha | *model.lora_alpha, *model.lora.alpha
model.lora.rslora              |   | use_rslora |
model.lora.targets             |   | lora_target_modules, target_modules | *model.target_modules, \
*model.lora.target_modules
model.adapter                  |   | | *model.lora_adapter_path, *model.lora.adapter_path
task.reward                    |   | reward_funcs, reward_weights | reward.custom_reward_function.path, \
reward.custom_reward_function.name, custom_reward_function.path, custom_reward_function.name
task.options.path              |   | train_dataset, dataset_name | data.train_files
task.options.held_out          |   | eval_dataset | data.val_files
algorithm.batch_size           | B | per_device_train_batch_size, generation_batch_size, gradient_accumulation_steps | \
data.train_batch_size
algorithm.group_size           | G | num_generations | *rollout.n
algorithm.high_window          | S | |
algorithm.max_reevaluated      | M | |
cadence.weight_sync_interval   | v | weight_sync_steps | async_training.trigger_parameter_sync_step
cadence.reevaluation_interval  | m | |
cadence.max_steps_ahead        |   | max_staleness | async_training.staleness_threshold
rollout.max_prompt_tokens      |   | max_prompt_length | data.max_prompt_length
rollout.max_response_tokens    |   | max_completion_length | data.max_response_length
rollout.temperature            |   | temperature | *rollout.temperature
rollout.top_p                  |   | top_p | *rollout.top_p
rollout.stop                   |   | stop, stop_strings |
rollout.engine_options         |   | vllm_gpu_memory_utilization, vllm_tensor_parallel_size | \
*rollout.gpu_memory_utilization, *rollout.tensor_model_parallel_size
learner.lr                     |   | learning_rate | *actor.optim.lr
learner.lr_schedule            |   | lr_scheduler_type | *actor.optim.lr_scheduler_type
learner.warmup_steps           |   | warmup_steps, warmup_ratio | *actor.optim.lr_warmup_steps
learner.betas                  |   | adam_beta1, adam_beta2 | *actor.optim.betas
learner.weight_decay           |   | weight_decay | *actor.optim.weight_decay
learner.grad_clip              |   | max_grad_norm | *actor.grad_clip, *actor.optim.clip_grad
learner.minibatch_size         |   | steps_per_generation | *actor.ppo_mini_batch_size
learner.epochs                 |   | num_iterations | *actor.ppo_epochs
learner.microbatch_tokens      |   | | \
*actor.ppo_max_token_len_per_gpu, *actor.ppo_micro_batch_size_per_gpu
learner.gradient_checkpointing |   | gradient_checkpointing | *model.enable_gradient_checkpointing
learner.num_ranks              |   | | trainer.n_gpus_per_node
loss.name                      |   | loss_type, importance_sampling_level | *actor.policy_loss.loss_mode
loss.aggregation               |   | | *actor.loss_agg_mode
loss.clip_low                  |   | epsilon | *actor.clip_ratio_low, *actor.clip_ratio
loss.clip_high                 |   | epsilon_high | *actor.clip_ratio_high
loss.dual_clip                 |   | delta | *actor.clip_ratio_c
loss.kl_coef                   |   | beta | *actor.kl_loss_coef, *actor.use_kl_loss, algorithm.kl_ctrl.kl_coef
loss.entropy_coef              |   | entropy_coef | *actor.entropy_coeff
loss.advantage                 |   | | algorithm.adv_estimator
loss.advantage_norm            |   | scale_rewards | algorithm.norm_adv_by_std_in_grpo
shaping.overlong_filter        |   | mask_truncated_completions |
checkpoint.every               |   | save_steps, save_strategy | trainer.save_freq
checkpoint.keep_last           |   | save_total_limit | trainer.max_actor_ckpt_to_keep
evaluation.every               |   | eval_steps, eval_strategy | trainer.test_freq
checkpoint.keep_best           |   | load_best_model_at_end |
evaluation.best_measure        |   | metric_for_best_model |
evaluation.patience            |   | early_stopping_patience |
evaluation.min_improvement     |   | early_stopping_threshold |
evaluation.temperature         |   | | *rollout.val_kwargs.temperature
evaluation.top_p               |   | | *rollout.val_kwargs.top_p
evaluation.top_k               |   | | *rollout.val_kwargs.top_k
evaluation.num_samples         |   | num_generations_eval | *rollout.val_kwargs.n
tracking.to                    |   | report_to | trainer.logger
tracking.project               |   | project | trainer.project_name
"""
"""Key | symbol in the paper | TRL's fields | verl's keys, where * stands for `actor_rollout_ref.`"""


class KeyNames(NamedTuple):
    """Names of a key elsewhere."""

    key: str
    """Dotted key."""
    symbol: str
    """Symbol in the paper; empty: none."""
    trl: tuple[str, ...]
    """Fields of TRL's GRPOConfig, AsyncGRPOConfig and ModelConfig, and keys of its `generation_kwargs`."""
    verl: tuple[str, ...]
    """Dotted keys of verl's configuration."""


def _rows() -> Iterator[KeyNames]:
    for line in _TABLE.strip().splitlines():
        key, symbol, trl, verl = (cell.strip() for cell in line.split("|"))
        yield KeyNames(key, symbol, _names(trl), _names(verl.replace("*", "actor_rollout_ref.")))


def _names(cell: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in cell.split(",") if name.strip())


NAMES = tuple(_rows())

_EARLIER = {
    "cadence.slack": "max_steps_ahead",
    "algorithm.x3_choice": "x3_policy",
    "algorithm.name": "composer",
    "supervision.first_pause_s": "restart_backoff_s",
}
"""Former names, used in recorded studies (docs/studies)."""

ALIASES: dict[tuple[str, ...], str] = {
    (*row.key.split(".")[:-1], row.symbol): row.key.rpartition(".")[2] for row in NAMES if row.symbol
} | {tuple(key.split(".")): name for key, name in _EARLIER.items()}
"""Accepted key -> last part of the actual key."""

_REPLAY = (
    "share", "first_step", "last_step", "window", "capacity", "per_prompt", "num_rows", "strategy", "keep_homogeneous",
    "min_success", "sft_items",
)  # fmt: skip
MOVED = {
    **{f"algorithm.replay.{name}": f"algorithm.options.{name}" for name in _REPLAY},
    **{f"algorithm.{name}": f"algorithm.options.{name}" for name in ("pilot_size", "pilot_prior")},
    **{f"loss.balanced_{name}": f"loss.options.{name}" for name in ("metric", "target", "low", "high")},
    "loss.kimi_tau": "loss.options.tau",
    "loss.luffy_gamma": "loss.options.gamma",
    "loss.tree_lambda": "loss.advantage_options.gae_lambda",
    "critic.gae_lambda": "loss.advantage_options.lam",
    **{f"critic.{name}": f"loss.advantage_options.{name}" for name in ("gamma", "value_clip")},
    **{f"critic.{name}": f"loss.advantage_options.critic_{name}" for name in ("lr", "grad_clip", "weight_decay")},
    **{f"supervised.{name}": f"algorithm.options.sft_{name}" for name in ("lr", "entropy_coef", "grad_clip")},
    **{
        f"selector.{name}": f"selector.{name}"
        for name in (
            "target", "pool_ratio", "mode", "band", "decay", "explore", "cooldown", "reference_prompts",
            "reference_every", "temperature", "projection_dim", "projection_lr", "projection_epochs", "embeddings",
            "curriculum_steps",
        )
    },
}  # fmt: skip
"""Key from when every config had the settings of every method -> the key of the method that has it. Where another is
chosen they have no effect, as then; so have those of methods that are gone: recorded configs have them."""
FIXED: dict[str, object] = {
    **{f"autoscaling.{name}_threshold": 0.1 for name in ("wait", "idle")},
    **{f"autoscaling.{name}_high": 0.1 for name in ("wait", "idle")},
    **{f"autoscaling.spare_{name}": 0.5 for name in ("threshold", "high")},
    **{f"autoscaling.stale_{name}": 0.01 for name in ("threshold", "high")},
    "autoscaling.smoothing_windows": 3,
    "autoscaling.headroom": 0.1,
    "autoscaling.hysteresis": 0.2,
    "autoscaling.ready_low": 1.0,
    "autoscaling.ready_high": 2.0,
    "autoscaling.max_up": 4,
    "autoscaling.max_down": 1,
    "rollout.report_timeout_s": 30.0,
    "diagnostics.warn_cooldown_steps": 20,
    "diagnostics.quiet_steps": 20,
    "algorithm.gaussian_share": 0.75,  # of a filter that is gone; every config had it
    "loss.x2_weight": 1.0,
    "loss.x3_weight": 1.0,
    "loss.x3_baseline": "stored",
    "loss.x3_min_ess": "null",
}
"""Former key -> the value that it always has now. Recorded configs have them; another value is refused."""


_HUB = "use bapo export RUN --push-to-hub ORG/NAME [--private], with HF_TOKEN or hf auth login"
_LORA = "write [model.lora] with rank, alpha, targets, rslora (docs/lora.md)"
_NO_QLORA = "not supported: a quantized model cannot be trained; [model.lora] keeps it in bfloat16 (docs/lora.md)"
_IN_BATCHES = (
    ", in batches: TRL counts updates, of which a batch has num_iterations x steps_per_generation / "
    "gradient_accumulation_steps (num_iterations, unless steps_per_generation is set)"
)
_ADVICE = {
    "loss_type": 'use loss.aggregation: "token_mean" for dapo and bnpo, "seq_mean_token_mean" for grpo, "const_len" '
    'for dr_grpo; or preset = "trl-grpo", which is TRL\'s default "dapo", or "cispo"',
    "top_p": "refused in training below 1.0 (rollout.top_p): the engine would sample from another distribution than "
    "the learner's; [evaluation] has top_p",
    "importance_sampling_level": 'use a preset: "sequence" is preset = "gspo"',
    "scale_rewards": 'use loss.advantage_norm: "std_ddof1" for true or "group", "center" for false or "none"; '
    '"batch" is not there',
    "epsilon": "use loss.clip_low and, unless epsilon_high is set, loss.clip_high",
    "per_device_train_batch_size": "use algorithm.batch_size, in prompts: "
    "per_device_train_batch_size x devices x steps_per_generation / num_generations, where steps_per_generation is "
    "gradient_accumulation_steps unless it is set",
    "generation_batch_size": "use algorithm.batch_size, in prompts: generation_batch_size / num_generations",
    "steps_per_generation": "use learner.minibatch_size, in prompts: algorithm.batch_size x "
    "gradient_accumulation_steps / steps_per_generation; null: one update per batch",
    "gradient_accumulation_steps": "use algorithm.batch_size, in prompts: per_device_train_batch_size x devices x "
    "gradient_accumulation_steps / num_generations; learner.microbatch_tokens alone bounds the memory of a pass",
    "max_steps": f"use run.num_steps{_IN_BATCHES}",
    "save_steps": f"use checkpoint.every{_IN_BATCHES}",
    "eval_steps": f"use evaluation.every{_IN_BATCHES}",
    "num_train_epochs": "use run.num_steps, in learner steps, each a batch of prompts",
    "warmup_steps": f"use learner.warmup_steps{_IN_BATCHES}",
    "warmup_ratio": "use learner.warmup_steps, in steps: the ratio x run.num_steps",
    "load_best_model_at_end": "use checkpoint.keep_best = 1 and bapo export RUN --best",
    "metric_for_best_model": "use evaluation.best_measure, the name of a held-out split",
    "callbacks": "use evaluation.patience and evaluation.min_improvement for early stopping; there are no callbacks",
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_private_repo", "hub_token"), _HUB),
    "report_to": 'use tracking.to, such as ["wandb"]',
    "remove_unused_columns": "not needed: a reward gets the columns that it asks for",
    "reward_weights": "use weights in task.reward = [{ function = ..., weight = ... }], divided by their sum, as the "
    "reward is in [0, 1]: without scale_rewards, multiply learner.lr by the sum, and divide loss.kl_coef by it "
    "(docs/your_task.md)",
    "use_peft": _LORA,
    "peft_config": _LORA,
    "modules_to_save": "not supported: only adapters train (docs/lora.md)",
    "lora_modules_to_save": "not supported: only adapters train (docs/lora.md)",
    "load_in_4bit": _NO_QLORA,
    "load_in_8bit": _NO_QLORA,
}
"""Names of TRL -> what to write, where the name of our key does not say it."""


def advice_for(written: tuple[str, ...]) -> str | None:
    """What to write for a key of TRL or verl: our key, or more, or that there is none; None for any other name."""
    if found := _of_verl(written):
        return f"use {found}"
    if found := advice_on_verl(".".join(written)) or _ADVICE.get(written[-1]):
        return found
    if (dotted := ".".join(written)) in FIXED:
        return f"it is no longer a setting, and always {FIXED[dotted]}"
    ours = our_key(written)
    return f"use {ours}" if ours else advice_on_trl(written[-1])


def names_of_trl() -> list[str]:
    """Its names of our keys."""
    return [name for row in NAMES for name in row.trl]


def of_value(written: object) -> str:
    """What to write for a value of TRL; empty for any other."""
    return '. For TRL\'s bnpo set loss.aggregation = "token_mean"' if written == "bnpo" else ""


def our_key(written: tuple[str, ...]) -> str | None:
    """The key for a key of TRL or verl, or None: ("learner", "learning_rate") -> "learner.lr"."""
    return _of_verl(written) or next((row.key for row in NAMES if written[-1] in row.trl), None)


def _of_verl(written: tuple[str, ...]) -> str | None:
    """The key for a key of verl, whose first tables may be left out."""
    dotted = ".".join(written)
    for row in NAMES:
        if dotted in row.verl or (len(written) > 1 and any(name.endswith(f".{dotted}") for name in row.verl)):
            return row.key
    return None


def as_override(token: str) -> str | None:
    """The override for Hydra's `a.b=c`; None for anything else, such as a file name."""
    match = re.fullmatch(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)", token, re.DOTALL)
    if not match:
        return None
    key = our_key(tuple(match[1].split("."))) or match[1]
    return f"--{key} {match[2]}"
