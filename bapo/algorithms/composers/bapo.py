"""BAPO: Batch Adaptation Policy Optimization, section 3.2 and algorithm 1 of the paper.

    X_on --online filter-------------------------------------> X1 --.
    B_bad --re-evaluated with pi_theta_t--> c1 < mu' < 1 -----> X2 --+--> D_t
    B_high --c2 <= mu <= c3, the latest S steps--------------> X3 --'

`compose` is lines 8-17 of docs/paper.md, Algorithm 1; the learner does the rest. No prompt occurs twice in D_t:
X1 goes before X2 and X2 before X3. The mini-test (docs/paper.md) is settings alone: c1 = 0 and x3_exactly_half.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bapo.algorithms.composer import AssemblyView, Composer, Decision, Reason, Rng, whole_groups
from bapo.algorithms.filters import Groups, Reasons, filtered_fresh
from bapo.algorithms.randomness import sample_in_order
from bapo.algorithms.reward_levels import is_all_correct, is_hard, is_informative, is_within
from bapo.algorithms.settings import AlgorithmConfig
from bapo.algorithms.thresholds import global_mean_reward, reuse_window
from bapo.core.types import GroupStat, HardPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What the re-evaluation of hard prompts gave."""

    x2: Groups
    bad: tuple[HardPrompt, ...]
    """B_bad without the prompts that were solved or train now."""
    reasons: Reasons


class Bapo(Composer):
    """The composer `bapo`."""

    ignores = ("algorithm.max_rounds", "loss.advantage_pool")

    @property
    def decides_by(self) -> tuple[str, ...]:
        settings = self._settings
        has_window = settings.use_x3 and settings.x3_policy == "window"
        return (*(("c1",) if settings.use_x2 else ()), *(("c2", "c3") if has_window else ()))

    @property
    def high_window(self) -> int:
        return self._settings.high_window

    @property
    def ages_by(self) -> tuple[str, ...]:
        return ("algorithm.high_window",) if self._settings.use_x3 and self._settings.high_window > 1 else ()

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t = X1 + X2 + X3, and B_bad and B_high after it: X2 and X3 never see a group that was born in this step."""
        settings = self._settings
        r_tot = global_mean_reward(view.fresh, view.previous_r_tot, settings.r_tot_decay)
        c2, c3 = reuse_window(settings, view, r_tot)
        x1, reasons = filtered_fresh(settings, view.fresh, rng("online_filter"))
        improvement = improved_hard(settings, view, prompt_ids(x1), settings.batch_size - len(x1), rng("x2"))
        x2 = improvement.x2
        room = settings.batch_size - len(x1) - len(x2)
        taken = prompt_ids(x1) | prompt_ids(x2)
        if settings.x3_policy == "youngest":
            x3, why = youngest(settings, view, taken, room), Reason.YOUNGEST
        else:
            x3, why = reused(settings, view, (c2, c3), taken, room, rng("x3")), Reason.REUSED
        return Decision(
            items=whole_groups(group_ids(x1), group_ids(x2), group_ids(x3)),
            r_tot=r_tot,
            facts={"c2": c2, "c3": c3},
            bad=with_new_hard(settings, improvement.bad, view),
            high=with_new_high(settings, view, c2, c3),
            reasons={**reasons, **improvement.reasons, **dict.fromkeys(group_ids(x3), why)},
        )

    def hard_prompts_to_ask(
        self, bad: Sequence[HardPrompt], step: int, excluded: frozenset[str], rng: Rng
    ) -> tuple[str, ...]:
        """At most M of B_bad, uniformly, oldest first; none that was born in this step or is asked as fresh anyway."""
        settings = self._settings
        if not settings.use_x2:
            return ()
        candidates = [p for p in bad if p.birth < step and p.prompt_id not in excluded]
        most = min(settings.most_reevaluated, len(candidates))
        return tuple(sample_in_order([p.prompt_id for p in candidates], most, rng("reevaluate")))


def improved_hard(
    settings: AlgorithmConfig, view: AssemblyView, taken: Collection[str], room: int, rng: random.Random
) -> Improvement:
    """X2: hard prompts whose new group has c1 < mu' < 1, as many as there is room for (eq. 6; line 6).

    Solved prompts leave B_bad untrained; prompts that are still hard, find no room, or whose rewards are all the same
    fraction keep their place.
    A prompt that was asked twice since the last assembly is judged by its newest group.
    """
    bad = {prompt.prompt_id: prompt for prompt in view.bad}
    newest = {stat.prompt_id: stat.group_id for stat in view.reevaluated}
    improved: list[GroupStat] = []
    reasons: Reasons = {}
    for stat in view.reevaluated:
        is_newest = newest[stat.prompt_id] == stat.group_id
        reason = judge(settings, stat, is_newest=is_newest, bad=bad, taken=taken)
        reasons[stat.group_id] = reason
        if not is_newest or reason in (Reason.NOT_USED, Reason.LEFT_BAD):
            continue
        if reason == Reason.SOLVED:
            del bad[stat.prompt_id]
            continue
        prompt = bad[stat.prompt_id]
        bad[stat.prompt_id] = replace(prompt, mu=stat.mu, attempts=prompt.attempts + (reason == Reason.STILL_HARD))
        if reason == Reason.IMPROVED:
            improved.append(stat)
    x2 = tuple(sample_in_order(improved, room, rng))
    left = prompt_ids(x2)
    reasons.update({stat.group_id: Reason.NO_ROOM for stat in improved if stat.prompt_id not in left})
    return Improvement(x2=x2, bad=tuple(p for p in bad.values() if p.prompt_id not in left), reasons=reasons)


def judge(
    settings: AlgorithmConfig,
    stat: GroupStat,
    *,
    is_newest: bool,
    bad: Mapping[str, HardPrompt],
    taken: Collection[str],
) -> str:
    """What became of one re-evaluated prompt. With c1 < mu' < 1 it may still find no room."""
    if not settings.use_x2:
        return Reason.NOT_USED
    if stat.prompt_id not in bad:
        return Reason.LEFT_BAD
    if not is_newest:
        return Reason.DUPLICATE_PROMPT
    if is_all_correct(stat):
        return Reason.SOLVED
    if is_hard(stat, settings.c1):
        return Reason.STILL_HARD
    if not is_informative(stat):
        return Reason.NO_VARIANCE
    return Reason.DUPLICATE_PROMPT if stat.prompt_id in taken else Reason.IMPROVED


