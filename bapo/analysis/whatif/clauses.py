"""The inequality that decided about one group, for every word of `Reason`: values in, part of a sentence out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bapo.algorithms.composer import Reason
from bapo.algorithms.composers.bapo import prompt_ids, reused
from bapo.algorithms.filters import keep_probability
from bapo.algorithms.settings import AlgorithmConfig
from bapo.analysis.whatif.reasons import meanings
from bapo.analysis.whatif.recording import round_of, stat_of
from bapo.analysis.whatif.simulation import SimulatedStep, rng_at
from bapo.config.tree import Config
from bapo.core.types import Fate, GroupStat, Purpose

EVERYTHING = 1 << 30
"""More room than there are groups."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One group that an assembly looked at."""

    config: Config
    step: SimulatedStep
    fate: Fate

    @property
    def settings(self) -> AlgorithmConfig:
        """Of the composer."""
        return self.config.algorithm

    @property
    def stat(self) -> GroupStat:
        """The group in numbers."""
        return stat_of(self.fate)


def clause(case: Case) -> str:
    """Why this group is or is not in the batch."""
    writer = _WRITERS.get(case.fate.reason)
    return writer(case) if writer else _generic(case)


def number(value: float) -> str:
    """0, 3, 0.375, 0.3125."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


def of_size(stat: GroupStat) -> str:
    """k = 3 of 8."""
    return f"k = {number(stat.reward_sum)} of {stat.size}"


def reusable(config: Config, step: SimulatedStep) -> list[GroupStat]:
    """The candidates of X3 in this step, drawn or not."""
    decision, settings = step.decision, config.algorithm
    taken_ids = {*decision.x1, *decision.x2}
    taken = prompt_ids(stat for stat in (*step.view.fresh, *step.view.reevaluated) if stat.group_id in taken_ids)
    rng = rng_at(config, step.step)("x3")
    return list(reused(settings, step.view, (decision.c2, decision.c3), taken, EVERYTHING, rng))


def room_of(config: Config, step: SimulatedStep) -> int:
    """B - |X1| - |X2| (eq. 7)."""
    return config.algorithm.batch_size - len(step.decision.x1) - len(step.decision.x2)


def _informative(case: Case) -> str:
    needed = f"its fresh group had {of_size(case.stat)}"
    name, stat = case.settings.online_filter, case.stat
    if name == "none":
        return f"{needed}, and the filter none keeps every fresh group"
    if name == "uniform":
        return f"{needed}, and the uniform filter drew it, whatever its rewards"
    if name == "range":
        return f"{needed}, and the range filter needs {_range_of(stat)}"
    drawn = (
        f"its draw kept it with {_probability(case)}" if name == "gaussian" else "it was drawn into its level's quota"
    )
    return f"{needed}, inside {_range_of(stat)}, and {drawn}"


def _outside(case: Case) -> str:
    if case.settings.online_filter == "uniform":
        return (
            f"its fresh group had {of_size(case.stat)}, and the uniform filter, which keeps a share of "
            f"{number(case.settings.uniform_share)} whatever the rewards, did not draw it"
        )
    return (
        f"its fresh group had {of_size(case.stat)}, and the {case.settings.online_filter} filter needs "
        f"{_range_of(case.stat)}"
    )


def _filtered(case: Case) -> str:
    had = f"its fresh group had {of_size(case.stat)}, inside {_range_of(case.stat)}"
    name, settings = case.settings.online_filter, case.settings
    if name == "gaussian":
        return f"{had}, but the gaussian filter keeps it with {_probability(case)} and its draw said no"
    if name == "gaussian_quota":
        return f"{had}, but the gaussian_quota filter had drawn the quota of its level without it"
    return f"{had}, but the {name} filter keeps a share of {number(settings.uniform_share)} and did not draw it"


def _no_variance(case: Case) -> str:
    same = f"all {case.stat.size} rewards of its {{}} were {number(case.stat.mu)}, so every advantage would be 0"
    if case.fate.purpose is Purpose.FRESH:
        return same.format("fresh group")
    return f"{_asked_again(case)}, but {same.format('new group')}; it stays in B_bad"


def _duplicate(case: Case) -> str:
    if case.fate.purpose is Purpose.FRESH:
        return f"its fresh group {case.fate.group_id} came behind another fresh group of the same prompt"
    if case.stat.prompt_id in {
        stat.prompt_id for stat in case.step.view.fresh if stat.group_id in case.step.decision.x1
    }:
        return f"{_asked_again(case)}, but a fresh group of the same prompt is in X1, and a prompt trains once per step"
    return f"{_asked_again(case)}, but a newer re-evaluation of the same prompt was there, and the newest counts"


def _improved(case: Case) -> str:
    return f"{_asked_again(case)}: c1 = {number(case.settings.c1)} < mu' = {number(case.stat.mu)} < 1"


def _still_hard(case: Case) -> str:
    return (
        f"{_asked_again(case)}: mu' = {number(case.stat.mu)} <= c1 = {number(case.settings.c1)}, so it stays in B_bad"
    )


def _solved(case: Case) -> str:
    return f"{_asked_again(case)}: mu' = 1, so nothing is left to learn and it leaves B_bad"


def _no_room(case: Case) -> str:
    decision = case.step.decision
    improved = [name for name, word in decision.reasons.items() if word in (Reason.IMPROVED, Reason.NO_ROOM)]
    room = case.settings.batch_size - len(decision.x1)
    return (
        f"{_improved(case)}, but not drawn: room {room} (B = {case.settings.batch_size} less "
        f"|X1| = {len(decision.x1)}), candidates {len(improved)}; it stays in B_bad"
    )


def _left_bad(case: Case) -> str:
    return (
        f"{_asked_again(case)} with {of_size(case.stat)}, but when it arrived its prompt was not in B_bad any more: it "
        "had been trained, solved or pushed out meanwhile"
    )


def _not_used(case: Case) -> str:
    why = "use_x2 = false" if not case.settings.use_x2 else f"the composer {case.settings.name} has no X2"
    return f"{_asked_again(case)} with {of_size(case.stat)}, but {why}"


def _stale(case: Case) -> str:
    step, version, most = case.step.step, case.fate.policy_version, case.config.cadence.max_staleness
    return (
        f"its fresh group was sampled at version {version}: {step} - {version} = {step - version} > {most} = "
        "cadence.max_staleness; it was dropped and its prompt asked again"
    )


def _reused(case: Case) -> str:
    decision, stat = case.step.decision, case.stat
    return (
        f"its stored group of step {case.fate.birth} ({of_size(stat)}) was drawn from B_high: "
        f"c2 = {number(decision.c2)} <= mu = {number(stat.mu)} <= c3 = {number(decision.c3)}, "
        f"room {room_of(case.config, case.step)}, candidates {len(reusable(case.config, case.step))}"
    )


def _youngest(case: Case) -> str:
    return (
        f"its stored group of step {case.fate.birth} ({of_size(case.stat)}) was among the youngest informative ones of "
        f"B_high, and among equals among the nearest to mu = 1/2 (x3_choice = {case.settings.x3_choice})"
    )


def _generic(case: Case) -> str:
    word = case.fate.reason
    text = meanings(case.settings.name).get(word, "the composer does not document this word").rstrip(".")
    return (
        f"its {case.fate.purpose.value} group had {of_size(case.stat)} and is {word!r} for {case.settings.name}: {text}"
    )


def _asked_again(case: Case) -> str:
    asked = round_of(case.fate, case.step.step)
    late = "" if asked == case.step.step else f", arrived for step {case.step.step}"
    return f"it was re-evaluated (asked in step {asked}{late})"


def _range_of(stat: GroupStat) -> str:
    return f"1 <= k <= {stat.size - 1}"


def _probability(case: Case) -> str:
    settings, mu = case.settings, case.stat.mu
    chance = keep_probability(mu, settings.gaussian_center, settings.gaussian_width)
    return f"p(mu = {number(mu)}) = {number(chance)}"


_WRITERS: dict[str, Callable[[Case], str]] = {
    Reason.INFORMATIVE: _informative,
    Reason.IMPROVED: _improved,
    Reason.REUSED: _reused,
    Reason.YOUNGEST: _youngest,
    Reason.ALL_WRONG: _outside,
    Reason.ALL_RIGHT: _outside,
    Reason.FILTERED: _filtered,
    Reason.DUPLICATE_PROMPT: _duplicate,
    Reason.STILL_HARD: _still_hard,
    Reason.SOLVED: _solved,
    Reason.NO_ROOM: _no_room,
    Reason.LEFT_BAD: _left_bad,
    Reason.NO_VARIANCE: _no_variance,
    Reason.NOT_USED: _not_used,
    Reason.STALE: _stale,
}
"""A word without a writer gets its docstring."""
