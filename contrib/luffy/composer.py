"""LUFFY (arXiv 2504.14945): every group has one row of an expert next to G - 1 sampled ones, under one baseline.

The worker adds the row (`algorithm.num_experts`, `Task.expert`); here all groups of the step train whole. The loss
treats the expert's tokens by policy shaping.
Does not use: c1, c2, c3, X2, X3, `online_filter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bapo.algorithms.composer import OF_BAPO, AssemblyView, Composer, Decision, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import r_tot_of, unused
from contrib.replay_memory import first_of_each_prompt


class Luffy(Composer):
    """The composer `luffy`."""

    takes_experts = True
    ignores = (*OF_BAPO, "algorithm.online_filter", "algorithm.max_rounds")

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        yield from without_experts(config)

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t = X_on, with its expert rows."""
        fresh, left_out = first_of_each_prompt(view.fresh)
        trained = {stat.group_id: Reason.INFORMATIVE for stat in fresh}
        return Decision(
            items=whole_groups(trained),
            r_tot=r_tot_of(self._settings, view),
            reasons={**unused(view), **left_out, **trained},
        )


def without_experts(config: Any) -> Iterator[str]:
    """What is wrong when groups have no expert row."""
    if not config.algorithm.num_experts:
        yield f'algorithm.composer = "{config.algorithm.composer}" trains on expert rows; set algorithm.num_experts = 1'
