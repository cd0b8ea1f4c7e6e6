"""ReMix (Remix-GRPO): a part of the batch comes from the fresh groups of the latest N steps.

    t <= T   (1 - p) B fresh groups, and p B of those that were fresh in steps t - N .. t - 1, uniformly
    t > T    "reincarnation": plain on-policy, B fresh groups and no memory

p is `share`, N `window`, T `last_step`. The paper draws i ~ nu over the window and leaves nu open:
here every group of the window is equally likely. Its KL terms and its ratio are the loss's.
Does not use: c1, c2, c3, X2; the online filter applies to the fresh groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng, whole_groups
from bapo.algorithms.composers.fresh_only import on_policy, r_tot_of, unused
from bapo.algorithms.filters import filtered_fresh
from bapo.algorithms.randomness import sample_in_order
from contrib.replay_memory import ReplaysShare, with_fresh


class Remix(ReplaysShare):
    """The composer `remix`."""

    prompts_once = False

    class Settings(ReplaysShare.Settings):
        """And how far back it looks."""

        window: int = Field(2, ge=1)
        """N: replayed groups come from this many steps before."""

    _own: Settings

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        yield from super().check(config, own)
        ends = {
            "algorithm.options.last_step": own.last_step,
            "loss.kl_restart_step": config.loss.kl_restart_step,
            "learner.epochs_until": config.learner.epochs_until,
        }
        if len({end for end in ends.values() if end is not None}) > 1:
            found = ", ".join(f"{key} = {'null' if end is None else end}" for key, end in ends.items())
            yield (
                f"{found}: these are all T of ReMix, the step after which it is plain GRPO; use the same number, or "
                "null for the parts that should not end"
            )

    @property
    def reuse_steps(self) -> int:
        return self._own.window

    @property
    def ages_by(self) -> tuple[str, ...]:
        return (*(("algorithm.options.window",) if self._own.window > 1 else ()), *super().ages_by)

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t, and the window that step t + 1 draws from."""
        settings = self._settings
        last, span = self._own.last_step, self._own.window
        if last is not None and view.step > last:
            return on_policy(settings, view, rng)
        x1, reasons = filtered_fresh(settings, view.fresh, rng("online_filter"))
        window = [stat for stat in view.high if view.step - span <= stat.birth < view.step]
        x3 = sample_in_order(window, self.num_replayed(view.step), rng("x3"))
        reasons |= {stat.group_id: Reason.REUSED for stat in x3}
        oldest = view.step + 1 - span
        memory = with_fresh(view.high, view.fresh, view.step) if last is None or view.step < last else ()
        return Decision(
            items=whole_groups((stat.group_id for stat in x1), x3=(stat.group_id for stat in x3)),
            r_tot=r_tot_of(settings, view),
            high=tuple(stat for stat in memory if stat.birth >= oldest),
            reasons={**reasons, **unused(view)},
        )
