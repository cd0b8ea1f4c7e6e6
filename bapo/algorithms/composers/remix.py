"""ReMix (Remix-GRPO): a part of the batch comes from the fresh groups of the latest N steps.

    t <= T   (1 - p) B fresh groups, and p B of those that were fresh in steps t - N .. t - 1, uniformly
    t > T    "reincarnation": plain on-policy, B fresh groups and no memory

p is `replay.share`, N `replay.window`, T `replay.last_step`. The paper draws i ~ nu over the window and leaves nu open:
here every group of the window is equally likely. Its KL terms and its ratio are the loss's.
Does not use: c1, c2, c3, X2; the online filter applies to the fresh groups.
"""

from __future__ import annotations

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import FreshOnly, on_policy, r_tot_of, unused
from bapo.algorithms.composers.replay_memory import with_fresh
from bapo.algorithms.filters import filtered_fresh
from bapo.algorithms.randomness import sample_in_order
from bapo.algorithms.settings import AlgorithmConfig


class Remix(FreshOnly):
    name = "remix"
    prompts_once = False

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t, and the window that step t + 1 draws from."""
        settings = self._settings
        last = settings.replay.last_step
        if last is not None and view.step > last:
            return on_policy(settings, view, rng)
        x1, reasons = filtered_fresh(settings, view.fresh, rng("online_filter"))
        window = [stat for stat in view.high if view.step - settings.replay.window <= stat.birth < view.step]
        x3 = sample_in_order(window, settings.num_replayed(view.step), rng("x3"))
        reasons |= {stat.group_id: Reason.REUSED for stat in x3}
        oldest = view.step + 1 - settings.replay.window
        memory = with_fresh(view.high, view.fresh, view.step) if last is None or view.step < last else ()
        return Decision(
            items=whole_groups((stat.group_id for stat in x1), x3=(stat.group_id for stat in x3)),
            r_tot=r_tot_of(settings, view),
            high=tuple(stat for stat in memory if stat.birth >= oldest),
            reasons={**reasons, **unused(view)},
        )


def make_composer(settings: AlgorithmConfig) -> Remix:
    return Remix(settings)
