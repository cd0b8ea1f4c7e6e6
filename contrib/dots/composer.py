"""DOTS' rollout replay (docs/methods.md): sigma B fresh groups, and (1 - sigma) B from a first-in-first-out memory.

The memory holds the newest group of each prompt, `capacity` groups in all; 1 - sigma is `share`, and the
steps before `first_step` are all fresh. Groups whose rewards are all equal are not kept, unless
`keep_homogeneous` says so: the released code has that rule, commented out. Which prompts are asked is
the prompt selector's affair.
Does not use: c1, c2, c3, X2; the online filter applies to the fresh groups.
"""

from __future__ import annotations

from pydantic import Field

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import r_tot_of, unused
from bapo.algorithms.filters import filtered_fresh
from bapo.algorithms.randomness import sample_in_order
from contrib.replay_memory import ReplaysShare, newest, once_per_prompt, with_fresh


class DotsReplay(ReplaysShare):
    """The composer `dots`."""

    class Settings(ReplaysShare.Settings):
        """Of its memory."""

        capacity: int | None = Field(512, ge=1)
        """Maximum groups in the memory, first in first out; null: one per prompt."""
        keep_homogeneous: bool = False
        """Also keep zero-variance groups."""

    _own: Settings

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t, and the memory with this step's fresh groups after it."""
        settings, own = self._settings, self._own
        x1, reasons = filtered_fresh(settings, view.fresh, rng("online_filter"))
        taken = {stat.prompt_id for stat in x1}
        candidates = [stat for stat in view.high if stat.prompt_id not in taken]
        x3 = sample_in_order(candidates, self.num_replayed(view.step), rng("x3"))
        kept = [stat for stat in view.fresh if own.keep_homogeneous or not stat.homogeneous]
        return Decision(
            items=whole_groups((stat.group_id for stat in x1), x3=(stat.group_id for stat in x3)),
            r_tot=r_tot_of(settings, view),
            high=newest(once_per_prompt(with_fresh(view.high, kept, view.step)), own.capacity),
            reasons={**reasons, **{stat.group_id: Reason.REUSED for stat in x3}, **unused(view)},
        )
