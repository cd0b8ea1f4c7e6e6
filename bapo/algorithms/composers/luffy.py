"""LUFFY (arXiv 2504.14945): every group has one row of an expert next to G - 1 sampled ones, under one baseline.

The worker adds the row (`algorithm.num_experts`, `Task.expert`); here all groups of the step train whole. The loss
treats the expert's tokens by policy shaping.
Does not use: c1, c2, c3, X2, X3, `online_filter`.
"""

from __future__ import annotations

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import FreshOnly, r_tot_of, unused
from bapo.algorithms.composers.replay_memory import first_of_each_prompt
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.errors import ConfigError


class Luffy(FreshOnly):
    name = "luffy"

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t = X_on, with its expert rows."""
        fresh, left_out = first_of_each_prompt(view.fresh)
        trained = {stat.group_id: Reason.INFORMATIVE for stat in fresh}
        return Decision(
            items=whole_groups(trained),
            r_tot=r_tot_of(self._settings, view),
            reasons={**unused(view), **left_out, **trained},
        )


def require_experts(settings: AlgorithmConfig) -> None:
    """Raises: ConfigError when groups have no expert row."""
    if not settings.num_experts:
        raise ConfigError(f'algorithm.name = "{settings.name}" trains on expert rows; set num_experts = 1')


def make_composer(settings: AlgorithmConfig) -> Luffy:
    require_experts(settings)
    return Luffy(settings)
