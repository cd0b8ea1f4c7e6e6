"""DAPO's dynamic sampling (arXiv 2503.14476): rounds of fresh groups until B of them are informative.

    round 1 --fewer than B informative--> NeedMore --> round 2 --> ... --> the first B informative ones train

Informative is what has a standard deviation above 0, as for the filter `range`.

At most `max_rounds` rounds; then what there is trains, and the batch is underfilled (the BAPO paper's comparison; verl
raises instead). What is informative beyond B is consumed and counted as `surplus`. The filter reads the rewards of
the verifier: with overlong shaping on top of them, an all-incorrect group differs and has still nothing to learn from.
Does not use: c1, c2, c3, X2, X3, `online_filter`.
"""

from __future__ import annotations

from bapo.algorithms.composer import OF_BAPO, AssemblyView, Composer, Decision, NeedMore, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import r_tot_of, unused
from bapo.algorithms.filters import why_left_out
from bapo.algorithms.reward_levels import is_informative
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat


class Dapo(Composer):
    """The composer `dapo`."""

    ignores = (*OF_BAPO, "algorithm.online_filter", "loss.advantage_pool")

    def __init__(self, settings: AlgorithmConfig, own: Composer.Settings | None = None) -> None:
        super().__init__(settings, own)
        self.max_rounds = settings.max_rounds

    def compose(self, view: AssemblyView, rng: Rng) -> Decision | NeedMore:
        """D_t: the first B informative groups of all rounds, in the order of their requests."""
        reasons = unused(view)
        informative: dict[str, GroupStat] = {}
        for stat in view.fresh:
            if not is_informative(stat):
                reasons[stat.group_id] = why_left_out(stat)
            elif stat.prompt_id in informative:
                reasons[stat.group_id] = Reason.DUPLICATE_PROMPT
            else:
                informative[stat.prompt_id] = stat
        wanted = self._settings.batch_size
        if len(informative) < wanted and view.round < self.max_rounds:
            return NeedMore(found=len(informative), wanted=wanted)
        for place, stat in enumerate(informative.values()):
            reasons[stat.group_id] = Reason.INFORMATIVE if place < wanted else Reason.SURPLUS
        x1 = [stat.group_id for stat in informative.values()][:wanted]
        return Decision(items=whole_groups(x1), r_tot=r_tot_of(self._settings, view), reasons=reasons)
