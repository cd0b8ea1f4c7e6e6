"""The update of one step: its inputs, which are replaced as a whole, and what the passes fill in.

    StepInputs        the batch as columns and tensors, its advantages, its plan of mini-batches
    Step              with log-probs of the anchor, of pi_theta_t and of pi_ref
    GenerationMemory  the anchors that outlive the step, for groups that may be reused

The anchor is the center of the trust region (Eqs. 1, 3), by ratio mode:

    direct        alpha, the rollout policy: nothing to compute
    decoupled     pi_theta_t, for all of D_t
    official      pi_gen, the trained weights at the step in which the group was generated
    interpolated  between alpha and the policy that trains, by the age of the token: no pass of its own

The learner first sees a group in the step whose assembly consumed it, so for X1 and X2 pi_gen is pi_theta_t of that
step. X3 is reused within the composer's window; its pi_gen is stored here by group id and in every checkpoint. What of
X3 was filtered, or left out of the loss, in its first step was never evaluated: its anchor is pi_theta_t of its first
use. The first mini-batch needs no separate pass: its policy still is theta_t, so the policy's own log-probs are the
anchor, and the ratio is exactly 1.

A response with advantage 0 does not contribute to the surrogate. Without KL and entropy in the loss, it counts in the
denominators but is not computed: loss and gradient are unchanged. This helps GRPO, which keeps zero-variance groups.

Suffixes: M response tokens of the batch or of a micro-batch, R responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.algorithms.methods import ADVANTAGE, LOSS
from bapo.config.objective import LossConfig
from bapo.config.tree import Config
from bapo.core.types import Batch
from bapo.runtime.vision import ImageReader
from learner.advantages.base import load_advantage
from learner.advantages.of_batch import token_advantages
from learner.batch.columns import Columns, Int64s, columns_of, token_spans
from learner.batch.microbatch import rows_of
from learner.batch.packing import minibatches
from learner.losses.base import Rows, TokenInputs
from learner.losses.objective import importance_weight, token_weights

Bools = NDArray[np.bool_]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The batch D_t as columns and tensors."""

    config: Config
    batch: Batch
    columns: Columns
    plan: tuple[tuple[int, ...], ...]
    """Groups of each mini-batch, by epoch; excludes kind sft."""
    active_R: Bools
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

    def mask(self, responses: Int64s) -> Bools:
        """[M] whether each token belongs to one of these responses."""
        mask_R = np.zeros(len(self.columns.group_R), dtype=bool)
        mask_R[responses] = True
        return np.repeat(mask_R, self.columns.lengths_R)

    def filled(self, column_M: Tensor, responses: Int64s, found_M: Tensor) -> Tensor:
        """[M] `column_M` with what is NaN in it for these responses from `found_M`."""
        return torch.where(self.on_device(self.mask(responses)) & column_M.isnan(), found_M, column_M)

    def spread(self, values_R: NDArray[np.floating]) -> Tensor:
        """[M] float32: the value of each token's response."""
        return self.on_device(np.repeat(values_R, self.columns.lengths_R).astype(np.float32))

    def on_device(self, values: NDArray[np.generic]) -> Tensor:
        """As a tensor next to the others."""
        return torch.from_numpy(values).to(self.rollout_M.device)

    def token_mean(self, responses: Int64s) -> NDArray[np.float64]:
        """[R] weight of each token in a mean over the tokens of these responses."""
        weights_R = np.zeros(len(self.columns.lengths_R))
        weights_R[responses] = token_weights(self.columns.lengths_R[responses], "token_mean", 1)
        return weights_R


def step_inputs(batch: Batch, config: Config, device: torch.device, images: ImageReader | None = None) -> StepInputs:
    """Create the inputs of a nonempty batch. Raises: ContractError."""
    columns, advantage = columns_of(batch, config, images), load_advantage(config.loss)
    if advantage.credits_tokens:
        advantage_M = token_advantages(batch, advantage, config).astype(np.float32)
    else:
        advantage_M = np.repeat(columns.advantage_R, columns.lengths_R)
    return StepInputs(
        config=config,
        batch=batch,
        columns=columns,
        plan=_plan(batch, config),
        active_R=_active(columns, advantage_M, config.loss),
        rollout_M=torch.from_numpy(columns.rollout_logprobs_M).to(device),
        advantage_M=torch.from_numpy(advantage_M).to(device),
        expert_M=torch.from_numpy(np.repeat(columns.expert_R, columns.lengths_R)).to(device),
    )


