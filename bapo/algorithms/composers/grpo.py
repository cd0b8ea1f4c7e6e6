"""GRPO as a batch composer: the fresh groups that pass the online filter train, and nothing is stored.

The preset `grpo` takes `online_filter = "none"` (all groups train). With `range` it is GRPO with the zero-variance mask
of Mroueh et al.; with v = 5 it is the paper's off-policy baseline "GRPO (v = 5)".
Does not use: c1, c2, c3, X2, X3.
"""

from __future__ import annotations

from bapo.algorithms.composer import OF_BAPO, AssemblyView, Composer, Decision, Rng
from bapo.algorithms.composers.fresh_only import on_policy


class Grpo(Composer):
    """The composer `grpo`."""

    ignores = (*OF_BAPO, "algorithm.max_rounds", "loss.advantage_pool")

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t = X1."""
        return on_policy(self._settings, view, rng)
