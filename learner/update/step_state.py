"""State of one step's update: immutable inputs, and log-probs that are filled during the update.

    StepInputs     the batch as columns and tensors, its advantages, its plan of mini-batches     replaced as a whole
    StepLogProbs   of the anchor, of pi_theta_t, of pi_ref and of the newest policy               NaN until a pass ran

Suffixes: M response tokens of the batch or of a micro-batch, R responses.

A response with advantage 0 does not contribute to the surrogate. Without KL and entropy in the loss, it counts in the
denominators but is not computed: loss and gradient are unchanged. This helps GRPO, which keeps zero-variance groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.algorithms.credits.registry import load_advantage, needs_critic
from bapo.algorithms.methods import LOSS
from bapo.config.objective import LossConfig
from bapo.config.tree import Config
from bapo.core.types import Batch
from bapo.runtime.vision import ImageReader
from learner.advantages.of_batch import token_advantages
from learner.batch.packing import Columns, Int64s, columns_of, minibatches, rows_of
from learner.losses.base import Rows, TokenInputs
from learner.losses.objective import importance_weight, token_weights
from learner.update.anchors import GenerationMemory, known_anchors, policy_shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The batch D_t as columns and tensors."""

    batch: Batch
    columns: Columns
    plan: tuple[tuple[int, ...], ...]
    """Groups of each mini-batch, by epoch; excludes kind sft."""
    active_R: NDArray[np.bool_]
    """Responses that contribute to the loss or its gradient."""
    rollout_M: Tensor
    """log alpha in nats."""
    advantage_M: Tensor
    expert_M: Tensor
    """bool: expert token, not sampled by a policy."""

    def responses(self, k: int) -> Int64s:
        """Responses of mini-batch k, including those not computed, without excluded ones."""
        responses = self.columns.responses_of(self.plan[k])
        return responses[~self.columns.left_out_R[responses]]

    def active(self, k: int) -> Int64s:
        """Responses of mini-batch k that are computed."""
        responses = self.responses(k)
        return responses[self.active_R[responses]]

    def slots(self, responses: Int64s) -> tuple[Tensor, Rows]:
        """Positions of the tokens of these responses in the batch, and their responses."""
        columns, device = self.columns, self.rollout_M.device
        slots = np.flatnonzero(self.mask(responses))
        return torch.from_numpy(slots).to(device), rows_of(columns.lengths_R[np.sort(responses)], device)

    def mask(self, responses: Int64s) -> NDArray[np.bool_]:
        """[M] whether each token belongs to one of these responses."""
        mask_R = np.zeros(len(self.columns.group_R), dtype=bool)
        mask_R[responses] = True
        return np.repeat(mask_R, self.columns.lengths_R)

    def spread(self, values_R: NDArray[np.floating]) -> Tensor:
        """[M] float32: the value of each token's response."""
        values_M = np.repeat(values_R, self.columns.lengths_R)
        return torch.from_numpy(values_M.astype(np.float32)).to(self.rollout_M.device)

    def token_mean(self, responses: Int64s) -> NDArray[np.float64]:
        """[R] weight of each token in a mean over the tokens of these responses."""
        weights_R = np.zeros(len(self.columns.lengths_R))
        weights_R[responses] = token_weights(self.columns.lengths_R[responses], "token_mean", 1)
        return weights_R

    def without(self, groups: Int64s, config: Config) -> Self:
        """The step without these groups in mini-batches, loss and denominators."""
        if not len(groups):
            return self
        gone_R = np.isin(self.columns.group_R, groups)
        return replace(
            self,
            columns=replace(self.columns, left_out_R=self.columns.left_out_R | gone_R),
            active_R=self.active_R & ~gone_R,
            plan=_plan(self.batch, config, frozenset(groups.tolist())),
        )

    def with_advantages(self, advantage_R: NDArray[np.float32], settings: LossConfig) -> Self:
        """The step with other advantages of its responses; computes those that no longer have 0."""
        columns = replace(self.columns, advantage_R=advantage_R)
        advantage_M = np.repeat(advantage_R, columns.lengths_R)
        return replace(
            self,
            columns=columns,
            advantage_M=self.spread(advantage_R),
            active_R=_active(columns, advantage_M, settings),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class StepLogProbs:
    """Log-probs in nats of the tokens of the batch under four policies; all [M], NaN where not computed yet."""

    anchor_M: Tensor
    theta_t_M: Tensor
    newest_M: Tensor
    """log pi_theta of the last mini-batch, before its own optimizer step."""
    reference_M: Tensor | None = None
    """None if the KL term does not need it."""
    reference_share: float = 1.0
    """Share of the KL term to the reference (kl_ref = convex)."""
    policy_share_M: Tensor | None = None
    """Of the policy in the anchor (ratio mode `interpolated`)."""

    def fill_theta_t(self, inputs: StepInputs, responses: Int64s, found_M: Tensor) -> None:
        """Set log pi_theta_t of these responses from `found_M`, and their unknown anchors."""
        self.theta_t_M = _filled(self.theta_t_M, inputs.mask(responses), found_M)
        self.anchor_M = _filled(self.anchor_M, inputs.mask(responses), found_M)

    def fill_newest(self, inputs: StepInputs, responses: Int64s, found_M: Tensor) -> None:
        """Store the log-probs of the last mini-batch's pass."""
        self.newest_M = _filled(self.newest_M, inputs.mask(responses), found_M)

    def without_anchor(self, inputs: StepInputs, *, but_for: int | None) -> Int64s:
        """Computed responses without a known anchor, except those of mini-batch `but_for`."""
        first_M = self.anchor_M[torch.from_numpy(inputs.columns.starts_R[:-1]).to(self.anchor_M.device)]
        unknown_R = first_M.isnan().cpu().numpy() & inputs.active_R
        if but_for is not None:
            unknown_R[inputs.responses(but_for)] = False
        return np.flatnonzero(unknown_R)


def step_inputs(batch: Batch, config: Config, device: torch.device, images: ImageReader | None = None) -> StepInputs:
    """Create the inputs of a nonempty batch. Raises: ContractError."""
    columns = columns_of(batch, config, images)
    advantage = load_advantage(config.loss.advantage, config.loss.advantage_options)
    if advantage.credits_tokens:
        advantage_M = token_advantages(batch, advantage, config).astype(np.float32)
    else:
        advantage_M = np.repeat(columns.advantage_R, columns.lengths_R)
    return StepInputs(
        batch=batch,
        columns=columns,
        plan=_plan(batch, config),
        active_R=_active(columns, advantage_M, config.loss),
        rollout_M=torch.from_numpy(columns.rollout_logprobs_M).to(device),
        advantage_M=torch.from_numpy(advantage_M).to(device),
        expert_M=torch.from_numpy(np.repeat(columns.expert_R, columns.lengths_R)).to(device),
    )


def step_logprobs(inputs: StepInputs, settings: LossConfig, memory: GenerationMemory) -> StepLogProbs:
    """Log-probs known before the first pass."""
    anchor_M = known_anchors(inputs.batch, inputs.columns, settings, memory)
    share_M = policy_shares(inputs.batch, inputs.columns, settings)
    unknown_M = torch.full_like(inputs.rollout_M, torch.nan)
    return StepLogProbs(
        anchor_M=torch.from_numpy(anchor_M).to(unknown_M.device),
        theta_t_M=unknown_M,
        newest_M=unknown_M,
        policy_share_M=None if share_M is None else torch.from_numpy(share_M).to(unknown_M.device),
    )


def token_inputs(inputs: StepInputs, known: StepLogProbs, slot_M: Tensor, rows: Rows, weight_M: Tensor) -> TokenInputs:
    """Inputs of the loss for some tokens.

    Args:
        slot_M: their positions in the batch; rows: their responses.
        weight_M: weight of every token of the batch.
    """
    return TokenInputs(
        rows=rows,
        anchor_M=known.anchor_M[slot_M],
        rollout_M=inputs.rollout_M[slot_M],
        reference_M=None if known.reference_M is None else known.reference_M[slot_M],
        advantage_M=inputs.advantage_M[slot_M],
        weight_M=weight_M[slot_M],
        expert_M=inputs.expert_M[slot_M],
        reference_share=known.reference_share,
        policy_share_M=None if known.policy_share_M is None else known.policy_share_M[slot_M],
    )


def minibatch_weights(inputs: StepInputs, known: StepLogProbs, k: int, config: Config) -> Tensor:
    """[M] weight of each token in the loss of mini-batch k; 0 for tokens of other responses."""
    responses, columns, settings = inputs.responses(k), inputs.columns, config.loss
    kept_M = _kept(inputs, known, responses, settings)
    lengths_R = columns.lengths_R[responses]
    if kept_M is not None:
        lengths_R = np.add.reduceat(kept_M.astype(np.int64), columns.starts_R[:-1])[responses]
    weights_R = np.zeros(len(columns.group_R))
    weights_R[responses] = token_weights(
        lengths_R,
        settings.aggregation,
        config.rollout.max_response_tokens,
        group_R=columns.group_R[responses],
        replayed_R=columns.replayed_R[responses],
    )
    weights_M = np.repeat(weights_R, columns.lengths_R)
    if kept_M is not None:
        weights_M *= kept_M
    return torch.from_numpy(weights_M.astype(np.float32)).to(inputs.rollout_M.device)


def adds_without_advantage(settings: LossConfig) -> bool:
    """Whether a response with advantage 0 still affects the loss, its gradient or its denominators."""
    return (
        settings.kl_coef > 0
        or settings.entropy_coef > 0
        or LOSS.find(settings.name).always_counts
        or needs_critic(settings.advantage)
        or settings.importance_denominator == "kept"
    )


def _active(columns: Columns, advantage_M: NDArray[np.float32], settings: LossConfig) -> NDArray[np.bool_]:
    """[R] responses that contribute to the loss or its gradient."""
    has_advantage_R = np.add.reduceat(advantage_M != 0, columns.starts_R[:-1]) > 0
    active_R: NDArray[np.bool_] = has_advantage_R | adds_without_advantage(settings)
    return active_R & ~columns.left_out_R & ~columns.sft_R


def _plan(batch: Batch, config: Config, left_out: frozenset[int] = frozenset()) -> tuple[tuple[int, ...], ...]:
    learner = config.learner
    groups = [i for i, entry in enumerate(batch.entries) if entry.kind == "rl" and i not in left_out]
    once = learner.epochs_until is not None and batch.step > learner.epochs_until
    return tuple(
        tuple(groups[i] for i in chosen)
        for epoch in range(1 if once else learner.epochs)
        for chosen in minibatches(
            len(groups), learner.minibatch_size, seed=config.run.seed, step=batch.step, epoch=epoch
        )
    )


def _kept(inputs: StepInputs, known: StepLogProbs, responses: Int64s, settings: LossConfig) -> NDArray[np.bool_] | None:
    """[M] tokens kept by the importance weight, if the mean is only over those; None: all."""
    if settings.importance_denominator != "kept":
        return None
    slot_M, rows = inputs.slots(responses)
    _, found_M = importance_weight(known.anchor_M[slot_M], inputs.rollout_M[slot_M], rows, settings)
    assert found_M is not None
    kept_M = torch.zeros_like(inputs.rollout_M, dtype=torch.bool)
    kept_M[slot_M] = found_M
    return kept_M.cpu().numpy()


def _filled(column_M: Tensor, mask_M: NDArray[np.bool_], found_M: Tensor) -> Tensor:
    return torch.where(torch.from_numpy(mask_M).to(column_M.device) & column_M.isnan(), found_M, column_M)
