"""PROX, ADV and UPDATE: theta_t and D_t become theta_{t+1} (spec A.3 lines 9-11; algorithm 1, line 18).

    columns (with advantages) -> anchors and reference where the loss needs them -> critic, if any
                              -> one AdamW step per mini-batch -> cross-entropy on entries of kind sft, if any

Suffixes: M response tokens of the batch or of a micro-batch, R responses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bapo.config.tree import Config
from bapo.types import Batch
from learner.anchors import GenerationMemory, remember_anchors
from learner.batching import MicroBatch
from learner.checkpoint import Saved
from learner.critic import Critic, CriticTrainer
from learner.diagnostics import Meter, MinibatchResult, Stopwatch, UpdateReport
from learner.distributed import World, whole
from learner.divergence import refuse_divergence
from learner.loss import known_anchor, objective, token_losses
from learner.losses.base import PolicyLoss
from learner.losses.registry import load_loss
from learner.passes import Passes
from learner.policy import Policy
from learner.reference import Reference
from learner.reuse import reused_responses, weigh_reused
from learner.schedule import lr_at
from learner.step import Step, make_step
from learner.stopping import StopFlag, Stopped
from learner.supervised import Supervised
from learner.theorem_meter import Diagnosis, diagnose
from learner.token_trace import TokenTrace

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
        critic: Critic | None = None,
    ) -> None:
        """`reference`: where the KL term needs one. `critic`: for loss.advantage = gae. `run_path`: where a batch that
        diverges is written."""
        self._config = config
        self._policy = policy
        self._reference = None if reference is None else Reference(reference, config.loss)
        self._world = world
        self._stop = stop
        self._run_path = run_path
        self._loss = load_loss(config.loss)
        self._passes = Passes(world, config.learner.microbatch_tokens)
        self._critic = None
        if critic is not None:
            self._critic = CriticTrainer(config=config, critic=critic, passes=self._passes, run_path=run_path)
        self._supervised = Supervised(config=config, policy=policy, passes=self._passes, run_path=run_path)
        self.memory = GenerationMemory(config.algorithm.high_window)
        settings = config.learner
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    @property
    def parts(self) -> Mapping[str, Saved]:
        """What a checkpoint must hold besides policy, optimizer and memory."""
        parts = {"reference": self._reference, "critic": self._critic, "supervised": self._supervised}
        return {name: part for name, part in parts.items() if part is not None}

    def run(self, batch: Batch) -> UpdateReport:
        """One step. An empty batch changes nothing.

        Raises: DivergenceError before any weight has taken a value that is not finite; Stopped.
        """
        watch, settings = Stopwatch(), self._config.loss
        lr = self._set_lr(batch.step)
        if not batch.entries:
            log.warning("step %d batch is empty: no update", batch.step)
            return UpdateReport(lr=lr, minibatches=(), num_tokens=0, seconds=watch.seconds)
        step = make_step(batch, self._config, self.memory, self._world.device)
        if self._is_due(batch.step, self._config.diagnostics.token_records):
            step.trace = TokenTrace(len(step.rollout_M), self._world)
        if self._config.learner.reset_optimizer:
            self.optimizer.state.clear()
        with watch.phase("prox"):
            self._evaluate_anchors(step)
        with watch.phase("update"):
            facts = dict(self._critic.run(step)) if self._critic else {}
            results = tuple(self._minibatch(step, k) for k in range(len(step.plan)))
            facts.update(self._supervised.run(step))
        remember_anchors(batch, step.anchor_M.cpu().numpy(), settings, self.memory)
        with watch.phase("diagnostics"):
            diagnosis = self._diagnose(step)
        return UpdateReport(
            lr=lr,
            minibatches=results,
            num_tokens=len(step.rollout_M),
            diagnosis=diagnosis,
            seconds=watch.seconds,
            facts=facts | step.facts,
            tokens=step.trace.values(step.advantage_M) if step.trace is not None else None,
            advantage_M=step.advantage_M.cpu().numpy() if self._keeps_texts(batch.step) else None,
        )

    def _set_lr(self, step: int) -> float:
        lr = lr_at(self._config.learner, step, self._config.run.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _evaluate_anchors(self, step: Step) -> None:
        """PROX: theta_t and the reference without gradients, only where the loss needs them.

        Anchors of the first mini-batch stay NaN, because its own forward pass gives them, unless its loss must be
        known as a whole before.
        """
        if self._config.loss.weighs_reused:
            reused = reused_responses(step)
            if len(reused):
                step.fill_anchors(reused, self._passes.evaluate(self._logprobs, step, reused))
            weigh_reused(step, self._config)
        early = self._loss.whole_minibatch or self._config.loss.importance_denominator == "kept"
        unknown = step.unknown(but_for=None if early or not step.plan else 0)
        if len(unknown):
            step.fill_anchors(unknown, self._passes.evaluate(self._logprobs, step, unknown))
        reference, number = self._reference, step.batch.step
        if reference is not None:
            reference.begin_step(number, self._policy)
            responses = np.flatnonzero(step.active_R)
            step.reference_M = self._passes.evaluate(lambda micro: reference.policy(micro)[0], step, responses)
            step.reference_share = reference.share(number)

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        logprobs_M: Tensor = self._policy(micro)[0]
        return logprobs_M

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
        refuse_divergence(
            step.batch, step.plan[k], f"mini-batch {k + 1} of {len(step.plan)}", result.loss, result.grad_norm,
            run_path=self._run_path, leads=self._world.leads,
        )  # fmt: skip
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
        for micro in self._passes.microbatches(step, step.active(k)):
            logprobs_M, entropy_M = self._policy(micro)
            inputs = step.inputs(micro, weight_M)
            losses = token_losses(logprobs_M, inputs, policy_loss, settings)
            loss = objective(losses, entropy_M, inputs.weight_M, settings)
            # FSDP averages gradients over ranks, but the parts of the loss add up.
            (loss * self._world.size).backward()
            own_M[micro.slot_M] = logprobs_M.detach()
            meter.add(loss, losses, entropy_M)
            if step.trace is not None:
                step.trace.add(micro.slot_M, logprobs_M, entropy_M, losses)
        if step.trace is not None:
            step.trace.end_minibatch()
        is_last = k == len(step.plan) - 1 and self._is_due(step.batch.step, self._config.diagnostics.every)
        if k == 0 or is_last:
            own_M = self._world.sum(own_M)
        if k == 0:  # the policy still was theta_t
            step.fill_anchors(step.active(k), own_M)
        if is_last:
            step.fill_newest(step.active(k), own_M)
        return meter

    def _fitted_loss(self, step: Step, k: int, weight_M: Tensor) -> PolicyLoss:
        """The loss of mini-batch k. One that is searched sees the same tokens on every rank, so it finds the same."""
        if not self._loss.whole_minibatch or not len(step.active(k)):
            return self._loss
        slot_M, inputs = step.whole_inputs(k, weight_M)
        logprobs_M = self._passes.evaluate(self._logprobs, step, step.active(k))[slot_M]
        fitted = self._loss.fitted(logprobs_M, known_anchor(logprobs_M, inputs), inputs)
        step.facts.update(fitted.facts)
        return fitted

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def _keeps_texts(self, step: int) -> bool:
        return self._world.leads and self._is_due(step, self._config.diagnostics.texts)

    def _diagnose(self, step: Step) -> Diagnosis:
        """The theorem meter of this step, on the rank that writes records; empty elsewhere."""
        if not self._world.leads or not self._is_due(step.batch.step, self._config.diagnostics.every):
            return Diagnosis()
        theta_t_M, newest_M = step.theta_t_M.cpu().numpy(), step.newest_M.cpu().numpy()
        return diagnose(step.batch, step.columns, theta_t_M, newest_M, eps=self._config.loss.advantage_eps)
