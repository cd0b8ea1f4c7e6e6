"""What one step's update works on: the batch as columns, its plan of mini-batches, and the tensors the loss reads.

Suffixes: M response tokens of the batch (here) or of a micro-batch (`inputs`), R responses.

A response whose advantage is 0 adds nothing to the surrogate. If neither KL nor entropy is in the loss, it is counted
in the denominators but not computed: loss and gradient are the same. GRPO, which keeps homogeneous groups, saves much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.tree import Config, LossConfig
from bapo.types import Batch
from learner.anchors import GenerationMemory, known_anchors
from learner.batching import Columns, Int64s, MicroBatch, columns_of, minibatches
from learner.loss import TokenInputs, token_weights


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """Step t between PROX and theta_{t+1}. Only `anchor_M` changes: unknown anchors are filled in."""

    batch: Batch
    columns: Columns
    plan: list[list[int]]
    """Groups of each mini-batch, epoch after epoch."""
    active_R: NDArray[np.bool_]
    """Responses that add to the loss or its gradient."""
    rollout_M: Tensor
    anchor_M: Tensor
    """NaN where not known yet."""
    advantage_R: Tensor
    reference_M: Tensor | None = None

    def inputs(self, micro: MicroBatch, weight_R: Tensor) -> TokenInputs:
        """What the loss of one micro-batch is made of."""
        return TokenInputs(
            anchor_M=self.anchor_M[micro.slot_M],
            rollout_M=self.rollout_M[micro.slot_M],
            reference_M=None if self.reference_M is None else self.reference_M[micro.slot_M],
            advantage_M=self.advantage_R[micro.response_M],
            weight_M=weight_R[micro.response_M],
        )

    def responses(self, k: int) -> Int64s:
        """Responses of mini-batch k, also those that are not computed."""
        return self.columns.responses_of(self.plan[k])

    def active(self, k: int) -> Int64s:
        """Responses of mini-batch k that are computed."""
        responses = self.responses(k)
        return responses[self.active_R[responses]]

    def weights(self, k: int, settings: LossConfig, max_response_tokens: int) -> Tensor:
        """[R] weight of each token of a response in the loss of mini-batch k; 0 for other responses."""
        responses = self.responses(k)
        weights = np.zeros(len(self.columns.group_R), dtype=np.float32)
        weights[responses] = token_weights(self.columns.lengths_R[responses], settings.aggregation, max_response_tokens)
        return torch.from_numpy(weights).to(self.rollout_M.device)

    def unknown_outside(self, k: int) -> Int64s:
        """Computed responses whose anchor is not known, but for those of mini-batch k."""
        first_M = self.anchor_M[torch.from_numpy(self.columns.starts_R[:-1]).to(self.anchor_M.device)]
        unknown_R = first_M.isnan().cpu().numpy() & self.active_R
        unknown_R[self.responses(k)] = False
        return np.flatnonzero(unknown_R)

    def fill_anchors(self, responses: Int64s, found_M: Tensor) -> None:
        """Take the anchors of these responses from `found_M`, where they are unknown."""
        used_R = np.zeros(len(self.columns.group_R), dtype=bool)
        used_R[responses] = True
        mask_M = torch.from_numpy(np.repeat(used_R, self.columns.lengths_R)).to(self.anchor_M.device)
        self.anchor_M = torch.where(mask_M & self.anchor_M.isnan(), found_M, self.anchor_M)


def make_step(batch: Batch, config: Config, memory: GenerationMemory, device: torch.device) -> Step:
    """Lay out a batch that is not empty. Raises: ContractError."""
    settings, learner = config.loss, config.learner
    columns = columns_of(batch, settings)
    return Step(
        batch=batch,
        columns=columns,
        plan=[
            groups
            for epoch in range(learner.epochs)
            for groups in minibatches(
                len(batch.entries), learner.minibatch_size, seed=config.run.seed, step=batch.step, epoch=epoch
            )
        ],
        active_R=(columns.advantage_R != 0) | columns.sft_R | (settings.kl_coef > 0) | (settings.entropy_coef > 0),
        rollout_M=torch.from_numpy(columns.rollout_logprobs_M).to(device),
        anchor_M=torch.from_numpy(known_anchors(batch, columns, settings, memory)).to(device),
        advantage_R=torch.from_numpy(columns.advantage_R).to(device),
    )
