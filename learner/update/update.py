"""PROX, ADV and UPDATE: theta_t and D_t become theta_{t+1} (docs/paper.md, Algorithm 1 line 18).

    columns (with advantages) -> anchors where the loss needs them -> one AdamW step per mini-batch -> report

Everything that only some methods or settings need is a hook (`hooks.py`): groups that are weighed again, a reference, a
critic, cross-entropy, measurements. Suffixes: M response tokens of the batch or of a micro-batch, R responses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bapo.algorithms.composers.registry import load_composer
from bapo.config.learner import LearnerConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.types import Batch
from bapo.runtime.vision import ImageReader, ReadImage
from learner.diagnostics.step_report import Meter, MinibatchResult, Stopwatch, UpdateReport
from learner.diagnostics.utilization import Utilization, gpu_events, model_flops, utilization
from learner.distributed.sharding import abandon_pass, whole
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import World
from learner.losses.objective import Objective
from learner.model.backbone import pass_cost
from learner.model.layers import budget_of
from learner.model.lora import trained_parameters
from learner.model.policy import Policy
from learner.update.hooks import Given, MicroPass, UpdateHook, make_hooks
from learner.update.passes import Passes
from learner.update.reference import Reference
from learner.update.step import GenerationMemory, Step, StepInputs, step_inputs
from learner.update.theorem import TheoremMeter
from learner.update.token_records import TokenRecords

log = logging.getLogger(__name__)

HOOKS: tuple[type[UpdateHook], ...] = (Reference, TokenRecords, TheoremMeter)
"""The core's own."""