def adds_without_advantage(settings: LossConfig) -> bool:
    """Whether a response with advantage 0 still affects the loss, its gradient or its denominators."""
    return (
        settings.kl_coef > 0
        or settings.entropy_coef > 0
        or LOSS.find(settings.name).always_counts
        or ADVANTAGE.find(settings.advantage).always_counts
        or settings.importance_denominator == "kept"
    )


def _active(columns: Columns, advantage_M: Float32s, settings: LossConfig) -> Bools:
    """[R] responses that contribute to the loss or its gradient."""
    has_advantage_R = np.add.reduceat(advantage_M != 0, columns.starts_R[:-1]) > 0
    active_R: Bools = has_advantage_R | adds_without_advantage(settings)
    return active_R & ~columns.left_out_R & ~columns.sft_R


def _plan(batch: Batch, config: Config) -> tuple[tuple[int, ...], ...]:
    learner = config.learner
    groups = [i for i, entry in enumerate(batch.entries) if entry.kind == "rl"]
    once = learner.epochs_until is not None and batch.step > learner.epochs_until
    return tuple(
        tuple(groups[i] for i in chosen)
        for epoch in range(1 if once else learner.epochs)
        for chosen in minibatches(
            len(groups), learner.minibatch_size, seed=config.run.seed, step=batch.step, epoch=epoch
        )
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """What the parts of the update share, and change. Log-probs are in nats, NaN where not computed yet; all [M]."""

    inputs: StepInputs
    anchor_M: Tensor
    theta_t_M: Tensor
    policy_share_M: Tensor | None
    """Of the policy in the anchor (ratio mode `interpolated`)."""
    reference_M: Tensor | None = None
    """None if the KL term does not need it."""
    reference_share: float = 1.0
    """Share of the KL term to the reference (kl_ref = convex)."""
    facts: dict[str, float] = field(default_factory=dict)
    """Values of a method to log."""

    @classmethod
    def of(cls, inputs: StepInputs, memory: GenerationMemory) -> Self:
        """Before the first pass."""
        share_M = policy_shares(inputs)
        return cls(
            inputs=inputs,
            anchor_M=inputs.on_device(known_anchors(inputs, memory)),
            theta_t_M=torch.full_like(inputs.rollout_M, torch.nan),
            policy_share_M=None if share_M is None else inputs.on_device(share_M),
        )

    @property
    def number(self) -> int:
        """t."""
        return self.inputs.batch.step

    def fill_theta_t(self, responses: Int64s, found_M: Tensor) -> None:
        """Set log pi_theta_t of these responses from `found_M`, and their unknown anchors."""
        self.theta_t_M = self.inputs.filled(self.theta_t_M, responses, found_M)
        self.anchor_M = self.inputs.filled(self.anchor_M, responses, found_M)

    def without_anchor(self, *, but_for: int | None) -> Int64s:
        """Computed responses without a known anchor, except those of mini-batch `but_for`."""
        first_M = self.anchor_M[self.inputs.on_device(self.inputs.columns.starts_R[:-1])]
        unknown_R = first_M.isnan().cpu().numpy() & self.inputs.active_R
        if but_for is not None:
            unknown_R[self.inputs.responses(but_for)] = False
        return np.flatnonzero(unknown_R)

    def token_inputs(self, slot_M: Tensor, rows: Rows, weight_M: Tensor) -> TokenInputs:
        """Inputs of the loss for some tokens.

        Args:
            slot_M: their positions in the batch; rows: their responses.
            weight_M: weight of every token of the batch.
        """
        inputs, reference_M, share_M = self.inputs, self.reference_M, self.policy_share_M
        return TokenInputs(
            rows=rows,
            anchor_M=self.anchor_M[slot_M],
            rollout_M=inputs.rollout_M[slot_M],
            reference_M=None if reference_M is None else reference_M[slot_M],
            advantage_M=inputs.advantage_M[slot_M],
            weight_M=weight_M[slot_M],
            expert_M=inputs.expert_M[slot_M],
            reference_share=self.reference_share,
            policy_share_M=None if share_M is None else share_M[slot_M],
        )

    def weights(self, k: int) -> Tensor:
        """[M] weight of each token in the loss of mini-batch k; 0 for tokens of other responses."""
        inputs, columns = self.inputs, self.inputs.columns
        responses, kept_M = inputs.responses(k), self._kept(k)
        lengths_R = columns.lengths_R[responses]
        if kept_M is not None:
            lengths_R = np.add.reduceat(kept_M.astype(np.int64), columns.starts_R[:-1])[responses]
        weights_R = np.zeros(len(columns.group_R))
        weights_R[responses] = token_weights(
            lengths_R,
            inputs.config.loss.aggregation,
            inputs.config.rollout.max_response_tokens,
            group_R=columns.group_R[responses],
            replayed_R=columns.replayed_R[responses],
        )
        weights_M = np.repeat(weights_R, columns.lengths_R)
        if kept_M is not None:
            weights_M *= kept_M
        return inputs.on_device(weights_M.astype(np.float32))

    def _kept(self, k: int) -> Bools | None:
        """[M] tokens of mini-batch k kept by the importance weight, if the mean is only over those; None: all."""
        inputs, settings = self.inputs, self.inputs.config.loss
        if settings.importance_denominator != "kept":
            return None
        slot_M, rows = inputs.slots(inputs.responses(k))
        _, found_M = importance_weight(self.anchor_M[slot_M], inputs.rollout_M[slot_M], rows, settings)
        assert found_M is not None
        kept_M = torch.zeros_like(inputs.rollout_M, dtype=torch.bool)
        kept_M[slot_M] = found_M
        return kept_M.cpu().numpy()


@dataclass(slots=True, kw_only=True)
class GenerationMemory:
    """log pi_gen of groups that may be reused; all of it is in every checkpoint."""

    window: int
    """Steps after its first use in which a group may be reused (`Composer.reuse_steps`)."""
    columns: Mapping[str, Float32s] = field(default_factory=dict)
    """Group id -> [T] in nats; NaN for responses that were not evaluated."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Group id -> step of its first use."""

    def remember(self, step: Step) -> None:
        """After the step, in ratio mode `official`: store pi_gen of its groups for reuse, drop old ones."""
        if step.inputs.config.loss.ratio_mode != "official":
            return
        batch, anchors_M = step.inputs.batch, step.anchor_M.cpu().numpy()
        found = {
            entry.group.group_id: anchors_M[span].copy()
            for entry, span in zip(batch.entries, token_spans(batch), strict=True)
            if not np.isnan(anchors_M[span]).all()  # responses without contribution to the loss were not evaluated
        }
        steps = {**dict.fromkeys(found, batch.step), **self.steps}  # the first use counts
        self.steps = {group_id: used for group_id, used in steps.items() if used > batch.step - self.window}
        known = {**self.columns, **found}  # with what was remembered: it was the anchor of this step
        self.columns = {group_id: known[group_id] for group_id in self.steps}


def known_anchors(inputs: StepInputs, memory: GenerationMemory) -> Float32s:
    """[M] anchors as far as they are known before the policy is asked; NaN elsewhere."""
    columns, mode = inputs.columns, inputs.config.loss.ratio_mode
    if mode in ("direct", "interpolated"):
        return columns.rollout_logprobs_M.copy()
    anchors_M = np.full(len(columns.token_ids_M), np.nan, dtype=np.float32)
    if mode == "official":
        for entry, span in zip(inputs.batch.entries, token_spans(inputs.batch), strict=True):
            remembered = memory.columns.get(entry.group.group_id)
            if remembered is not None:
                anchors_M[span] = remembered
    return anchors_M


def policy_shares(inputs: StepInputs) -> Float32s | None:
    """[M] a of ratio mode `interpolated`: how far its anchor lies from alpha to the policy. None in other modes.

    AReaL's `prox_logp_method = "loglinear"`: a = (v_prox - v_alpha) / (v_theta - v_alpha) with v_prox = v_theta - 1, in
    [0, 1], where v is the version that sampled the token and v_theta that of the step. So a is 0 for a token that is 0
    or 1 versions old, 1/2 for 2, 2/3 for 3. An expert's token was sampled by none: its anchor is the policy itself.
    """
    batch, columns = inputs.batch, inputs.columns
    if inputs.config.loss.ratio_mode != "interpolated":
        return None
    versions_M = np.concatenate([entry.group.token_versions for entry in batch.entries])
    age_M = np.maximum(batch.step - versions_M.astype(np.float32), 1.0)
    shares_M: Float32s = (age_M - 1.0) / age_M
    shares_M[np.repeat(columns.expert_R, columns.lengths_R)] = 1.0
    return shares_M
