"""DOTS' rollout replay (docs/methods.md): sigma B fresh groups, and (1 - sigma) B from a first-in-first-out memory.

The memory holds the newest group of each prompt, `replay.capacity` groups in all; 1 - sigma is `replay.share`, and the
steps before `replay.first_step` are all fresh. Groups whose rewards are all equal are not kept, unless
`replay.keep_homogeneous` says so: the released code has that rule, commented out. Which prompts are asked is
the prompt selector's affair.
Does not use: c1, c2, c3, X2; the online filter applies to the fresh groups.
"""

from __future__ import annotations

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import FreshOnly, r_tot_of, unused
from bapo.algorithms.composers.replay_memory import newest, once_per_prompt, with_fresh
from bapo.algorithms.filters import filtered_fresh
from bapo.algorithms.randomness import sample_in_order
from bapo.algorithms.settings import AlgorithmConfig


class DotsReplay(FreshOnly):
    name = "dots_replay"

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t, and the memory with this step's fresh groups after it."""
        settings, replay = self._settings, self._settings.replay
        x1, reasons = filtered_fresh(settings, view.fresh, rng("online_filter"))
        taken = {stat.prompt_id for stat in x1}
        candidates = [stat for stat in view.high if stat.prompt_id not in taken]
        x3 = sample_in_order(candidates, settings.num_replayed(view.step), rng("x3"))
        kept = [stat for stat in view.fresh if replay.keep_homogeneous or not stat.homogeneous]
        return Decision(
            items=whole_groups((stat.group_id for stat in x1), x3=(stat.group_id for stat in x3)),
            r_tot=r_tot_of(settings, view),
            high=newest(once_per_prompt(with_fresh(view.high, kept, view.step)), replay.capacity),
            reasons={**reasons, **{stat.group_id: Reason.REUSED for stat in x3}, **unused(view)},
        )


def make_composer(settings: AlgorithmConfig) -> DotsReplay:
    return DotsReplay(settings)
