"""What one step's update works on: the batch as columns, its plan of mini-batches, and the tensors the loss reads.

Suffixes: M response tokens of the batch (here) or of a micro-batch (`inputs`), R responses.

A response whose advantage is 0 adds nothing to the surrogate. If neither KL nor entropy is in the loss, it is counted
in the denominators but not computed: loss and gradient are the same. GRPO, which keeps homogeneous groups, saves much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.objective import LossConfig
from bapo.config.tree import Config
from bapo.types import Batch
from learner.anchors import GenerationMemory, known_anchors
from learner.batching import Columns, Int64s, MicroBatch, columns_of, minibatches, rows_of
from learner.losses.aggregation import token_weights
from learner.losses.base import Rows, TokenInputs
from learner.losses.corrections import importance_weight
from learner.token_trace import TokenTrace


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """Step t between PROX and theta_{t+1}.

    Log-probs that are found out on the way are filled in (NaN: not known yet); with a critic, advantages are replaced.
    """

    batch: Batch
    columns: Columns
    plan: list[list[int]]
    """Groups of each mini-batch, epoch after epoch; those of kind sft are not among them."""
    active_R: NDArray[np.bool_]
    """Responses that add to the loss or its gradient."""
    rollout_M: Tensor
    anchor_M: Tensor
    theta_t_M: Tensor
    """log pi_theta_t, as far as some pass needed it."""
    newest_M: Tensor
    """log pi_theta of the last mini-batch, before its own optimizer step."""
    advantage_M: Tensor
    expert_M: Tensor
    """bool: no policy sampled the token."""
    reference_M: Tensor | None = None
    reference_share: float = 1.0
    """Share of the KL term to the reference (kl_ref = convex)."""
    trace: TokenTrace | None = None
    """In steps whose tokens are recorded."""
    facts: dict[str, float] = field(default_factory=dict)
    """What the records should say of this step besides its sums; of the newest mini-batch."""

    def inputs(self, micro: MicroBatch, weight_M: Tensor) -> TokenInputs:
        """What the loss of one micro-batch is made of. `weight_M`: of the whole batch."""
        return self._inputs(micro.slot_M, micro.rows, weight_M)

    def whole_inputs(self, k: int, weight_M: Tensor) -> tuple[Tensor, TokenInputs]:
        """(places in the batch, inputs) of all computed tokens of mini-batch k."""
        slot_M, rows = self._places(self.active(k))
        return slot_M, self._inputs(slot_M, rows, weight_M)

    def _inputs(self, slot_M: Tensor, rows: Rows, weight_M: Tensor) -> TokenInputs:
        return TokenInputs(
            rows=rows,
            anchor_M=self.anchor_M[slot_M],
            rollout_M=self.rollout_M[slot_M],
            reference_M=None if self.reference_M is None else self.reference_M[slot_M],
            advantage_M=self.advantage_M[slot_M],
            weight_M=weight_M[slot_M],
            expert_M=self.expert_M[slot_M],
            reference_share=self.reference_share,
        )

    def responses(self, k: int) -> Int64s:
        """Responses of mini-batch k, also those that are not computed, but not those that are left out."""
        responses = self.columns.responses_of(self.plan[k])
        return responses[~self.columns.left_out_R[responses]]

    def active(self, k: int) -> Int64s:
        """Responses of mini-batch k that are computed."""
        responses = self.responses(k)
        return responses[self.active_R[responses]]

    def weights(self, k: int, settings: LossConfig, max_response_tokens: int) -> Tensor:
        """[M] weight of each token in the loss of mini-batch k; 0 for tokens of other responses."""
        responses, columns = self.responses(k), self.columns
        kept_M = self._kept(responses, settings)
        lengths_R = columns.lengths_R[responses]
        if kept_M is not None:
            lengths_R = np.add.reduceat(kept_M.astype(np.int64), columns.starts_R[:-1])[responses]
        weights_R = np.zeros(len(columns.group_R))
        weights_R[responses] = token_weights(
            lengths_R,
            settings.aggregation,
            max_response_tokens,
            group_R=columns.group_R[responses],
            replayed_R=columns.replayed_R[responses],
        )
        weights_M = np.repeat(weights_R, columns.lengths_R)
        if kept_M is not None:
            weights_M *= kept_M
        return torch.from_numpy(weights_M.astype(np.float32)).to(self.rollout_M.device)

    def _kept(self, responses: Int64s, settings: LossConfig) -> NDArray[np.bool_] | None:
        """[M] tokens that the importance weight leaves in, when the mean is over those alone; None: all."""
        if settings.importance_denominator != "kept":
            return None
        slot_M, rows = self._places(responses)
        _, found_M = importance_weight(self.anchor_M[slot_M], self.rollout_M[slot_M], rows, settings)
        assert found_M is not None
        kept_M = torch.zeros_like(self.rollout_M, dtype=torch.bool)
        kept_M[slot_M] = found_M
        return kept_M.cpu().numpy()

    def _places(self, responses: Int64s) -> tuple[Tensor, Rows]:
        """Where the tokens of these responses stand in the batch, and which response each belongs to."""
        columns, device = self.columns, self.rollout_M.device
        mask_R = np.zeros(len(columns.group_R), dtype=bool)
        mask_R[responses] = True
        slots = np.flatnonzero(np.repeat(mask_R, columns.lengths_R))
        return torch.from_numpy(slots).to(device), rows_of(columns.lengths_R[np.sort(responses)], device)

    def unknown(self, *, but_for: int | None) -> Int64s:
        """Computed responses whose anchor is not known, but for those of this mini-batch."""
        first_M = self.anchor_M[torch.from_numpy(self.columns.starts_R[:-1]).to(self.anchor_M.device)]
        unknown_R = first_M.isnan().cpu().numpy() & self.active_R
        if but_for is not None:
            unknown_R[self.responses(but_for)] = False
        return np.flatnonzero(unknown_R)

    def leave_out(self, groups: Int64s, config: Config) -> None:
        """Take these groups out of the step: of its mini-batches, its loss and its denominators."""
        if not len(groups):
            return
        gone_R = np.isin(self.columns.group_R, groups)
        self.columns.left_out_R[gone_R] = True
        self.active_R &= ~gone_R
        self.plan = _plan(self.batch, config, frozenset(groups.tolist()))

    def scale_advantages(self, factor_R: NDArray[np.float32]) -> None:
        """Multiply the advantage of every response by its factor."""
        factor_M = np.repeat(factor_R, self.columns.lengths_R)
        self.advantage_M = self.advantage_M * torch.from_numpy(factor_M).to(self.advantage_M.device)

    def fill_anchors(self, responses: Int64s, found_M: Tensor) -> None:
        """Take log pi_theta_t of these responses from `found_M`; it is their anchor, where that is unknown."""
        self.theta_t_M = self._filled(self.theta_t_M, responses, found_M)
        self.anchor_M = self._filled(self.anchor_M, responses, found_M)

    def fill_newest(self, responses: Int64s, found_M: Tensor) -> None:
        """Keep what the last mini-batch's own pass gave."""
        self.newest_M = self._filled(self.newest_M, responses, found_M)

    def _filled(self, column_M: Tensor, responses: Int64s, found_M: Tensor) -> Tensor:
        used_R = np.zeros(len(self.columns.group_R), dtype=bool)
        used_R[responses] = True
        mask_M = torch.from_numpy(np.repeat(used_R, self.columns.lengths_R)).to(column_M.device)
        return torch.where(mask_M & column_M.isnan(), found_M, column_M)


