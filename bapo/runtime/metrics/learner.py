"""Metrics of rank 0 of the learner: step, batch, update and the terms of theorem 3.2."""

from __future__ import annotations

from bapo.runtime.metrics.metric import ORIGIN, RATIOS, STEPS, TRAINING, Label, Metric, Process

HERE = (Process.LEARNER,)
PHASES = ("wait_batch", "prox", "update", "diagnostics", "sync", "checkpoint", "step")
GPU_PHASES = ("prox", "update")
"""Phases that are also timed by the GPU's clock."""

STEP = (
    Metric("bapo_learner_step", "gauge", "Last finished step t.", "run/Overview", HERE),
    Metric("bapo_learner_policy_version", "gauge", "Latest published policy version.", "run/Overview", HERE),
    Metric(
        "bapo_learner_last_step_timestamp_seconds", "gauge", "Unix time of the last finished step.",
        "run/Overview", HERE,
    ),
    Metric(
        "bapo_learner_phase_seconds", "histogram", "Duration of a phase of a step; step: the whole step.",
        "system/Bottleneck", HERE, (Label("phase", PHASES),),
    ),
    Metric(
        "bapo_learner_phase_gpu_seconds", "histogram",
        "GPU time of a phase of a step on rank 0: host time ends when work is queued. No series on a CPU.",
        "system/Bottleneck", HERE, (Label("phase", GPU_PHASES),),
    ),
    Metric(
        "bapo_learner_mfu_ratio", "gauge",
        "Useful FLOPs of the last step over the GPU's bfloat16 peak during prox and update; NaN if unknown.",
        "system/Bottleneck", HERE,
    ),
    Metric(
        "bapo_learner_update_mfu_ratio", "gauge",
        "The same during update alone, without the pass for proximal log-probs; NaN if unknown.",
        "system/Bottleneck", HERE,
    ),
    Metric(
        "bapo_learner_tokens_total", "counter",
        "Trained response tokens, including reused groups.", "ledger/Trained", HERE,
    ),
    Metric("bapo_learner_steps_total", "counter", "Steps finished by this process.", "run/Overview", HERE),
    Metric(
        "bapo_learner_peak_memory_bytes", "gauge", "Peak memory of rank 0: resident, and allocated by CUDA.",
        "system/Processes", HERE, (Label("kind", ("resident", "cuda")),),
    ),
)  # fmt: skip

UPDATE = (
    Metric("bapo_learner_loss", "gauge", "Mean loss of the step's mini-batches.", "run/Optimization", HERE),
    Metric("bapo_learner_grad_norm", "gauge", "Gradient norm before clipping.", "run/Optimization", HERE),
    Metric("bapo_learner_entropy_nats", "gauge", "Mean token entropy.", "run/Optimization", HERE),
    Metric("bapo_learner_learning_rate", "gauge", "Learning rate of the step.", "run/Optimization", HERE),
    Metric(
        "bapo_learner_kl_penalty_nats", "gauge", "KL term of the loss: mean per token to the reference policy.",
        "run/Optimization", HERE,
    ),
    Metric(
        "bapo_learner_teacher_kl_nats", "gauge",
        "Distillation: reverse KL of the policy that sampled to the teacher, mean per token.", "run/Optimization", HERE,
    ),
    Metric("bapo_learner_clip_ratio", "gauge", "Fraction of tokens with a clipped ratio.", "run/Optimization", HERE),
)  # fmt: skip