def reused(
    settings: AlgorithmConfig,
    view: AssemblyView,
    window: tuple[float, float],
    taken: Collection[str],
    room: int,
    rng: random.Random,
) -> Groups:
    """X3: groups of the latest S steps with c2 <= mu <= c3, to fill what room is left (eq. 7; line 7)."""
    if room <= 0:
        return ()
    candidates = [
        stat
        for stat in stored(settings, view, taken)
        if is_within(stat, *window) and not (settings.drop_zero_variance_x3 and stat.homogeneous)
    ]
    return tuple(sample_in_order(candidates, room, rng))


def youngest(settings: AlgorithmConfig, view: AssemblyView, taken: Collection[str], room: int) -> Groups:
    """X3 instead of eq. 7: informative groups, youngest first, then nearest to mu = 1/2, then as in B_high."""
    candidates = [stat for stat in stored(settings, view, taken) if is_informative(stat)]
    return tuple(sorted(candidates, key=age_and_distance)[: max(0, room)])


def stored(settings: AlgorithmConfig, view: AssemblyView, taken: Collection[str]) -> list[GroupStat]:
    """Groups of B_high that X3 may take: of the latest S steps, of no prompt that trains already."""
    if not settings.use_x3:
        return []
    oldest = view.step - settings.high_window
    return [stat for stat in view.high if oldest <= stat.birth < view.step and stat.prompt_id not in taken]


def age_and_distance(stat: GroupStat) -> tuple[int, float]:
    """The younger first, then |k - G/2|, rounded so that equal levels are equal."""
    return -stat.birth, round(abs(stat.reward_sum - stat.size / 2), 6)


def with_new_hard(settings: AlgorithmConfig, bad: Iterable[HardPrompt], view: AssemblyView) -> tuple[HardPrompt, ...]:
    """B_bad after this step: fresh groups with mu <= c1 join its tail; beyond capacity the oldest leave (line 12)."""
    queue = {prompt.prompt_id: prompt for prompt in bad}
    for stat in view.fresh:
        if is_hard(stat, settings.c1):
            queue.pop(stat.prompt_id, None)
            queue[stat.prompt_id] = HardPrompt(prompt_id=stat.prompt_id, birth=view.step, mu=stat.mu)
    return tuple(queue.values())[-settings.capacity :]


def with_new_high(settings: AlgorithmConfig, view: AssemblyView, c2: float, c3: float) -> Groups:
    """B_high after this step: fresh groups inside the window enter, births before t - S + 1 leave (lines 12 and 13).

    What is taken youngest first needs all informative ones.
    """
    queue = {stat.prompt_id: stat for stat in view.high if stat.birth > view.step - settings.high_window}
    for stat in view.fresh:
        if is_within(stat, c2, c3) or (settings.x3_policy == "youngest" and is_informative(stat)):
            queue.pop(stat.prompt_id, None)
            queue[stat.prompt_id] = stat.born(view.step)
    return tuple(queue.values())


def prompt_ids(groups: Iterable[GroupStat]) -> set[str]:
    return {stat.prompt_id for stat in groups}


def group_ids(groups: Iterable[GroupStat]) -> tuple[str, ...]:
    return tuple(stat.group_id for stat in groups)
