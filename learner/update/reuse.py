"""Reused groups under pi_theta_t: their effective sample size, and their pass rate today.

    W_j = prod_t pi_theta_t(y_jt | .) / alpha_B(y_jt | .)      over the whole response j of the group
    ess = (sum_j W_j)^2 / (G sum_j W_j^2)                      1/G (one response counts) .. 1 (all count alike)
    J   = sum_j W_j r_j / sum_j W_j                            the mean reward that pi_theta_t would have;
                                                               here every W_j is at least e^-5 of the largest

    loss.x3_min_ess      groups of X3 below it are excluded from loss and denominators of the step
    loss.x3_baseline     current: A_j = (r_j - J) / sqrt(J (1 - J) + eps) instead of the mean and deviation of the day
                         on which the group was sampled (eq. 2), which push what has been learned since once more;
                         groups with J outside [1/2G, 1 - 1/2G] are excluded: within half a response of all incorrect
                         or all right

Every response of the group counts, also one whose stored advantage is 0; not those that the overlong filter left out.
The log-probs of pi_theta_t are those of the decoupled loss, but are needed before the first mini-batch.
Suffixes: E groups of the batch, R responses, M response tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bapo.core.types import Origin
from learner.advantages.of_batch import entry_factor
from learner.batch.columns import Columns, Int64s
from learner.diagnostics.divergences import effective_share
from learner.update.hooks import Given, UpdateHook
from learner.update.step import Step, StepInputs

MAX_LOG_WEIGHT = 5.0
"""Most nats between the largest and the smallest log W_j of a group in J: a response that pi_theta_t has left counts
little, but not as nothing."""
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


class Reuse(UpdateHook):
    """Leaves groups of X3 out of the step, or gives them another baseline."""

    @classmethod
    def is_wanted(cls, given: Given) -> bool:
        return given.config.loss.weighs_reused

    def prepare(self, step: Step) -> None:
        """Weigh the groups by the log-probs of their responses under pi_theta_t."""
        reused = reused_responses(step.inputs)
        if len(reused):
            step.fill_theta_t(reused, self.passes.evaluate(self.policy.logprobs, step.inputs, reused))
        weigh_reused(step)


def reused_groups(inputs: StepInputs) -> Int64s:
    """Indices of the groups of X3 in the batch."""
    return np.flatnonzero([entry.origin is Origin.X3 and entry.kind == "rl" for entry in inputs.batch.entries])


def reused_responses(inputs: StepInputs) -> Int64s:
    """Their responses, without those left out of the step."""
    responses = inputs.columns.responses_of(reused_groups(inputs).tolist())
    return responses[~inputs.columns.left_out_R[responses]]


def weigh_reused(step: Step) -> None:
    """Skip groups of X3, or change their baseline, with counts to log; needs log pi_theta_t of their responses."""
    inputs, groups = step.inputs, reused_groups(step.inputs)
    if not len(groups):
        return
    settings = inputs.config.loss
    log_weight_R = response_log_weights(inputs.columns, step.theta_t_M.cpu().numpy())
    ess_E = group_ess(inputs.columns, log_weight_R, groups)
    is_dropped_E = ess_E < (settings.x3_min_ess or 0.0)
    step.facts["x3_group_ess"] = float(ess_E.mean())
    if settings.x3_baseline == "current":
        rate_E = current_pass_rates(inputs, log_weight_R, groups)
        size_E = np.array([inputs.batch.entries[group].group.size for group in groups])
        # Not 1/G: rounding must not decide about a group with one success.
        is_dropped_E |= (rate_E * size_E < 0.5) | (rate_E * size_E > size_E - 0.5)
        step.facts["x3_pass_rate"] = float(rate_E.mean())
        inputs = with_current_baseline(inputs, groups, rate_E)
    dropped = groups[is_dropped_E]
    step.facts["x3_left_out"] = len(dropped)
    step.inputs = inputs.without(dropped)


def response_log_weights(columns: Columns, theta_t_M: Float32s) -> Float64s:
    """[R] log W_j of each response in nats; NaN where log pi_theta_t is not known."""
    gap_M = theta_t_M.astype(np.float64) - columns.rollout_logprobs_M
    return np.add.reduceat(gap_M, columns.starts_R[:-1])


def group_ess(columns: Columns, log_weight_R: Float64s, groups: Int64s) -> Float64s:
    """[len(groups)] ess of each of these groups, over its responses with known log-probs; 1 if there are none."""
    return np.array([_ess(log_weight_R[columns.group_R == group]) for group in groups])


def current_pass_rates(inputs: StepInputs, log_weight_R: Float64s, groups: Int64s) -> Float64s:
    """[len(groups)] J of each of these groups, with log W_j at least the largest minus MAX_LOG_WEIGHT."""
    return np.array(
        [
            _pass_rate(log_weight_R[inputs.columns.group_R == group], inputs.batch.entries[group].group.rewards)
            for group in groups
        ]
    )


def with_current_baseline(inputs: StepInputs, groups: Int64s, rate_E: Float64s) -> StepInputs:
    """The step with A_j = (r_j - J) / sqrt(J (1 - J) + eps), times the weights of entry and origin."""
    columns, settings = inputs.columns, inputs.config.loss
    advantage_R = columns.advantage_R.copy()
    for group, rate in zip(groups, rate_E, strict=True):
        entry = inputs.batch.entries[group]
        centered = entry.group.rewards.astype(np.float64) - rate
        advantage_R[columns.group_R == group] = (
            entry_factor(entry, settings) * centered / np.sqrt(rate * (1 - rate) + settings.advantage_eps)
        )
    return inputs.with_advantages(advantage_R)


def _ess(log_weights: Float64s) -> float:
    known = log_weights[~np.isnan(log_weights)]
    return effective_share(known) if len(known) else 1.0


def _pass_rate(log_weights: Float64s, rewards: Float32s) -> float:
    known = ~np.isnan(log_weights)
    if not known.any():
        return float(rewards.mean())
    weights = np.exp(np.maximum(log_weights[known] - log_weights[known].max(), -MAX_LOG_WEIGHT))
    return float(weights @ rewards[known] / weights.sum())
