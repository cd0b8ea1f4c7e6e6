"""Values for the records of responses, collected during the passes of a step, so that recording needs no extra pass.

If several mini-batches or epochs compute a response, the last pass counts. Suffix: M tokens of the batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from learner.diagnostics.step_report import TokenValues, UpdateReport, is_due
from learner.update.hooks import Given, MicroPass, UpdateHook
from learner.update.step import Step

NUM_VALUES = 4
"""log-prob, entropy, ratio, clipped."""


class TokenRecords(UpdateHook):
    """Collects values on the device over all ranks, in steps with token records."""

    _values: Tensor | None = None
    _pass: Tensor

    @classmethod
    def is_wanted(cls, given: Given) -> bool:
        return max(given.config.diagnostics.token_records, given.config.diagnostics.texts) > 0

    def prepare(self, step: Step) -> None:
        """Begin the step."""
        if not is_due(step.number, self.config.diagnostics.token_records):
            self._values = None
            return
        num_tokens, device = len(step.inputs.rollout_M), self.passes.world.device
        self._values = torch.full((NUM_VALUES, num_tokens), torch.nan, device=device)
        self._pass = torch.zeros((NUM_VALUES + 1, num_tokens), device=device)

    @torch.no_grad()
    def computed(self, step: Step, micro: MicroPass) -> None:
        """Add one micro-batch of this rank."""
        if self._values is not None:
            ratio_M, clipped_M = micro.losses.ratio_M, micro.losses.clipped_M
            found = (micro.logprobs_M, micro.entropy_M.detach(), ratio_M, clipped_M, torch.ones_like(ratio_M))
            self._pass[:, micro.slot_M] = torch.stack(found)

    def after_minibatch(self, step: Step) -> None:
        """Merge the ranks: which of them computes a response differs between mini-batches."""
        if self._values is not None:
            found = self.passes.world.sum(self._pass)
            self._values = torch.where(found[NUM_VALUES] > 0, found[:NUM_VALUES], self._values)
            self._pass.zero_()

    def report(self, step: Step, report: UpdateReport) -> UpdateReport:
        """The values of the whole step; its advantages also for texts."""
        has_texts = self.passes.world.leads and is_due(step.number, self.config.diagnostics.texts)
        if self._values is None and not has_texts:
            return report
        advantage_M = step.inputs.advantage_M.cpu().numpy()
        if has_texts:
            report = replace(report, advantage_M=advantage_M)
        if self._values is None:
            return report
        logprobs_M, entropy_M, ratio_M, clipped_M = self._values.cpu().numpy()
        tokens = TokenValues(
            logprobs_M=logprobs_M, entropy_M=entropy_M, ratio_M=ratio_M, clipped_M=clipped_M, advantage_M=advantage_M
        )
        return replace(report, tokens=tokens)
