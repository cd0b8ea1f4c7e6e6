"""Two responses under three policies, the numbers of V2 and V5, and what a loss makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bapo.config.objective import LossConfig
from learner.batch.microbatch import rows_of
from learner.losses.base import TokenInputs
from learner.losses.objective import Objective, TokenLosses, token_weights
from tests.support.learner import CPU
from tests.support.vectors import tokens, vector


def doubles(values: Sequence[float]) -> Tensor:
    """As the vectors have them, to 1e-6."""
    return torch.tensor(values, dtype=torch.float64)


# Two responses of 3 and 2 tokens, one after the other.
LENGTHS = np.array([3, 2])
ROWS = rows_of(LENGTHS, CPU)
OLD, NEW = (doubles(tokens(vector("V2.dapo")[name])) for name in ("old", "new"))
BEHAVE = doubles(tokens(vector("V5.decoupled_TIS_C2")["behave"]))
ADVANTAGE = doubles(np.repeat(vector("V2.dapo")["A"], LENGTHS).tolist())


def settings(name: str = "ppo", **fields: object) -> LossConfig:
    return LossConfig.model_validate({"name": name, "kl_coef": 0.0, "entropy_coef": 0.0, **fields})


def run(
    config: LossConfig, *, anchor: Tensor = OLD, rollout: Tensor = OLD, logprobs: Tensor = NEW, reference: float = 0.0
) -> TokenLosses:
    return Objective(config).token_losses(logprobs, inputs(anchor, rollout, reference))


def inputs(anchor: Tensor, rollout: Tensor, reference: float = 0.0, share: float = 1.0) -> TokenInputs:
    return TokenInputs(
        rows=ROWS,
        anchor_M=anchor,
        rollout_M=rollout,
        reference_M=torch.full_like(NEW, reference),
        advantage_M=ADVANTAGE,
        weight_M=torch.full_like(NEW, 0.2),
        expert_M=torch.zeros(5, dtype=torch.bool),
        reference_share=share,
    )


def mean(losses: TokenLosses, aggregation: str = "token_mean") -> float:
    weight_R = token_weights(LENGTHS, aggregation, 4)  # type: ignore[arg-type]
    return float((losses.surrogate_M * torch.from_numpy(np.repeat(weight_R, LENGTHS))).sum())


def gradient(config: LossConfig, anchor: Tensor = OLD, rollout: Tensor = OLD) -> list[float]:
    """d(sum of token losses) / d log pi of each token."""
    logprobs = NEW.clone().requires_grad_()
    run(config, anchor=anchor, rollout=rollout, logprobs=logprobs).surrogate_M.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()