def make_step(batch: Batch, config: Config, memory: GenerationMemory, device: torch.device) -> Step:
    """Lay out a batch that is not empty. Raises: ContractError."""
    settings = config.loss
    columns = columns_of(batch, config)
    active_R = columns.advantage_R != 0
    advantage_M = np.repeat(columns.advantage_R, columns.lengths_R)
    rollout_M = torch.from_numpy(columns.rollout_logprobs_M).to(device)
    return Step(
        batch=batch,
        columns=columns,
        plan=_plan(batch, config),
        active_R=(active_R | adds_without_advantage(settings)) & ~columns.left_out_R & ~columns.sft_R,
        rollout_M=rollout_M,
        anchor_M=torch.from_numpy(known_anchors(batch, columns, settings, memory)).to(device),
        theta_t_M=torch.full_like(rollout_M, torch.nan),
        newest_M=torch.full_like(rollout_M, torch.nan),
        advantage_M=torch.from_numpy(advantage_M).to(device),
        expert_M=torch.from_numpy(np.repeat(columns.expert_R, columns.lengths_R)).to(device),
    )


def _plan(batch: Batch, config: Config, left_out: frozenset[int] = frozenset()) -> list[list[int]]:
    learner = config.learner
    groups = [i for i, entry in enumerate(batch.entries) if entry.kind == "rl" and i not in left_out]
    once = learner.epochs_until is not None and batch.step > learner.epochs_until
    return [
        [groups[i] for i in chosen]
        for epoch in range(1 if once else learner.epochs)
        for chosen in minibatches(
            len(groups), learner.minibatch_size, seed=config.run.seed, step=batch.step, epoch=epoch
        )
    ]


def adds_without_advantage(settings: LossConfig) -> bool:
    """Whether a response whose advantage is 0 still changes the loss, its gradient or its denominators."""
    return (
        settings.kl_coef > 0
        or settings.entropy_coef > 0
        or settings.name == "kimi"
        or settings.advantage == "gae"
        or settings.importance_denominator == "kept"
    )
