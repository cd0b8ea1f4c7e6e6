"""What rank 0 of the learner exposes: the step, its batch, its update and what theorem 3.2 says of it."""

from __future__ import annotations

from bapo.metrics.metric import ORIGIN, STEPS, Label, Metric, Process

HERE = (Process.LEARNER,)
PHASES = ("wait_batch", "prox", "update", "diagnostics", "sync", "checkpoint", "step")

STEP = (
    Metric("bapo_learner_step", "gauge", "Step t that the learner finished last.", "run/Overview", HERE),
    Metric("bapo_learner_policy_version", "gauge", "Newest version that was published.", "run/Overview", HERE),
    Metric(
        "bapo_learner_last_step_timestamp_seconds", "gauge", "Unix time of the last finished step.",
        "run/Overview", HERE,
    ),
    Metric(
        "bapo_learner_phase_seconds", "histogram", "Seconds of one phase of a step; step: all of it.",
        "system/Who waits for whom", HERE, (Label("phase", PHASES),),
    ),
    Metric("bapo_learner_tokens_total", "counter", "Response tokens trained.", "ledger/Trained", HERE),
)  # fmt: skip

UPDATE = (
    Metric("bapo_learner_loss", "gauge", "Mean loss of the step's mini-batches.", "run/Optimisation", HERE),
    Metric("bapo_learner_grad_norm", "gauge", "Gradient norm before clipping.", "run/Optimisation", HERE),
    Metric("bapo_learner_entropy_nats", "gauge", "Mean token entropy.", "run/Optimisation", HERE),
    Metric("bapo_learner_clip_ratio", "gauge", "Share of tokens whose ratio is clipped.", "run/Optimisation", HERE),
)  # fmt: skip

OFF_POLICYNESS = (
    Metric(
        "bapo_learner_staleness_steps", "histogram", "Step minus policy version, of each group.",
        "run/Off-policyness", HERE, (ORIGIN,), STEPS,
    ),
    Metric(
        "bapo_learner_tv_distance_ratio", "gauge", "Total variation of pi_theta_t and alpha.", "run/Off-policyness",
        HERE, (ORIGIN, Label("kind")),
    ),
    Metric(
        "bapo_learner_kl_nats", "gauge", "KL of alpha and pi_theta_t, per response.", "run/Off-policyness",
        HERE, (ORIGIN, Label("direction")),
    ),
    Metric(
        "bapo_learner_ess_ratio", "gauge", "Share of responses or tokens that still count.", "run/Off-policyness",
        HERE, (ORIGIN, Label("level")),
    ),
    Metric(
        "bapo_learner_importance_ratio_max", "gauge", "Largest pi_theta_t / alpha.", "run/Off-policyness",
        HERE, (ORIGIN,),
    ),
    Metric(
        "bapo_learner_improvement_bound", "gauge", "Theorem 3.2, estimated; <= 0: vacuous.", "run/Off-policyness",
        HERE, (ORIGIN, Label("form")),
    ),
    Metric(
        "bapo_learner_improvement_penalty", "gauge", "Its penalties: K TV and TV, without a 2.",
        "run/Off-policyness", HERE, (ORIGIN, Label("of")),
    ),
    Metric(
        "bapo_learner_stability_constant", "gauge", "K_1, K_2, K_3 of theorem 3.2.", "run/Off-policyness",
        HERE, (ORIGIN,),
    ),
)  # fmt: skip

CHECKPOINTS = (
    Metric(
        "bapo_checkpoint_last_success_timestamp_seconds", "gauge", "Unix time of the last checkpoint.",
        "system/Checkpoints and disk", HERE,
    ),
)  # fmt: skip

METRICS = (*STEP, *UPDATE, *OFF_POLICYNESS, *CHECKPOINTS)
