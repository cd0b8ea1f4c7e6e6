"""What composers share that train fresh groups."""

from __future__ import annotations

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng, whole_groups
from bapo.algorithms.filters import filtered_fresh
from bapo.algorithms.settings import AlgorithmConfig
from bapo.algorithms.thresholds import global_mean_reward


def on_policy(settings: AlgorithmConfig, view: AssemblyView, rng: Rng) -> Decision:
    """The fresh groups that pass the online filter, and nothing kept."""
    x1, reasons = filtered_fresh(settings, view.fresh, rng("online_filter"))
    return Decision(
        items=whole_groups(stat.group_id for stat in x1),
        r_tot=r_tot_of(settings, view),
        reasons={**reasons, **unused(view)},
    )


def r_tot_of(settings: AlgorithmConfig, view: AssemblyView) -> float:
    """Mean reward of all fresh responses, perhaps smoothed."""
    return global_mean_reward(view.fresh, view.previous_r_tot, settings.r_tot_decay)


def unused(view: AssemblyView) -> dict[str, str]:
    """The reasons of re-evaluated groups, which a person may have asked for."""
    return {stat.group_id: Reason.NOT_USED for stat in view.reevaluated}
