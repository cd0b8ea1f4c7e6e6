"""PROX, ADV and UPDATE: theta_t and D_t become theta_{t+1} (docs/paper.md, Algorithm 1 line 18).

    columns (with advantages) -> anchors and reference where the loss needs them -> critic, if any
                              -> one AdamW step per mini-batch -> cross-entropy on entries of kind sft, if any

Suffixes: M response tokens of the batch or of a micro-batch, R responses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bapo.config.learner import LearnerConfig
from bapo.config.tree import Config
from bapo.core.types import Batch
from bapo.runtime.vision import ImageReader, ReadImage
from learner.batch.packing import MicroBatch
from learner.diagnostics.step_report import Meter, MinibatchResult, Stopwatch, UpdateReport
from learner.diagnostics.theorem_meter import Diagnosis, diagnose
from learner.diagnostics.token_values import TokenTrace
from learner.diagnostics.utilization import Utilization, gpu_events, model_flops, utilization
from learner.distributed.shard_files import StoredShards
from learner.distributed.sharding import whole
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import World
from learner.losses.base import PolicyLoss, load_loss
from learner.losses.objective import TokenLosses, known_anchor, objective, token_losses
from learner.model.backbone import pass_cost
from learner.model.policy import Policy
from learner.update.anchors import GenerationMemory, Reference, remember_anchors
from learner.update.critic import Critic, CriticTrainer
from learner.update.passes import Passes
from learner.update.reuse import reused_responses, weigh_reused
from learner.update.step_state import (
    StepInputs,
    StepLogProbs,
    minibatch_weights,
    step_inputs,
    step_logprobs,
    token_inputs,
)
from learner.update.supervised import Supervised

log = logging.getLogger(__name__)


class Saved(Protocol):
    """A part of the learner with its own state: a critic, a second optimizer, a replaced reference."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, sharded ones as DTensor; empty while there is nothing to save."""
        ...

    def load(self, stored: StoredShards) -> None:
        """Load the result of `tensors`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroPass:
    """Results of one forward and backward pass, for logging."""

    slot_M: Tensor
    """Positions of its response tokens in the batch."""
    loss: Tensor
    """Scalar: its contribution to the loss of the mini-batch."""
    losses: TokenLosses
    logprobs_M: Tensor
    """Detached."""
    entropy_M: Tensor


class Updater:
    """Owns the optimizer; independent of how batches are composed."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        reference: Policy | None,
        world: World,
        stop: StopFlag,
        run_path: Path,
        critic: Critic | None = None,
        images: ReadImage | None = None,
    ) -> None:
        """
        Args:
            reference: if the KL term needs one.
            run_path: run directory, for diverged batches.
            critic: for an advantage that needs one.
            images: returns image files, for a policy that reads images.
        """
        self._images = None if images is None or policy.vision is None else ImageReader(policy.vision, images)
        self._config = config
        self._policy = policy
        self._reference = None if reference is None else Reference(reference, config.loss)
        self._world = world
        self._stop = stop
        self._flops = model_flops(policy)
        self._loss = load_loss(config.loss)
        self._passes = Passes(world, config.learner.microbatch_tokens, run_path, pass_cost(policy.model))
        self._critic = None if critic is None else CriticTrainer(config=config, critic=critic, passes=self._passes)
        self._supervised = Supervised(config=config, policy=policy, passes=self._passes)
        self.memory = GenerationMemory(config.algorithm.high_window)
        settings = config.learner
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    @property
    def parts(self) -> Mapping[str, Saved]:
        """Parts to checkpoint in addition to policy, optimizer and memory."""
        parts = {"reference": self._reference, "critic": self._critic, "supervised": self._supervised}
        return {name: part for name, part in parts.items() if part is not None}

    def run(self, batch: Batch) -> UpdateReport:
        """One step. An empty batch changes nothing.

        Raises: DivergenceError before any weight becomes non-finite; Stopped.
        """
        watch, config = Stopwatch(gpu_events(self._world.device)), self._config
        lr = self._set_lr(batch.step)
        if not batch.entries:
            log.warning("step %d empty batch: no update", batch.step)
            return UpdateReport(lr=lr, minibatches=(), num_tokens=0, seconds=watch.seconds)
        inputs = step_inputs(batch, config, self._world.device, self._images)
        known = step_logprobs(inputs, config.loss, self.memory)
        num_tokens = len(inputs.rollout_M)
        records_tokens = is_due(batch.step, config.diagnostics.token_records)
        trace = TokenTrace(num_tokens, self._world) if records_tokens else None
        if config.learner.reset_optimizer:
            self.optimizer.state.clear()
        with watch.phase("prox"):
            inputs, facts = self._evaluate_anchors(inputs, known)
        with watch.phase("update"):
            if self._critic is not None:
                inputs, found = self._critic.run(inputs)
                facts.update(found)
            results = tuple(self._minibatch(inputs, known, k, trace) for k in range(len(inputs.plan)))
            facts.update(self._supervised.run(inputs))
        for result in results:
            facts.update(result.facts)
        remember_anchors(batch, known.anchor_M.cpu().numpy(), config.loss, self.memory)
        with watch.phase("diagnostics"):
            diagnosis = self._diagnose(inputs, known)
        return UpdateReport(
            lr=lr,
            minibatches=results,
            num_tokens=num_tokens,
            diagnosis=diagnosis,
            seconds=watch.seconds,
            utilization=self._utilization(inputs, watch),
            facts=facts,
            tokens=None if trace is None else trace.values(inputs.advantage_M),
            advantage_M=inputs.advantage_M.cpu().numpy() if self._keeps_texts(batch.step) else None,
        )

    def _set_lr(self, step: int) -> float:
        lr = lr_at(self._config.learner, step, self._config.run.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _evaluate_anchors(self, inputs: StepInputs, known: StepLogProbs) -> tuple[StepInputs, dict[str, float]]:
        """PROX: log-probs of theta_t and the reference without gradients, only where the loss needs them.

        Anchors of the first mini-batch remain NaN, because its own forward pass computes them, unless its loss must
        be fitted first.

        Returns: the inputs with skipped or weighted reused groups, if configured, and values to log.
        """
        facts: dict[str, float] = {}
        if self._config.loss.weighs_reused:
            reused = reused_responses(inputs)
            if len(reused):
                known.fill_theta_t(inputs, reused, self._passes.evaluate(self._logprobs, inputs, reused))
            inputs, facts = weigh_reused(inputs, known.theta_t_M, self._config)
        early = self._loss.whole_minibatch or self._config.loss.importance_denominator == "kept"
        unknown = known.without_anchor(inputs, but_for=None if early or not inputs.plan else 0)
        if len(unknown):
            known.fill_theta_t(inputs, unknown, self._passes.evaluate(self._logprobs, inputs, unknown))
        reference, step = self._reference, inputs.batch.step
        if reference is not None:
            reference.begin_step(step, self._policy)
            responses = np.flatnonzero(inputs.active_R)
            known.reference_M = self._passes.evaluate(
                lambda micro: reference.policy(micro, with_entropy=False)[0], inputs, responses
            )
            known.reference_share = reference.share(step)
        return inputs, facts

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        logprobs_M: Tensor = self._policy(micro, with_entropy=False)[0]
        return logprobs_M

    def _minibatch(self, inputs: StepInputs, known: StepLogProbs, k: int, trace: TokenTrace | None) -> MinibatchResult:
        """One optimizer step over the groups of mini-batch k."""
        self.optimizer.zero_grad(set_to_none=True)
        meter, own_M = Meter(self._world), torch.zeros_like(inputs.rollout_M)
        weight_M = minibatch_weights(inputs, known, k, self._config)
        loss = self._fitted_loss(inputs, known, k, weight_M)
        for seen in self._gradient(inputs, known, k, loss, weight_M):
            own_M[seen.slot_M] = seen.logprobs_M
            meter.add(seen.loss, seen.losses, seen.entropy_M)
            if trace is not None:
                trace.add(seen.slot_M, seen.logprobs_M, seen.entropy_M, seen.losses)
        if trace is not None:
            trace.end_minibatch()
        self._fill(inputs, known, k, own_M)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.learner.grad_clip)
        result = meter.result(
            whole(grad_norm),
            num_tokens=int(inputs.columns.lengths_R[inputs.responses(k)].sum()),
            num_active=int(inputs.columns.lengths_R[inputs.active(k)].sum()),
            stop=self._stop.asked,
            facts=loss.facts,
        )
        place = f"mini-batch {k + 1} of {len(inputs.plan)}"
        self._passes.refuse_divergence(inputs.batch, inputs.plan[k], place, result.loss, result.grad_norm)
        self.optimizer.step()
        if result.stop:
            raise Stopped(f"asked to stop: step {inputs.batch.step} stops after {place}")
        return result

    def _gradient(
        self, inputs: StepInputs, known: StepLogProbs, k: int, policy_loss: PolicyLoss, weight_M: Tensor
    ) -> Iterator[MicroPass]:
        """Accumulate the gradient of mini-batch k over this rank's micro-batches: forward, losses, objective, backward.

        Args:
            weight_M: weight of each token of the batch in the loss of the mini-batch.
        """
        settings = self._config.loss
        for micro in self._passes.microbatches(inputs, inputs.active(k)):
            given = token_inputs(inputs, known, micro.slot_M, micro.rows, weight_M)
            logprobs_M, entropy_M = self._policy(micro)
            losses = token_losses(logprobs_M, given, policy_loss, settings)
            loss = objective(losses, entropy_M, given.weight_M, settings)
            # FSDP averages gradients over ranks, but the parts of the loss add up.
            (loss * self._world.size).backward()
            yield MicroPass(
                slot_M=micro.slot_M, loss=loss, losses=losses, logprobs_M=logprobs_M.detach(), entropy_M=entropy_M
            )

    def _fill(self, inputs: StepInputs, known: StepLogProbs, k: int, own_M: Tensor) -> None:
        """Store the log-probs of mini-batch k's pass where needed. `own_M`: of this rank's tokens."""
        is_last = k == len(inputs.plan) - 1 and is_due(inputs.batch.step, self._config.diagnostics.every)
        if k == 0 or is_last:
            own_M = self._world.sum(own_M)
        if k == 0:  # the policy still was theta_t
            known.fill_theta_t(inputs, inputs.active(k), own_M)
        if is_last:
            known.fill_newest(inputs, inputs.active(k), own_M)

    def _fitted_loss(self, inputs: StepInputs, known: StepLogProbs, k: int, weight_M: Tensor) -> PolicyLoss:
        """The loss of mini-batch k. Fitting uses the same tokens on every rank, so the result is identical."""
        responses = inputs.active(k)
        if not self._loss.whole_minibatch or not len(responses):
            return self._loss
        slot_M, rows = inputs.slots(responses)
        given = token_inputs(inputs, known, slot_M, rows, weight_M)
        logprobs_M = self._passes.evaluate(self._logprobs, inputs, responses)[slot_M]
        return self._loss.fitted(logprobs_M, known_anchor(logprobs_M, given), given)

    def _utilization(self, inputs: StepInputs, watch: Stopwatch) -> Utilization:
        flops = sum(self._flops.of(inputs.columns, inputs.active(k)) for k in range(len(inputs.plan)))
        return utilization(flops, watch.seconds, watch.gpu_seconds, self._world)

    def _keeps_texts(self, step: int) -> bool:
        return self._world.leads and is_due(step, self._config.diagnostics.texts)

    def _diagnose(self, inputs: StepInputs, known: StepLogProbs) -> Diagnosis:
        """Run the theorem meter on the rank that writes records; empty elsewhere."""
        step = inputs.batch.step
        if not self._world.leads or not is_due(step, self._config.diagnostics.every):
            return Diagnosis()
        theta_t_M, newest_M = known.theta_t_M.cpu().numpy(), known.newest_M.cpu().numpy()
        return diagnose(inputs.batch, inputs.columns, theta_t_M, newest_M, eps=self._config.loss.advantage_eps)


def is_due(step: int, every: int) -> bool:
    """Whether something with interval `every` is due in this step; never if `every` is 0."""
    return every > 0 and step % every == 0


def lr_at(settings: LearnerConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (from 1) of a run of `num_steps`.

    The last warmup step and the step after it have the peak. `lr_final` of it is reached after the last step, so that
    the last step trains, too (the schedules of transformers, as in TRL). A run that is extended and resumed uses the
    rates of the longer run.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * step / warmup
    done = min(1.0, max(0, step - 1 - warmup) / max(1, num_steps - warmup))
    return settings.lr * (settings.lr_final + (1.0 - settings.lr_final) * _left(settings.lr_schedule, done))


def _left(schedule: str, done: float) -> float:
    """Remaining fraction of the decay from peak to final value, after the fraction `done` of the steps."""
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0
