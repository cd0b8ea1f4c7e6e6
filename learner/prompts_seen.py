"""Which prompts of a run never had a right response, and which have their first one now.

Held by rank 0, which sees every batch; after a resume it looks once more at the records of the steps that stay. Counts
every first right response after an all-wrong first group, so also those of a prompt that was merely sampled again: for
what is compared between methods see ADR 0080.
"""

from __future__ import annotations

from collections.abc import Iterable

from bapo.telemetry import Telemetry
from bapo.types import Fate


class PromptsSeen:
    """Remembers the ids of all prompts that a run has sampled."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._unsolved_gauge = telemetry.gauge("bapo_prompts_unsolved")
        self._rescued = telemetry.counter("bapo_prompts_rescued_total")
        self._solved: set[str] = set()
        self._unsolved: set[str] = set()

    def look(self, fates: Iterable[Fate], *, is_new: bool = True) -> None:
        """The groups of one step, in the order of its assembly. `is_new`: False for records of a step before."""
        for fate in fates:
            if max(fate.rewards, default=0.0) <= 0.0:
                if fate.prompt_id not in self._solved:
                    self._unsolved.add(fate.prompt_id)
                continue
            if fate.prompt_id in self._unsolved:
                self._unsolved.remove(fate.prompt_id)
                if is_new:
                    self._rescued.labels(purpose=fate.purpose.value).inc()
            self._solved.add(fate.prompt_id)
        self._unsolved_gauge.set(len(self._unsolved))
