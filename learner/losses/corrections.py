"""The importance weight w = anchor / alpha: for a policy that sampled, but is not the one that the ratio is centred on.

    level     token      w_t = anchor_t / alpha_t
              sequence   the product over the response, for each of its tokens
              geometric  the geometric mean over the response
    mode      truncate   min(w, C)
              mask       w within [floor, C], and what is outside is left out
    veto      a response with any token of anchor / alpha below the bound is left out, whatever the level

Source: AReaL `ppo_actor_loss_fn` and `apply_rejection_sampling`; verl `rollout_corr_helper`; TRL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.config.objective import LossConfig
from learner.losses.base import Rows
from learner.losses.ratios import geometric_ratio, ratio, sequence_ratio


def importance_weight(
    anchor_M: Tensor, rollout_M: Tensor, rows: Rows, settings: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """[M] w without gradient, and [M] bool which tokens stay in the loss (None: all)."""
    anchor_M = anchor_M.detach()
    weight_M = _raw_weight(anchor_M, rollout_M, rows, settings.importance_level)
    kept_M = None
    if settings.importance_mode == "mask":
        kept_M = _within(weight_M, settings.importance_floor, settings.importance_cap)
    elif settings.importance_cap is not None:
        weight_M = weight_M.clamp(max=settings.importance_cap)
    if settings.importance_veto is not None:
        stays_M = _without_veto(anchor_M, rollout_M, rows, settings.importance_veto)
        kept_M = stays_M if kept_M is None else kept_M & stays_M
    return weight_M, kept_M


def _raw_weight(anchor_M: Tensor, rollout_M: Tensor, rows: Rows, level: str) -> Tensor:
    if level == "sequence":
        return rows.spread(sequence_ratio(anchor_M, rollout_M, rows))
    if level == "geometric":
        return rows.spread(geometric_ratio(anchor_M, rollout_M, rows))
    return ratio(anchor_M, rollout_M)


def _within(weight_M: Tensor, floor: float | None, cap: float | None) -> Tensor:
    kept_M = torch.ones_like(weight_M, dtype=torch.bool)
    if floor is not None:
        kept_M &= weight_M >= floor
    if cap is not None:
        kept_M &= weight_M <= cap
    return kept_M


def _without_veto(anchor_M: Tensor, rollout_M: Tensor, rows: Rows, veto: float) -> Tensor:
    below_R = rows.sum((ratio(anchor_M, rollout_M) < veto).float())
    return rows.spread(below_R) == 0