class Updater:
    """Owns the optimizer; independent of how batches are composed."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        world: World,
        stop: StopFlag,
        run_path: Path,
        images: ReadImage | None = None,
    ) -> None:
        """Loads the models that the method trains or asks in addition to the policy. Collective.

        Args:
            run_path: run directory, for diverged batches.
            images: returns image files, for a policy that reads images.
        Raises: ConfigError.
        """
        self._images = None if images is None or policy.vision is None else ImageReader(policy.vision, images)
        self._config = config
        self.policy = policy
        self._stop = stop
        self._flops = model_flops(policy)
        self._objective = Objective(config.loss)
        self.passes = Passes(world, config.learner.microbatch_tokens, run_path, pass_cost(policy.model))
        self.memory = GenerationMemory(window=load_composer(config.algorithm).reuse_steps)
        settings = config.learner
        self.optimizer = torch.optim.AdamW(
            trained_parameters(policy),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.hooks = make_hooks(HOOKS, Given(config=config, policy=policy, passes=self.passes))

    @property
    def parts(self) -> Mapping[str, UpdateHook]:
        """What a checkpoint has in addition to policy, optimizer and memory."""
        return {hook.name: hook for hook in self.hooks if hook.name}

    def run(self, batch: Batch) -> UpdateReport:
        """One step. An empty batch changes nothing.

        Raises: ConfigError for entries that nothing trains; DivergenceError before any weight becomes non-finite;
        Stopped.
        """
        watch, lr = Stopwatch(gpu_events(self.passes.world.device)), self._set_lr(batch.step)
        if not batch.entries:
            log.warning("step %d empty batch: no update", batch.step)
            return UpdateReport(lr=lr, minibatches=(), num_tokens=0, seconds=watch.seconds)
        self._refuse_what_nothing_trains(batch)
        step = Step.of(step_inputs(batch, self._config, self.passes.world.device, self._images), self.memory)
        if self._config.learner.reset_optimizer:
            self.optimizer.state.clear()
        with watch.phase("prox"):
            self._evaluate_anchors(step)
        with watch.phase("update"):
            results = self._train(step)
        self.memory.remember(step)
        with watch.phase("diagnostics"):
            report = UpdateReport(lr=lr, minibatches=results, num_tokens=len(step.inputs.rollout_M), facts=step.facts)
            for hook in self.hooks:
                report = hook.report(step, report)
        return replace(report, seconds=watch.seconds, utilization=self._utilization(step.inputs, watch))

    def _refuse_what_nothing_trains(self, batch: Batch) -> None:
        if any(entry.kind == "sft" for entry in batch.entries) and not any(hook.trains_sft for hook in self.hooks):
            composer = self._config.algorithm.composer
            raise ConfigError(
                f"step {batch.step} has entries of kind sft, and nothing trains them: the composer {composer!r} must "
                "name what does in update_hooks, such as contrib.relift.supervised:Supervised (docs/methods.md)"
            )

    def _set_lr(self, step: int) -> float:
        lr = lr_at(self._config.learner, step, self._config.run.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _evaluate_anchors(self, step: Step) -> None:
        """PROX: log-probs of theta_t without gradients, only where the loss needs them.

        Anchors of the first mini-batch remain NaN, because its own forward pass computes them, unless its loss must
        be fitted first.
        """
        for hook in self.hooks:
            hook.prepare(step)
        early = self._objective.needs_anchors or not step.inputs.plan
        unknown = step.without_anchor(but_for=None if early else 0)
        if len(unknown):
            step.fill_theta_t(unknown, self.passes.evaluate(self.policy.logprobs, step.inputs, unknown))

    def _train(self, step: Step) -> tuple[MinibatchResult, ...]:
        """UPDATE: one optimizer step per mini-batch, and what the hooks train."""
        for hook in self.hooks:
            hook.before_passes(step)
        results = tuple(self._minibatch(step, k) for k in range(len(step.inputs.plan)))
        for hook in self.hooks:
            hook.after_passes(step)
        budget = budget_of(self.policy)
        if budget is not None and not any(hook.trains_sft for hook in self.hooks):  # whose passes cannot be repeated
            budget.measure(self.passes.world.device)
        for result in results:
            step.facts.update(result.facts)
        return results

    def _minibatch(self, step: Step, k: int) -> MinibatchResult:
        """One optimizer step over the groups of mini-batch k."""
        result = self._whole_gradient_that_fits(step, k)
        inputs, place = step.inputs, f"mini-batch {k + 1} of {len(step.inputs.plan)}"
        self.passes.refuse_divergence(inputs.batch, inputs.plan[k], place, result.loss, result.grad_norm)
        self.optimizer.step()
        if result.stop:
            raise Stopped(f"asked to stop: step {step.number} stops after {place}")
        return result

    def _whole_gradient_that_fits(self, step: Step, k: int) -> MinibatchResult:
        """`_whole_gradient`, once more without kept activations if these take too much memory. Raises: as torch."""
        budget = budget_of(self.policy)
        try:
            return self._whole_gradient(step, k)
        except torch.OutOfMemoryError:
            if self.passes.world.size > 1 or budget is None or not budget.give_up():
                raise
        log.warning(
            "step %d: out of memory, so layers keep nothing from now on; mini-batch %d again", step.number, k + 1
        )
        torch.cuda.empty_cache()
        abandon_pass(self.policy)
        return self._whole_gradient(step, k)

    def _whole_gradient(self, step: Step, k: int) -> MinibatchResult:
        """Gradient of mini-batch k in the parameters, clipped."""
        self.optimizer.zero_grad(set_to_none=True)
        inputs, world = step.inputs, self.passes.world
        meter, own_M = Meter(world), torch.zeros_like(inputs.rollout_M)
        weight_M = step.weights(k)
        objective = self._fitted(step, k, weight_M)
        for micro in self._gradient(step, k, objective, weight_M):
            own_M[micro.slot_M] = micro.logprobs_M
            meter.add(micro.loss, micro.losses, micro.entropy_M)
            for hook in self.hooks:
                hook.computed(step, micro)
        for hook in self.hooks:
            hook.after_minibatch(step)
        if k == 0:  # the policy still was theta_t
            step.fill_theta_t(inputs.active(k), world.sum(own_M))
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.learner.grad_clip)
        return meter.result(
            whole(grad_norm),
            num_tokens=int(inputs.columns.lengths_R[inputs.responses(k)].sum()),
            num_active=int(inputs.columns.lengths_R[inputs.active(k)].sum()),
            stop=self._stop.asked,
            facts=objective.loss.facts,
        )

    def _gradient(self, step: Step, k: int, objective: Objective, weight_M: Tensor) -> Iterator[MicroPass]:
        """Accumulate the gradient of mini-batch k over this rank's micro-batches: forward, losses, objective, backward.

        Args:
            weight_M: weight of each token of the batch in the loss of the mini-batch.
        """
        inputs = step.inputs
        for micro in self.passes.microbatches(inputs, inputs.active(k)):
            given = step.token_inputs(micro.slot_M, micro.rows, weight_M)
            logprobs_M, entropy_M = self.policy(micro)
            losses = objective.token_losses(logprobs_M, given)
            loss = objective.total(losses, entropy_M, given.weight_M)
            # FSDP averages gradients over ranks, but the parts of the loss add up.
            (loss * self.passes.world.size).backward()
            yield MicroPass(
                slot_M=micro.slot_M,
                loss=loss,
                losses=losses,
                logprobs_M=logprobs_M.detach(),
                entropy_M=entropy_M,
                is_last=k == len(inputs.plan) - 1,
            )

    def _fitted(self, step: Step, k: int, weight_M: Tensor) -> Objective:
        """The objective of mini-batch k. Fitting uses the same tokens on every rank, so the result is identical."""
        inputs, responses = step.inputs, step.inputs.active(k)
        if not self._objective.loss.whole_minibatch or not len(responses):
            return self._objective
        slot_M, rows = inputs.slots(responses)
        logprobs_M = self.passes.evaluate(self.policy.logprobs, inputs, responses)[slot_M]
        return self._objective.fitted(logprobs_M, step.token_inputs(slot_M, rows, weight_M))

    def _utilization(self, inputs: StepInputs, watch: Stopwatch) -> Utilization:
        flops = sum(self._flops.of(inputs.columns, inputs.active(k)) for k in range(len(inputs.plan)))
        return utilization(flops, watch.seconds, watch.gpu_seconds, self.passes.world)


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
