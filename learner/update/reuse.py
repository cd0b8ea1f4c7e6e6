"""Effective sample size of reused groups under pi_theta_t.

    W_j = prod_t pi_theta_t(y_jt | .) / alpha_B(y_jt | .)      over the whole response j of the group
    ess = (sum_j W_j)^2 / (G sum_j W_j^2)                      1/G (one response counts) .. 1 (all count alike)

    loss.x3_min_ess      groups of X3 below it are excluded from loss and denominators of the step
    loss.x3_ess_weight   the advantages of the others are multiplied by it

The log-probs of pi_theta_t are those of the decoupled loss, but are needed before the first mini-batch.
Suffixes: E groups of the batch, R responses, M response tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bapo.algorithms.divergences import effective_share
from bapo.config.tree import Config
from bapo.core.types import Origin
from learner.batch.packing import Columns, Int64s
from learner.update.step_state import StepInputs

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


def reused_groups(inputs: StepInputs) -> Int64s:
    """Indices of the groups of X3 in the batch."""
    return np.flatnonzero([entry.origin is Origin.X3 and entry.kind == "rl" for entry in inputs.batch.entries])


def reused_responses(inputs: StepInputs) -> Int64s:
    """Their computed responses."""
    responses = inputs.columns.responses_of(reused_groups(inputs).tolist())
    return responses[inputs.active_R[responses]]


def weigh_reused(inputs: StepInputs, theta_t_M: Tensor, config: Config) -> tuple[StepInputs, dict[str, float]]:
    """Skip or weight the groups of X3, with counts to log; needs log pi_theta_t of their responses."""
    settings, groups = config.loss, reused_groups(inputs)
    if not len(groups):
        return inputs, {}
    ess_E = group_ess(inputs.columns, theta_t_M.cpu().numpy(), groups)
    dropped = groups[ess_E < settings.x3_min_ess] if settings.x3_min_ess is not None else groups[:0]
    facts: dict[str, float] = {"x3_group_ess": float(ess_E.mean()), "x3_left_out": len(dropped)}
    inputs = inputs.without(dropped, config)
    if settings.x3_ess_weight:
        factor_E = np.ones(len(inputs.batch.entries), dtype=np.float32)
        factor_E[groups] = ess_E
        inputs = inputs.scaled(factor_E[inputs.columns.group_R])
    return inputs, facts


def group_ess(columns: Columns, theta_t_M: Float32s, groups: Int64s) -> Float64s:
    """[len(groups)] ess of each of these groups, over its responses with known log-probs; 1 if there are none."""
    gap_M = theta_t_M.astype(np.float64) - columns.rollout_logprobs_M
    gap_R = np.add.reduceat(gap_M, columns.starts_R[:-1])
    return np.array([_ess(gap_R[columns.group_R == group]) for group in groups])


def _ess(log_weights: Float64s) -> float:
    known = log_weights[~np.isnan(log_weights)]
    return effective_share(known) if len(known) else 1.0
