"""BAPO with X2 only of prompts that have not been seen for `min_age` steps: of hard ones, or of any.

    hard    fresh group with mu <= c1 --> B_bad --not seen for min_age steps--> asked again --c1 < mu' < 1--> X2, leaves
                                            ^                                        |  '--mu' = 1--> leaves
                                            '-----------------mu' <= c1--------------'
    any     every fresh prompt ---------> B_bad --not seen for min_age steps--> asked again --c1 < mu' < 1--> X2
                                            ^                                        |
                                            '------------------always----------------'

`any` is the control of `hard`: prompts of the same age are asked again, whatever their result was, and what trains of
them follows the same rule. A difference between the two is then due to the choice of *hard* prompts.
A prompt is seen by a fresh group or a re-evaluation; the step of the last one is the `birth` of its entry. In `bapo`
that is the step of its fresh group, and a failed prompt may be asked at every re-evaluation (docs/studies/unlocked.md).
What would falsify it: `hard` is not better than `any` at equal responses (docs/studies/mixture.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from bapo.algorithms.composer import AssemblyView, Composer, Decision, Reason, Rng
from bapo.algorithms.composers.bapo import Bapo
from bapo.core.types import HardPrompt


class Revisit(Bapo):
    """The composer `revisit`."""

    class Settings(Composer.Settings):
        """Which prompts are asked again, and when."""

        which: Literal["hard", "any"] = "hard"
        """Those that failed (mu <= c1), or any, for all of which `algorithm.bad_capacity` must have room."""
        min_age: int = Field(10, ge=1)
        """Steps since a prompt was last sampled, before it may be re-evaluated."""

    _own: Settings

    @classmethod
    def check(cls, config: Any, own: Settings) -> Iterator[str]:
        yield from super().check(config, own)
        if not config.algorithm.use_x2:
            yield 'algorithm.composer = "revisit" asks again in re-evaluation rounds; set algorithm.use_x2 = true'

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """As `bapo`, with B_bad in the order of the last visits."""
        view = replace(view, bad=by_last_visit(view))
        decision = super().compose(view, rng)
        if self._own.which == "hard":
            return decision
        queue = {entry.prompt_id: entry for entry in view.bad}
        for stat in view.fresh:
            queue.pop(stat.prompt_id, None)
            queue[stat.prompt_id] = HardPrompt(prompt_id=stat.prompt_id, birth=view.step, mu=stat.mu)
        # What `bapo` calls solved leaves its B_bad, and stays here.
        words = {
            group_id: Reason.ALL_CORRECT if word == Reason.SOLVED else word
            for group_id, word in decision.reasons.items()
        }
        return replace(decision, bad=tuple(queue.values())[-self._settings.capacity :], reasons=words)

    def hard_prompts_to_ask(
        self, bad: Sequence[HardPrompt], step: int, excluded: frozenset[str], rng: Rng
    ) -> tuple[str, ...]:
        """At most M of those that have not been seen for `min_age` steps, uniformly, oldest first."""
        rested = [entry for entry in bad if step - entry.birth >= self._own.min_age]
        return super().hard_prompts_to_ask(rested, step, excluded, rng)


def by_last_visit(view: AssemblyView) -> tuple[HardPrompt, ...]:
    """B_bad, the prompts that were asked again for this step last; one that has left meanwhile does not come back."""
    queue = {entry.prompt_id: entry for entry in view.bad}
    for stat in view.reevaluated:
        asked = queue.pop(stat.prompt_id, None)
        if asked is not None:
            queue[stat.prompt_id] = replace(asked, birth=view.step, mu=stat.mu)
    return tuple(queue.values())
