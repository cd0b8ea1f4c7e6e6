"""Pilot and commit: a few responses first, the others only where they are expected to be informative.

    step t      X_on: B pilots of n = `pilot_size` responses --is_promising--> B_bad (prompt), B_high (pilot)
    step t + m  prompts of B_bad: G - n more responses of each --joined with the pilot, rewards that differ--> X1

The rewards of a prompt have variance p (1 - p), the signal of its advantages. With the prior p ~ Beta(s r, s (1 - r)),
r = r_tot of the step and s = `pilot_prior`, a pilot with k correct responses is promising if

    E[p (1 - p) | k of n] > E[p (1 - p)]

that is, if its next response is worth more than one of a new prompt. While few responses are correct (r = 1/8), that
is every pilot with a correct one; while most are, those with an incorrect one.

Source: Pilot-Commit (arXiv 2605.26606), which spends pilots likewise; the rule by expected variance is ours.
What would falsify it: at equal responses it does not exceed DAPO, which pays for G responses of every prompt.
Does not use: c1, c2, c3, X3; an incomplete group never trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from bapo.algorithms.composer import AssemblyView, Composer, Decision, Reason, Rng
from bapo.algorithms.composers.fresh_only import r_tot_of
from bapo.algorithms.filters import why_left_out
from bapo.algorithms.reward_levels import expected_variance, is_informative
from bapo.core.batch_items import Item, Part
from bapo.core.types import GroupStat, HardPrompt, Origin, are_equal


class PilotCommit(Composer):
    """The composer `pilot_commit`."""

    class Settings(Composer.Settings):
        """Of its pilots."""

        pilot_size: int = Field(2, ge=1)
        """n: responses of a fresh group; the other G - n are sampled where they are expected to be informative."""
        pilot_prior: float = Field(2.0, gt=0)
        """s: strength, in responses, of the prior of the pass rate, whose mean is r_tot."""

    _own: Settings

    @classmethod
    def check(cls, config: Any, own: Settings) -> Iterator[str]:
        algorithm = config.algorithm
        if own.pilot_size >= algorithm.group_size or not algorithm.use_x2:
            yield (
                f"algorithm.options.pilot_size = {own.pilot_size} with group_size = {algorithm.group_size} and "
                f"use_x2 = {algorithm.use_x2}: the other responses are sampled in re-evaluation rounds; use a smaller "
                "pilot_size and algorithm.use_x2 = true"
            )
        if not config.cadence.wait_for_reevaluation:
            yield (
                "cadence.wait_for_reevaluation = false with pilots: the rest of a group would be requested twice; set "
                "cadence.wait_for_reevaluation = true"
            )

    @property
    def fresh_size(self) -> int:
        return self._own.pilot_size

    @property
    def reevaluated_size(self) -> int:
        return self._settings.group_size - self._own.pilot_size

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t: the completed groups that are informative. Pilots of this step are chosen for completion."""
        r_tot = r_tot_of(self._settings, view)
        waiting = {prompt.prompt_id: prompt for prompt in view.bad}
        pilots = {stat.prompt_id: stat for stat in view.high}
        items: list[Item] = []
        reasons: dict[str, str] = {}
        for rest in view.reevaluated:
            pilot = pilots.pop(rest.prompt_id, None)
            if waiting.pop(rest.prompt_id, None) is None or pilot is None:
                reasons[rest.group_id] = Reason.LEFT_BAD
                continue
            whole = completed(pilot, rest)
            if not is_informative(whole):
                reasons[rest.group_id] = why_left_out(whole)
            elif len(items) == self._settings.batch_size:
                reasons[rest.group_id] = Reason.NO_ROOM
            else:
                parts = tuple(Part(group_id=stat.group_id, rows=stat.sampled_rows) for stat in (pilot, rest))
                items.append(Item(origin=Origin.X1, parts=parts))
                reasons |= {pilot.group_id: Reason.COMPLETED, rest.group_id: Reason.INFORMATIVE}
        for pilot in view.fresh:
            if pilot.prompt_id in waiting:
                reasons[pilot.group_id] = Reason.DUPLICATE_PROMPT
            elif is_promising(pilot, r_tot, self._own.pilot_prior):
                reasons[pilot.group_id] = Reason.PROMISING
                waiting[pilot.prompt_id] = HardPrompt(prompt_id=pilot.prompt_id, birth=view.step, mu=pilot.mu)
                pilots[pilot.prompt_id] = pilot.born(view.step)
            else:
                reasons[pilot.group_id] = Reason.DEFERRED
        return Decision(
            items=tuple(items),
            r_tot=r_tot,
            bad=tuple(waiting.values()),
            high=tuple(pilots[prompt_id] for prompt_id in waiting),
            reasons=reasons,
        )

    def hard_prompts_to_ask(
        self, bad: Sequence[HardPrompt], step: int, excluded: frozenset[str], rng: Rng
    ) -> tuple[str, ...]:
        """Prompts that wait for the rest of their group, the oldest first, at most M, by default B; those that are
        fresh in this step wait on."""
        waiting = [prompt for prompt in bad if prompt.birth < step and prompt.prompt_id not in excluded]
        oldest = sorted(waiting, key=lambda prompt: prompt.birth)  # stable
        most = self._settings.max_reevaluated or self._settings.batch_size
        return tuple(prompt.prompt_id for prompt in oldest[:most])


def is_promising(pilot: GroupStat, r_tot: float, prior: float) -> bool:
    """Whether E[p (1 - p)] given the pilot exceeds that of a new prompt."""
    a, b = prior * r_tot, prior * (1 - r_tot)
    correct = pilot.reward_sum
    return expected_variance(a + correct, b + pilot.size - correct) > expected_variance(a, b)


def completed(pilot: GroupStat, rest: GroupStat) -> GroupStat:
    """The group of both, without rows: its size and rewards."""
    rewards = (*pilot.rewards, *rest.rewards)
    return GroupStat(
        group_id=rest.group_id,
        prompt_id=rest.prompt_id,
        policy_version=pilot.policy_version,
        size=pilot.size + rest.size,
        reward_sum=pilot.reward_sum + rest.reward_sum,
        homogeneous=are_equal(rewards),
        rewards=rewards,
    )