OFF_POLICYNESS = (
    Metric(
        "bapo_learner_staleness_steps", "histogram",
        "Staleness of each trained group: step minus policy version; of X1 without stored rows that joined it.",
        "run/Off-policy drift", HERE, (ORIGIN,), STEPS,
    ),
    Metric(
        "bapo_learner_staleness_max_steps", "gauge", "Maximum staleness in the last batch.", "run/Off-policy drift",
        HERE, (ORIGIN,),
    ),
    Metric(
        "bapo_learner_importance_ratio", "histogram", "pi_theta_t / alpha of up to 512 tokens of each step and subset.",
        "run/Off-policy drift", HERE, (ORIGIN,), RATIOS, added_up=True,
    ),
    Metric(
        "bapo_learner_mismatch_kl_nats", "gauge",
        "KL per token between engine and learner with the same weights (groups of staleness 0).",
        "run/Off-policy drift", HERE,
    ),
    Metric(
        "bapo_learner_tv_distance_ratio", "gauge", "Total variation of pi_theta_t and alpha.", "run/Off-policy drift",
        HERE, (ORIGIN, Label("kind")),
    ),
    Metric(
        "bapo_learner_kl_nats", "gauge", "KL of alpha and pi_theta_t, per response.", "run/Off-policy drift",
        HERE, (ORIGIN, Label("direction")),
    ),
    Metric(
        "bapo_learner_ess_ratio", "gauge",
        "Effective sample size, as a fraction of responses or tokens.", "run/Off-policy drift",
        HERE, (ORIGIN, Label("level")),
    ),
    Metric(
        "bapo_learner_importance_ratio_max", "gauge", "Largest pi_theta_t / alpha.", "run/Off-policy drift",
        HERE, (ORIGIN,),
    ),
    Metric(
        "bapo_learner_improvement_bound", "gauge", "Theorem 3.2, estimated; <= 0: vacuous.", "run/Off-policy drift",
        HERE, (ORIGIN, Label("form")),
    ),
    Metric(
        "bapo_learner_improvement_penalty", "gauge", "Penalty terms of the bound: K TV and TV, without the factor 2.",
        "run/Off-policy drift", HERE, (ORIGIN, Label("of")),
    ),
    Metric(
        "bapo_learner_stability_constant", "gauge", "K_1, K_2, K_3 of theorem 3.2.", "run/Off-policy drift",
        HERE, (ORIGIN,),
    ),
)  # fmt: skip

BATCH = (
    Metric(
        "bapo_learner_reward_part_ratio",
        "gauge",
        "Mean of each of several rewards (task.reward) over the fresh groups of the last step.",
        "run/Difficulty",
        HERE,
        (Label("reward"),),
    ),
    Metric(
        "bapo_group_accuracy_groups",
        "gauge",
        "Groups of the last step, by correct responses (reward 1) of G.",
        "run/Difficulty",
        HERE,
        (Label("bin"), TRAINING),
    ),
    Metric(
        "bapo_prompts_unsolved",
        "gauge",
        "Sampled prompts without a correct response so far.",
        "run/Difficulty",
        HERE,
    ),
    Metric(
        "bapo_prompts_rescued_total",
        "counter",
        "Prompts that were all-incorrect at first and have a correct response now.",
        "run/Difficulty",
        HERE,
        (TRAINING,),
    ),
)

EPISODES = (
    Metric(
        "bapo_learner_episode_turns", "gauge",
        "Mean turns of a trained episode of the last step; NaN without episodes.", "run/Episodes", HERE,
    ),
    Metric(
        "bapo_learner_episode_context_tokens", "gauge",
        "Mean context tokens between the turns of an episode: tools and questions, never trained.",
        "run/Episodes", HERE,
    ),
    Metric(
        "bapo_learner_episode_forked_ratio", "gauge",
        "Share of episodes whose history was changed, so that they are more than one row.", "run/Episodes", HERE,
    ),
    Metric(
        "bapo_learner_episode_masked_ratio", "gauge",
        "Share of the sampled tokens that were too old to train, with rollout.stale_tokens = mask; NaN without it.",
        "run/Episodes", HERE,
    ),
    Metric(
        "bapo_learner_episode_tool_calls", "gauge",
        "Mean calls of tools per episode, in the format <tool_call>{\"name\": ...}</tool_call>; others do not count.",
        "run/Episodes", HERE,
    ),
)  # fmt: skip

CHECKPOINTS = (
    Metric(
        "bapo_checkpoint_last_success_timestamp_seconds", "gauge", "Unix time of the last checkpoint.",
        "system/Checkpoints and disk", HERE,
    ),
    Metric(
        "bapo_checkpoint_last_step", "gauge", "Step of the latest checkpoint; 0 before the first.",
        "system/Checkpoints and disk", HERE,
    ),
    Metric(
        "bapo_checkpoint_interval_steps", "gauge",
        "Steps between checkpoints: checkpoint.every.", "system/Checkpoints and disk", HERE
    ),
)  # fmt: skip

METRICS = (*STEP, *BATCH, *EPISODES, *UPDATE, *OFF_POLICYNESS, *CHECKPOINTS)
