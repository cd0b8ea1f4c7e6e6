"""GRPO as a batch composer: the fresh groups that pass the online filter train, and nothing is stored.

The preset `grpo` takes `online_filter = "none"` (all groups train). With `range` it is GRPO with the zero-variance mask
of Mroueh et al.; with v = 5 it is the paper's off-policy baseline "GRPO (v = 5)".
Does not use: c1, c2, c3, X2, X3.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng
from bapo.algorithms.filters import filtered_fresh
from bapo.algorithms.settings import AlgorithmConfig
from bapo.algorithms.thresholds import global_mean_reward
from bapo.types import HardPrompt


class Grpo:
    """The composer `grpo`."""

    name = "grpo"

    def __init__(self, settings: AlgorithmConfig) -> None:
        self._settings = settings

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t = X1. The window is reported as 0, because there is none."""
        x1, reasons = filtered_fresh(self._settings, view.fresh, rng("online_filter"))
        return Decision(
            x1=tuple(stat.group_id for stat in x1),
            x2=(),
            x3=(),
            r_tot=global_mean_reward(view.fresh, view.previous_r_tot, self._settings.r_tot_decay),
            c2=0.0,
            c3=0.0,
            bad=(),
            high=(),
            reasons={**reasons, **{stat.group_id: Reason.NOT_USED for stat in view.reevaluated}},
        )

    def hard_prompts_to_ask(
        self,
        bad: Sequence[HardPrompt],
        step: int,
        excluded: frozenset[str],
        rng: Rng,
    ) -> tuple[str, ...]:
        """None: GRPO never asks again."""
        return ()


def make_composer(settings: AlgorithmConfig) -> Grpo:
    """Called by the registry."""
    return Grpo(settings)
