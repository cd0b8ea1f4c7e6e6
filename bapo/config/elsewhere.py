"""What to do about a key of TRL or verl that has no counterpart here: what takes its place, or plainly nothing.

Keys that have a counterpart are in `names.py`. Lists: GRPOConfig of TRL 1.16 and the PPO trainer of verl 0.9
(tests/support/peers), whose every key must have a hint. docs/options.md is the table of all of them.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Advice(NamedTuple):
    """One answer for many keys."""

    text: str
    """What the error adds to "unknown key". How it begins says how the option is marked in docs/options.md: "use",
    "write" or "not needed" (have otherwise), "refused", "not there" or "not supported" (missing)."""
    trl: str
    """Fields of TRL and of its `generation_kwargs`, which are recognized in every section."""
    verl: str = ""
    """Patterns of dotted keys of verl, where * stands for any text; the first that fits counts."""


ADVICE = (
    # -- whole tables of verl, before patterns that begin with *
    Advice("not there: bapo view shows where a step's time goes; profile a process with py-spy", "",
           "*.profiler.* global_profiler.*"),
    Advice("use task.reward, of which a list has weights (docs/your_task.md); reward_range maps [-1, 1]", "",
           "reward_manager.* reward.reward_manager.* reward.num_workers reward_model.reward_manager "
           "reward_model.reward_loop_* reward_model.use_reward_loop reward_model.launch_reward_fn_async "
           "reward_model.num_workers"),
    Advice("use task.grading_timeout_s and task.grading_memory_mb: rewards run in processes of their own", "",
           "sandbox_fusion.* reward.sandbox_fusion.* reward_model.sandbox_fusion.*"),
    Advice("use task.reward = \"judge:rubric.toml\", a model behind an address (docs/your_task.md), or a function", "",
           "reward_model.* reward.reward_model.*"),
    Advice("use distillation.teacher, the address of a vLLM server that you start with the teacher's options, with "
           "loss.advantage = \"distillation\" (docs/methods.md#distillation)", "",
           "distillation.enabled distillation.teacher_models.* distillation.n_gpus_per_node distillation.nnodes"),
    Advice("use [loss.advantage_options] of loss.advantage = \"distillation\": teacher_weight, reward_weight, max_gap; "
           "the loss is that of [loss]", "",
           "distillation.distillation_loss.use_task_rewards distillation.distillation_loss.distillation_loss_coef "
           "distillation.distillation_loss.loss_max_clamp distillation.distillation_loss.use_policy_gradient "
           "distillation.distillation_loss.policy_loss_mode distillation.distillation_loss.clip_ratio*"),
    Advice("not there: reverse KL from the log-probs of the sampled tokens alone, and one teacher", "",
           "distillation.*"),
    Advice("not there: every run samples; bapo replay repeats a recorded step of the learner", "",
           "skip.* *.rollout.skip_*"),
    Advice("not needed: the buffer service holds what waits ([buffer])", "", "transfer_queue.*"),
    Advice("use [cadence]: weight_sync_interval, max_steps_ahead; algorithm.composer decides what a batch is", "",
           "trainer.v1.* trainer.use_v1"),
    Advice("use [loss.advantage_options] with loss.advantage = \"gae\", or preset = \"ppo\"", "",
           "critic.* algorithm.gamma algorithm.lam trainer.critic_warmup"),
    Advice("not needed: loss.kl_coef > 0 with loss.kl_ref = \"reference\" loads it, with the learner's settings", "",
            "actor_rollout_ref.ref.*"),
    # -- what has another form here
    Advice("use task.options = { chat_options = { enable_thinking = false } }", "chat_template_kwargs",
           "data.apply_chat_template_kwargs"),
    Advice("use learner.compile = true", "torch_compile torch_compile_backend torch_compile_mode",
           "*.use_torch_compile"),
    Advice("use loss.importance_level (token, sequence or geometric; none: no correction), importance_mode "
           "(truncate or mask), importance_cap and importance_floor, with loss.ratio_mode = \"decoupled\"",
           "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
           "vllm_importance_sampling_clip_min vllm_importance_sampling_cap", "algorithm.rollout_correction.*"),
    Advice('use learner.device = "cpu"', "use_cpu", "trainer.device"),
    Advice("use bapo train --resume RUN", "resume_from_checkpoint", "trainer.resume_mode trainer.resume_from_path"),
    Advice("use bapo eval; bapo train always trains", "do_train do_eval do_predict", "trainer.val_only"),
    Advice("not needed: held-out splits are evaluated before and after training, and by evaluation.every",
           "eval_on_start eval_delay", "trainer.val_before_train"),
    Advice('use model.dtype: "bfloat16" or "float32"; float16 is not supported',
           "fp16 fp16_full_eval bf16_full_eval tf32", "*.fsdp_config.dtype *.model_dtype reward_model.rollout.dtype"),
    Advice("use learner.lr_final, a share of lr; the schedules have no other parameters",
           "lr_scheduler_kwargs", "*.min_lr_ratio *.num_cycles *.warmup_style *.zero_indexed_step"),
    Advice("use learner.warmup_steps, in steps", "", "*.lr_warmup_steps_ratio"),
    Advice("use run.num_steps", "", "*.total_training_steps"),
    Advice("use learner.num_ranks and learner.shard_ranks (FSDP2), and learner.collective_timeout_min",
           "fsdp fsdp_config ddp_timeout",
           "*.fsdp_size *.nccl_timeout *.actor.strategy *.fsdp_config.strategy trainer.nnodes"),
    Advice("use learner.activation_gib, what layers may keep for the backward pass", "gradient_checkpointing_kwargs"),
    Advice("use rollout.engine_options = { max_model_len = ... }; default: max_prompt_tokens + max_response_tokens",
           "vllm_max_model_length", "*.rollout.max_model_len"),
    Advice("use rollout.engine_options (vLLM's EngineArgs)", "vllm_model_impl",
           "*.enforce_eager *.cudagraph_capture_sizes *.max_num_batched_tokens *.max_num_seqs *.enable_chunked_prefill "
           "*.enable_prefix_caching *.engine_kwargs.vllm *.rollout.pipeline_model_parallel_size "
           "*.rollout.data_parallel_size *.rollout.expert_parallel_size *.disable_log_stats *.rollout.engine_kwargs "
           "*.limit_images"),
    Advice("not needed: workers find each other by Ray",
           "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port"),
    Advice("not there: learner and engines work at the same time, so nothing puts an engine to sleep",
           "vllm_enable_sleep_mode", "*.free_cache_engine *.multi_stage_wake_up actor_rollout_ref.hybrid_engine"),
    Advice('use loss.kl_estimator ("k1", "k2" or "k3"), with loss.kl_ref = "reference"', "", "*.kl_loss_type"),
    Advice("not there: the KL term is in the loss (loss.kl_coef), not in the reward", "",
           "algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.*"),
    Advice("not there: the KL term is not multiplied by the ratio; loss.kl_ref and loss.kl_estimator choose it",
           "use_bias_correction_kl"),
    Advice('use loss.kl_restart_step, which replaces the base model once; a moving reference model is not there',
           "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"),
    Advice("not there; loss.importance_veto leaves out a response by its least likely token",
           "off_policy_mask_threshold"),
    Advice("not there: the entropy bonus is fixed (loss.entropy_coef) and counts all tokens",
           "top_entropy_quantile use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta "
           "entropy_target"),
    Advice("not there: that loss does not exist here; bapo config presets lists the methods",
           "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
           "*.policy_loss.* *.tau_pos *.tau_neg *.calculate_sum_pi_squared algorithm.use_pf_ppo algorithm.pf_ppo.*"),
    Advice('use loss.aggregation = "const_len", which divides by rollout.max_response_tokens', "",
           "*.loss_scale_factor"),
    Advice("use a list in task.reward: summed by weights, then normalized by group", "multi_objective_aggregation"),
    Advice("use evaluation.top_k = 1, which is greedy", "", "*.val_kwargs.do_sample"),
    Advice("refused in training: the engine would sample from another distribution than the learner's, and every "
           "ratio would be wrong; [evaluation] has top_k, min_p, min_tokens and penalties",
           "top_k min_p repetition_penalty min_tokens presence_penalty frequency_penalty generation_kwargs",
           "*.top_k *.do_sample *.ignore_eos"),
    Advice("refused: a grammar changes the distribution, and every ratio would be wrong; check the form in the reward",
           "vllm_structured_outputs_regex"),
    Advice("use [agents]: tools, environments, conversations of several turns (docs/agents.md)",
           "max_tool_calling_iterations tools environment_factory rollout_func",
           "*.multi_turn.* *.rollout.agent.* data.tool_config_path data.function_tool_path"),
    # -- data
    Advice("not there: every epoch is a new permutation by run.seed; algorithm.selector chooses prompts otherwise",
           "shuffle_dataset train_sampling_strategy length_column_name", "data.shuffle data.sampler.* "
           "data.validation_shuffle *.actor.shuffle"),
    Advice("use run.seed, for all randomness", "seed data_seed",
           "data.seed *.data_loader_seed *.fsdp_config.seed *.rollout.seed"),
    Advice("use task.options = { prompt_column = ... }; also answer_column, images_column and extra_columns", "",
           "data.prompt_key data.image_key data.reward_fn_key"),
    Advice("refused: a prompt that is cut asks something else; remove those longer than rollout.max_prompt_tokens from "
           "the data", "", "data.truncation data.filter_overlong_prompts data.filter_overlong_prompts_workers"),
    Advice("not there: shorten the file; held-out prompts are limited by evaluation.num_prompts", "",
           "data.train_max_samples data.val_max_samples data.val_batch_size"),
    Advice("not needed: the scheduler reads the data; a batch is always whole",
           "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
           "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order ignore_data_skip "
           "label_names per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches "
           "eval_use_gather_object prediction_loss_only batch_eval_metrics include_for_metrics",
           "data.dataloader_num_workers data.return_* data.use_shm data.image_patch_size"),
    Advice("not there: write a task (docs/your_task.md#a-task)", "", "data.custom_cls.* data.datagen.*"),
    Advice("not supported: video and audio", "", "data.video_key data.audio_key"),
    Advice("not there: the tokenizer and its chat template are those in the model's folder", "",
           "data.tokenizer *.tokenizer_path *.custom_chat_template *.skip_tokenizer_init"),
    # -- model
    Advice("refused: code that comes with a model is not run; use a model type of transformers", "trust_remote_code",
           "*.trust_remote_code *.external_lib"),
    Advice("not there: the model is loaded as its folder says, in float32; model.dtype is the precision of passes",
           "model_init_kwargs cast_lm_head_to_fp32 disable_dropout use_cache",
           "*.override_config *.hf_config_path *.model.use_shm"),
    Advice("use model.freeze_vision", "", "*.freeze_vision_tower"),
    Advice("use model.max_image_pixels", "", "data.mm_processor_kwargs"),
    Advice("refused: engines have no dropout, and every ratio would be noise (docs/lora.md)", "lora_dropout",
           "actor_rollout_ref.model.lora.dropout*"),
    Advice("not needed: model.lora.targets chooses the layers, a vision tower is never adapted (docs/lora.md)", "",
           "*.exclude_modules *.layered_summon"),
    Advice("not supported: plain LoRA only, merged in the engines (docs/lora.md)", "use_dora",
           "actor_rollout_ref.model.lora.*"),
    Advice("not supported: multi-token prediction", "", "*.mtp *.mtp.*"),
    Advice("not there: attention and log-probs have one implementation; learner.compile fuses the rest",
           "use_liger_kernel liger_kernel_config", "*.use_liger *.use_fused_kernels *.fused_kernel_options.* "
           "*.entropy_from_logits_with_chunking *.entropy_checkpointing *.tiled_mlp.* *.calculate_entropy"),
    Advice("not needed: sequences are packed without padding, and learner.logprob_chunk_tokens bounds the logits",
           "pad_to_multiple_of average_tokens_across_devices include_num_input_tokens_seen",
           "*.use_remove_padding *.pad_to_length *.pad_to_length_bucket *.entropy_from_logits_chunk_size "
           "*.use_prefix_grouper"),
    Advice("not needed: learner.microbatch_tokens bounds the memory of a pass", "auto_find_batch_size "
           "torch_empty_cache_steps", "*micro_batch_size *micro_batch_size_per_gpu *.use_dynamic_bsz "
           "*.log_prob_use_dynamic_bsz *max_token_len_per_gpu trainer.balance_batch"),
    Advice("not there: weights and moments stay on their device; shard them with learner.num_ranks", "deepspeed "
           "ds3_gather_for_generation accelerator_config", "*.param_offload *.optimizer_offload *.offload_policy "
           "*.enable_activation_offload *.wrap_policy.* *.reshard_after_forward *.forward_prefetch *.use_orig_params "
           "*.forward_only *.use_no_sync_for_gradient_accumulation"),
    Advice("not supported: tensor or sequence parallelism of the learner; FSDP2 shards it (learner.num_ranks)",
           "parallelism_config", "*.ulysses_sequence_parallel_size *.turbo_config.*"),
    Advice("not needed: learner ranks use FSDP2, not DDP",
           "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
           "local_rank"),
    Advice("not there: AdamW always, with eps 1e-8; its settings are in [learner]",
           "optim optim_args adam_epsilon optim_target_modules",
           "*.optimizer *.optimizer_impl *.override_optimizer_config"),
    Advice("not there: the loss has no such term", "label_smoothing_factor neftune_noise_alpha router_aux_loss_coef"),
    Advice("use run.deterministic", "full_determinism", "*.full_determinism"),
    Advice("not needed: every worker samples with vLLM, on its own GPU (rollout.engine_options)", "use_vllm vllm_mode "
           "use_transformers_paged use_transformers_continuous_batching "
           "transformers_continuous_batching_config cache_implementation",
           "*.rollout.name *.rollout.mode *.engine_kwargs.sglang *.engine_kwargs.trtllm *.rollout.load_format "
           "*.rollout.logprobs_mode *.calculate_log_probs *.rollout.scheduling_policy *.router_config_path"),
    Advice("use rollout.weight_transfer", "", "*.checkpoint_engine.* *.update_weights_bucket_megabytes"),
    Advice("use rollout.num_workers and max_workers", "", "*.rollout.nnodes *.rollout.n_gpus_per_node"),
    Advice("not supported: engines that only prefill or only decode", "", "*.disaggregation.*"),
    Advice("use rollout.max_prompt_tokens and rollout.max_response_tokens", "",
           "*.rollout.prompt_length *.rollout.response_length"),
    Advice("use algorithm.online_filter, or preset = \"dapo\"", "", "algorithm.filter_groups.*"),
    Advice("use algorithm.group_size", "", "*.actor.rollout_n"),
    Advice("not supported: quantized training or sampling", "",
           "*.quantization *.quantization_config_file *.qat *.qat.*"),
    Advice("not there: routing of experts is neither replayed nor measured", "",
           "*.router_replay.* *.enable_rollout_routing_replay *.moe_load_balance_metrics_interval"),
    # -- checkpoints, Hub, logs
    Advice("not there: a run uploads nothing by itself; bapo export RUN --push-to-hub ORG/NAME does",
           "hub_strategy hub_always_push hub_revision "
           "log_completions_hub_repo trackio_space_id trackio_bucket_id trackio_static_space_id",
           "trainer.default_hdfs_dir"),
    Advice("not there: all checkpoints hold weights, optimizer and buffer; checkpoint.every, keep_last and background",
           "save_only_model save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
           "*.checkpoint.* trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep "
           "trainer.esi_redundant_time"),
    Advice("not needed: a higher mean reward is better (evaluation.best_measure)", "greater_is_better"),
    Advice("not needed: every step is recorded (RUN/metrics.jsonl, the page, [tracking]); bapo logs RUN",
           "logging_steps logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level "
           "log_level_replica disable_tqdm debug skip_memory_metrics", "*.rollout.prometheus.* *.rollout.trace.*"),
    Advice("use bapo view RUN: the page shows responses; tracking.responses_every sends them to a tracker",
           "log_completions log_multimodal num_completions_to_print log_unique_prompts",
           "trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir"),
    # -- what remains of verl
    Advice("not there: RAY_ADDRESS connects to a cluster (docs/cluster.md)", "", "ray_kwargs.* *.ray_wait_register_*"),
    Advice("not there; [learner] and [rollout] are in docs/configuration.md", "",
           "actor_rollout_ref.* trainer.* data.*"),
)  # fmt: skip
"""In the order in which patterns are tried."""

_TRL = {name: advice.text for advice in ADVICE for name in advice.trl.split()}
_VERL = tuple((pattern, advice.text) for advice in ADVICE for pattern in advice.verl.split())


def advice_on_verl(dotted: str) -> str | None:
    """What to do about a key of verl without a counterpart; None for any other name."""
    return next((text for pattern, text in _VERL if fnmatchcase(dotted, pattern)), None)


def advice_on_trl(field: str) -> str | None:
    """What to do about a field of TRL without a counterpart; None for any other name."""
    return _TRL.get(field)
