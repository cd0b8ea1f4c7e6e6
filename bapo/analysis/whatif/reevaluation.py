"""Outcomes of re-evaluations: those that the run made, the nearest recorded ones, or unknown.

A simulated run may ask other hard prompts again, or in other steps, than the recorded one did. What the policy would
have answered is then

    recorded   the run asked this prompt in this very round: its group is taken as it is
    borrowed   it did not, but the prompt has a group that was sampled within `within` steps of the round and was not
               sampled before it became hard: the nearest such group stands in
    unknown    there is none: the prompt keeps its place in B_bad as if its group had never come, and is counted
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from bapo.analysis.whatif.recording import Recording, round_of, stat_of
from bapo.core.types import GroupStat, HardPrompt

DEFAULT_DELAY = 1
"""Steps from a round to the batch that its groups join, where no round was recorded: the usual case with slack."""


class Source(StrEnum):
    """Where the outcome of a simulated re-evaluation comes from."""

    RECORDED = "recorded"
    BORROWED = "borrowed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One re-evaluated group of a simulated run."""

    source: Source
    arrives_at: int
    """Step whose assembly sees it."""
    stat: GroupStat | None
    """None when it is unknown."""


class Answers:
    """Every recorded group by prompt, and every recorded round."""

    def __init__(self, recording: Recording, *, within: int) -> None:
        """`within`: most steps between a round and the policy version of a group that stands in for its answer."""
        self._within = within
        self._groups: defaultdict[str, list[tuple[int, GroupStat]]] = defaultdict(list)
        self._rounds: defaultdict[int, list[Answer]] = defaultdict(list)
        for step in recording.steps:
            for fate in (*step.fresh, *step.reevaluated):
                self._groups[fate.prompt_id].append((step.step, stat_of(fate)))
            for fate in step.reevaluated:
                answer = Answer(source=Source.RECORDED, arrives_at=step.step, stat=stat_of(fate))
                self._rounds[round_of(fate, step.step)].append(answer)
        delays = [answer.arrives_at - asked for asked, answers in self._rounds.items() for answer in answers]
        waits = recording.config.cadence.wait_for_reevaluation
        self.delay = int(statistics.median(delays)) if delays else 0 if waits else DEFAULT_DELAY
        """Steps from a round to the arrival of a group that the run did not sample."""

    def of_round(self, step: int) -> list[Answer]:
        """The recorded round of a step; empty when it asked nothing."""
        return self._rounds[step]

    def of_prompts(self, step: int, asked: Iterable[str], bad: Iterable[HardPrompt]) -> list[Answer]:
        """The answers to a round that asks these prompts of B_bad, in their order."""
        births = {entry.prompt_id: entry.birth for entry in bad}
        made = {answer.stat.prompt_id: answer for answer in self._rounds[step] if answer.stat}
        return [made.get(prompt_id) or self._borrowed(step, prompt_id, births[prompt_id]) for prompt_id in asked]

    def _borrowed(self, step: int, prompt_id: str, birth: int) -> Answer:
        """The group that made a prompt hard, and older ones, say nothing of how it does later."""
        later = [stat for seen_at, stat in self._groups[prompt_id] if seen_at > birth]
        near = [stat for stat in later if abs(stat.policy_version - step) <= self._within]
        arrives_at = step + self.delay
        if not near:
            return Answer(source=Source.UNKNOWN, arrives_at=arrives_at, stat=None)
        nearest = min(near, key=lambda stat: (abs(stat.policy_version - step), stat.policy_version))
        # Another id: the same group may be fresh in this very step.
        stat = msgspec.structs.replace(nearest, group_id=f"{nearest.group_id}@{step}")
        return Answer(source=Source.BORROWED, arrives_at=arrives_at, stat=stat)
