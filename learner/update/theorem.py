"""Measures the step's off-policy drift and its bound, from the log-probs of its own passes (`diagnostics`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from learner.diagnostics.step_report import UpdateReport, is_due
from learner.diagnostics.theorem_meter import diagnose
from learner.update.hooks import Given, MicroPass, UpdateHook
from learner.update.step import Step


class TheoremMeter(UpdateHook):
    """Runs on the rank that writes records; the other ranks add the log-probs of their passes."""

    _last_M: torch.Tensor | None = None
    """Of the last mini-batch; None in a step without measurements."""

    @classmethod
    def is_wanted(cls, given: Given) -> bool:
        return given.config.diagnostics.every > 0

    def prepare(self, step: Step) -> None:
        """Begin the step."""
        due = is_due(step.number, self.config.diagnostics.every)
        self._last_M = torch.zeros_like(step.inputs.rollout_M) if due else None

    def computed(self, step: Step, micro: MicroPass) -> None:
        """Keep log pi_theta of the last mini-batch, before its own optimizer step."""
        if micro.is_last and self._last_M is not None:
            self._last_M[micro.slot_M] = micro.logprobs_M

    def report(self, step: Step, report: UpdateReport) -> UpdateReport:
        """The measurements of one step."""
        inputs, world = step.inputs, self.passes.world
        if self._last_M is None:
            return report
        newest_M = torch.full_like(inputs.rollout_M, torch.nan)
        if inputs.plan:
            newest_M = inputs.filled(newest_M, inputs.active(len(inputs.plan) - 1), world.sum(self._last_M))
        if not world.leads:
            return report
        found = diagnose(
            inputs.batch,
            inputs.columns,
            step.theta_t_M.cpu().numpy(),
            newest_M.cpu().numpy(),
            eps=self.config.loss.advantage_eps,
        )
        return replace(report, diagnosis=found)
