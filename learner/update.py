"""PROX, ADV and UPDATE: theta_t and D_t become theta_{t+1} (spec A.3 lines 9-11; algorithm 1, line 18).

    columns (with advantages) -> anchors and reference where the loss needs them -> one AdamW step per mini-batch

Suffixes: M response tokens of the batch (in `BatchTensors`) or of a micro-batch (elsewhere), R responses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.tree import Config
from bapo.errors import DivergenceError, StorageError
from bapo.types import Batch
from bapo.wire import pack_batch
from learner.anchors import GenerationMemory, known_anchors, remember_anchors
from learner.batching import Columns, Int64s, MicroBatch, columns_of, microbatches_of, minibatches
from learner.diagnostics import Meter, MinibatchResult, Stopwatch, UpdateReport, behaviour_gap
from learner.distributed import World, whole
from learner.loss import TokenInputs, objective, token_losses, token_weights
from learner.policy import Policy
from learner.stopping import StopFlag, Stopped

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class BatchTensors:
    """What the loss reads, for all response tokens of the batch, on the device of this rank."""

    rollout_M: Tensor
    anchor_M: Tensor
    """NaN where not known yet."""
    reference_M: Tensor | None
    advantage_R: Tensor

    def inputs(self, micro: MicroBatch, weight_R: Tensor) -> TokenInputs:
        """The part of one micro-batch."""
        return TokenInputs(
            anchor_M=self.anchor_M[micro.slot_M],
            rollout_M=self.rollout_M[micro.slot_M],
            reference_M=None if self.reference_M is None else self.reference_M[micro.slot_M],
            advantage_M=self.advantage_R[micro.response_M],
            weight_M=weight_R[micro.response_M],
        )


class Updater:
    """Owns the optimizer; knows nothing of how batches are composed."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        reference: Policy | None,
        world: World,
        stop: StopFlag,
        run_path: Path,
    ) -> None:
        """`reference`: needed for kl_ref = reference only. `run_path`: where a batch that diverges is written."""
        self._config = config
        self._policy = policy
        self._reference = reference
        self._world = world
        self._stop = stop
        self._run_path = run_path
        self.memory = GenerationMemory(config.algorithm.high_window)
        settings = config.learner
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    def run(self, batch: Batch) -> UpdateReport:
        """One step. An empty batch changes nothing.

        Raises: DivergenceError before any weight has taken a value that is not finite; Stopped.
        """
        watch, config = Stopwatch(), self._config
        lr = self._set_lr(batch.step)
        if not batch.entries:
            log.warning("step %d batch is empty: no update", batch.step)
            return UpdateReport(lr=lr, minibatches=(), num_tokens=0, gaps={}, seconds=watch.seconds)
        columns = columns_of(batch, config.loss)
        plan = [
            groups
            for epoch in range(config.learner.epochs)
            for groups in minibatches(
                len(batch.entries), config.learner.minibatch_size, seed=config.run.seed, step=batch.step, epoch=epoch
            )
        ]
        with watch.phase("prox"):
            tensors = self._prepare(batch, columns, first=plan[0])
        with watch.phase("update"):
            results = tuple(self._minibatch(batch, columns, tensors, plan, k) for k in range(len(plan)))
        anchors_M = tensors.anchor_M.cpu().numpy()
        remember_anchors(batch, anchors_M, config.loss, self.memory)
        return UpdateReport(
            lr=lr,
            minibatches=results,
            num_tokens=len(columns.token_ids_M),
            gaps=behaviour_gap(batch, anchors_M, columns.rollout_logprobs_M) if self._anchors_are_theta_t else {},
            seconds=watch.seconds,
        )

    @property
    def _anchors_are_theta_t(self) -> bool:
        return self._config.loss.ratio_mode == "decoupled"

    def _set_lr(self, step: int) -> float:
        """Linear warm-up over learner steps, then constant."""
        settings = self._config.learner
        lr = settings.lr * min(1.0, step / settings.warmup_steps) if settings.warmup_steps else settings.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _prepare(self, batch: Batch, columns: Columns, first: Sequence[int]) -> BatchTensors:
        """PROX: evaluate theta_t and the reference without gradients, only where the loss needs them.

        Anchors of the first mini-batch stay NaN: its own forward pass gives them.
        """
        device = self._world.device
        anchors_M = known_anchors(batch, columns, self._config.loss, self.memory)
        unknown_R = np.isnan(anchors_M[columns.starts_R[:-1]])
        unknown_R[columns.responses_of(first)] = False
        anchor_M = torch.from_numpy(anchors_M).to(device)
        if unknown_R.any():
            _fill(anchor_M, self._evaluate(self._policy, columns, np.flatnonzero(unknown_R)), columns, unknown_R)
        reference_M = None
        if self._reference is not None:
            reference_M = self._evaluate(self._reference, columns, np.arange(len(columns.group_R)))
        return BatchTensors(
            rollout_M=torch.from_numpy(columns.rollout_logprobs_M.copy()).to(device),
            anchor_M=anchor_M,
            reference_M=reference_M,
            advantage_R=torch.from_numpy(columns.advantage_R).to(device),
        )

    @torch.no_grad()
    def _evaluate(self, policy: Policy, columns: Columns, responses: Int64s) -> Tensor:
        """[M] log-probs of these responses on every rank; 0 elsewhere."""
        found_M = torch.zeros(len(columns.token_ids_M), device=self._world.device)
        for micro in self._microbatches(columns, responses):
            found_M[micro.slot_M], _ = policy(micro)
        return self._world.sum(found_M)

    def _minibatch(
        self, batch: Batch, columns: Columns, tensors: BatchTensors, plan: Sequence[Sequence[int]], k: int
    ) -> MinibatchResult:
        """One optimizer step over the groups of mini-batch k."""
        settings, responses = self._config.loss, columns.responses_of(plan[k])
        lengths_R = columns.lengths_R[responses]
        weight_R = torch.zeros(len(columns.group_R), device=self._world.device)
        weights = token_weights(lengths_R, settings.aggregation, self._config.rollout.max_response_tokens)
        weight_R[torch.from_numpy(responses)] = torch.from_numpy(weights).float().to(self._world.device)
        meter = Meter(self._world)
        own_M = torch.zeros_like(tensors.rollout_M)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._microbatches(columns, responses):
            logprobs_M, entropy_M = self._policy(micro)
            inputs = tensors.inputs(micro, weight_R)
            losses = token_losses(logprobs_M, inputs, settings)
            loss = objective(losses, entropy_M, inputs.weight_M, settings)
            # FSDP averages gradients over ranks, but the parts of the loss add up.
            (loss * self._world.size).backward()
            own_M[micro.slot_M] = logprobs_M.detach()
            meter.add(loss, losses, entropy_M)
        if k == 0:
            used_R = np.zeros(len(columns.group_R), dtype=bool)
            used_R[responses] = True
            _fill(tensors.anchor_M, self._world.sum(own_M), columns, used_R)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.learner.grad_clip)
        result = meter.result(whole(grad_norm), num_tokens=int(lengths_R.sum()), stop=self._stop.asked)
        self._refuse_divergence(batch, plan, k, result)
        self.optimizer.step()
        if result.stop:
            raise Stopped(f"asked to end: step {batch.step} stops after mini-batch {k + 1} of {len(plan)}")
        return result

    def _microbatches(self, columns: Columns, responses: Int64s) -> Iterator[MicroBatch]:
        world = self._world
        budget = self._config.learner.microbatch_tokens
        return microbatches_of(
            columns, responses, budget=budget, rank=world.rank, num_ranks=world.size, device=world.device
        )

    def _refuse_divergence(self, batch: Batch, plan: Sequence[Sequence[int]], k: int, result: MinibatchResult) -> None:
        """Stop while the weights are still sound, and keep the batch so that it can be looked at."""
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return
        path = self._run_path / "diverged" / f"step-{batch.step:06d}.frame"
        if self._world.leads:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pack_batch(batch))
            except OSError as error:
                raise StorageError(f"step {batch.step} diverged and {path} cannot be written: {error}") from error
        groups = ", ".join(batch.entries[i].group.group_id for i in plan[k])
        raise DivergenceError(
            f"step {batch.step}, mini-batch {k + 1} of {len(plan)}: loss is {result.loss}, gradient norm "
            f"{result.grad_norm}; weights were not changed by it. Groups: {groups}. The batch is in {path}. "
            "Lower learner.lr, learner.grad_clip or loss.importance_cap, then resume from the last checkpoint"
        )


def _fill(anchor_M: Tensor, found_M: Tensor, columns: Columns, responses_R: NDArray[np.bool_]) -> None:
    """Write the anchors that were unknown, for these responses, in place."""
    mask_M = torch.from_numpy(np.repeat(responses_R, columns.lengths_R)).to(anchor_M.device)
    unknown_M = mask_M & anchor_M.isnan()
    anchor_M[unknown_M] = found_M[unknown_M]
