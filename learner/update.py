"""PROX, ADV and UPDATE: theta_t and D_t become theta_{t+1} (spec A.3 lines 9-11; algorithm 1, line 18).

    columns (with advantages) -> anchors and reference where the loss needs them -> one AdamW step per mini-batch

Suffixes: M response tokens of the batch or of a micro-batch, R responses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bapo.config.tree import Config
from bapo.errors import DivergenceError, StorageError
from bapo.types import Batch
from bapo.wire import pack_batch
from learner.anchors import GenerationMemory, remember_anchors
from learner.batching import Int64s, MicroBatch, microbatches_of
from learner.diagnostics import Meter, MinibatchResult, Stopwatch, UpdateReport, behaviour_gap
from learner.distributed import World, whole
from learner.loss import known_anchor, objective, token_losses
from learner.losses.base import PolicyLoss
from learner.losses.registry import load_loss
from learner.policy import Policy
from learner.step import Step, make_step
from learner.stopping import StopFlag, Stopped

log = logging.getLogger(__name__)


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
        self._loss = load_loss(config.loss)
        self.memory = GenerationMemory(config.algorithm.high_window)
        settings = config.learner
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    def run(self, batch: Batch) -> UpdateReport:
        """One step. An empty batch changes nothing.

        Raises: DivergenceError before any weight has taken a value that is not finite; Stopped.
        """
        watch, settings = Stopwatch(), self._config.loss
        lr = self._set_lr(batch.step)
        if not batch.entries:
            log.warning("step %d batch is empty: no update", batch.step)
            return UpdateReport(lr=lr, minibatches=(), num_tokens=0, gaps={}, seconds=watch.seconds)
        step = make_step(batch, self._config, self.memory, self._world.device)
        with watch.phase("prox"):
            self._evaluate_anchors(step)
        with watch.phase("update"):
            results = tuple(self._minibatch(step, k) for k in range(len(step.plan)))
        anchors_M, rollout_M = step.anchor_M.cpu().numpy(), step.columns.rollout_logprobs_M
        remember_anchors(batch, anchors_M, settings, self.memory)
        return UpdateReport(
            lr=lr,
            minibatches=results,
            num_tokens=len(rollout_M),
            gaps=behaviour_gap(batch, anchors_M, rollout_M) if settings.ratio_mode == "decoupled" else {},
            seconds=watch.seconds,
        )

    def _set_lr(self, step: int) -> float:
        """Linear warm-up over learner steps, then constant."""
        settings = self._config.learner
        lr = settings.lr * min(1.0, step / settings.warmup_steps) if settings.warmup_steps else settings.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _evaluate_anchors(self, step: Step) -> None:
        """PROX: theta_t and the reference without gradients, only where the loss needs them.

        Anchors of the first mini-batch stay NaN, because its own forward pass gives them, unless its loss must be
        known as a whole before.
        """
        early = self._loss.whole_minibatch or self._config.loss.importance_denominator == "kept"
        unknown = step.unknown(but_for=None if early else 0)
        if len(unknown):
            step.fill_anchors(unknown, self._evaluate(self._policy, step, unknown))
        if self._reference is not None:
            step.reference_M = self._evaluate(self._reference, step, np.flatnonzero(step.active_R))

    @torch.no_grad()
    def _evaluate(self, policy: Policy, step: Step, responses: Int64s) -> Tensor:
        """[M] log-probs of these responses on every rank; 0 elsewhere."""
        found_M = torch.zeros_like(step.rollout_M)
        for micro in self._microbatches(step, responses):
            found_M[micro.slot_M], _ = policy(micro)
        return self._world.sum(found_M)

    def _minibatch(self, step: Step, k: int) -> MinibatchResult:
        """One optimizer step over the groups of mini-batch k."""
        self.optimizer.zero_grad(set_to_none=True)
        meter = self._accumulate(step, k)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.learner.grad_clip)
        result = meter.result(
            whole(grad_norm),
            num_tokens=int(step.columns.lengths_R[step.responses(k)].sum()),
            num_active=int(step.columns.lengths_R[step.active(k)].sum()),
            stop=self._stop.asked,
        )
        self._refuse_divergence(step, k, result)
        self.optimizer.step()
        if result.stop:
            raise Stopped(f"asked to end: step {step.batch.step} stops after mini-batch {k + 1} of {len(step.plan)}")
        return result

    def _accumulate(self, step: Step, k: int) -> Meter:
        """Loss and gradient of mini-batch k, micro-batch after micro-batch."""
        settings, meter = self._config.loss, Meter(self._world)
        weight_M = step.weights(k, settings, self._config.rollout.max_response_tokens)
        policy_loss = self._fitted_loss(step, k, weight_M)
        own_M = torch.zeros_like(step.rollout_M)
        for micro in self._microbatches(step, step.active(k)):
            logprobs_M, entropy_M = self._policy(micro)
            inputs = step.inputs(micro, weight_M)
            losses = token_losses(logprobs_M, inputs, policy_loss, settings)
            loss = objective(losses, entropy_M, inputs.weight_M, settings)
            # FSDP averages gradients over ranks, but the parts of the loss add up.
            (loss * self._world.size).backward()
            own_M[micro.slot_M] = logprobs_M.detach()
            meter.add(loss, losses, entropy_M)
        if k == 0:  # the policy still was theta_t
            step.fill_anchors(step.active(k), self._world.sum(own_M))
        return meter

    def _fitted_loss(self, step: Step, k: int, weight_M: Tensor) -> PolicyLoss:
        """The loss of mini-batch k. One that is searched sees the same tokens on every rank, so it finds the same."""
        if not self._loss.whole_minibatch or not len(step.active(k)):
            return self._loss
        slot_M, inputs = step.whole_inputs(k, weight_M)
        logprobs_M = self._evaluate(self._policy, step, step.active(k))[slot_M]
        return self._loss.fitted(logprobs_M, known_anchor(logprobs_M, inputs), inputs)

    def _microbatches(self, step: Step, responses: Int64s) -> Iterator[MicroBatch]:
        world, budget = self._world, self._config.learner.microbatch_tokens
        return microbatches_of(
            step.columns, responses, budget=budget, rank=world.rank, num_ranks=world.size, device=world.device
        )

    def _refuse_divergence(self, step: Step, k: int, result: MinibatchResult) -> None:
        """Stop while the weights are still sound, and keep the batch so that it can be looked at."""
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return
        batch = step.batch
        path = self._run_path / "diverged" / f"step-{batch.step:06d}.frame"
        if self._world.leads:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pack_batch(batch))
            except OSError as error:
                raise StorageError(f"step {batch.step} diverged and {path} cannot be written: {error}") from error
        groups = ", ".join(batch.entries[i].group.group_id for i in step.plan[k])
        raise DivergenceError(
            f"step {batch.step}, mini-batch {k + 1} of {len(step.plan)}: loss is {result.loss}, gradient norm "
            f"{result.grad_norm}; weights were not changed by it. Groups: {groups}. The batch is in {path}. "
            "Lower learner.lr, learner.grad_clip or loss.importance_cap, then resume from the last checkpoint"
        )
