"""The composer interface: a pure function from the contents of the buffer to the batch of step t.

The buffer service calls `compose` once per step, inside the atomic assembly of that step, and then applies the
Decision to its store. So an algorithm is one file of this folder; store, wire and learner are independent of it.

    AssemblyView (contents)       --compose-->  Decision (what trains, what is kept, and why)
                                          '-->  NeedMore (another round of fresh groups, then re-evaluated)

`bad` and `high` are the two buffers of a composer: prompts to re-evaluate, and whole groups to reuse. What is kept and
for how long is up to the composer.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from bapo.algorithms.methods import Method
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.batch_items import Item, whole
from bapo.core.types import GroupStat, HardPrompt, Origin

Rng = Callable[[str], random.Random]
"""Purpose -> generator, counter-based: keyed by (run seed, step, purpose), so that a resumed run draws the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyView:
    """The contents of the buffer when step t is assembled."""

    step: int
    """t, from 1."""
    fresh: tuple[GroupStat, ...]
    """X_on(t): the groups of every round so far, exactly `Composer.fresh_schedule.at(t)` in each, in the order of their
    requests."""
    reevaluated: tuple[GroupStat, ...]
    """Re-evaluated groups that arrived since the last assembly, in request order."""
    bad: tuple[HardPrompt, ...]
    """B_bad, oldest first."""
    high: tuple[GroupStat, ...]
    """B_high, oldest first; `birth` is the step that inserted it."""
    previous_r_tot: float | None
    """r_tot of the previous step; None at t = 1."""
    round: int = 1
    """Number of generation rounds in `fresh`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What step t trains, and B_bad and B_high after its inserts and evictions.

    Invariants: no item occurs twice; at most B items of each kind; no prompt trains twice by the surrogate, if the
    composer promises that; every group of `fresh` and `reevaluated` has a reason. A group of B_high has one only when
    it trains.
    """

    items: tuple[Item, ...]
    """What trains, in the order X1, X2, X3."""
    r_tot: float
    facts: Mapping[str, float] = field(default_factory=dict)
    """What else the composer reports of this step, by name: it goes with the batch into metrics.jsonl."""
    bad: tuple[HardPrompt, ...] = ()
    """B_bad after this step, oldest first."""
    high: tuple[GroupStat, ...] = ()
    """B_high after this step, oldest first."""
    reasons: Mapping[str, str]
    """Group id -> why it trains or does not: a value of `Reason`."""

    @property
    def reported(self) -> dict[str, float]:
        """The facts, and the sizes of both buffers."""
        return {**self.facts, "num_bad": len(self.bad), "num_high": len(self.high)}

    def ids(self, origin: Origin) -> tuple[str, ...]:
        """Ids of the items of this origin: of whole groups, the groups'."""
        return tuple(item.item_id for item in self.items if item.origin is origin)

    @property
    def x1(self) -> tuple[str, ...]:
        return self.ids(Origin.X1)

    @property
    def x2(self) -> tuple[str, ...]:
        return self.ids(Origin.X2)

    @property
    def x3(self) -> tuple[str, ...]:
        return self.ids(Origin.X3)

    @property
    def origins(self) -> dict[str, Origin]:
        """Id of each item -> origin."""
        return {item.item_id: item.origin for item in self.items}


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedMore:
    """The step needs another round of fresh groups before it can be composed."""

    found: int
    """Groups that would train so far."""
    wanted: int
    """Groups that would fill the batch."""


def whole_groups(x1: Iterable[str] = (), x2: Iterable[str] = (), x3: Iterable[str] = ()) -> tuple[Item, ...]:
    """The items of a batch of whole groups, from their ids."""
    parts = ((Origin.X1, x1), (Origin.X2, x2), (Origin.X3, x3))
    return tuple(whole(origin, group_id) for origin, ids in parts for group_id in ids)


class Word(StrEnum):
    """Reason words; what each means is its `text`. A composer's file may have words of its own, in another subclass."""

    text: str

    def __new__(cls, word: str, text: str) -> Self:
        member = str.__new__(cls, word)
        member._value_, member.text = word, text
        return member


class Reason(Word):
    """Why a group trains in a step or does not."""

    INFORMATIVE = "informative", "it passed the online filter"
    IMPROVED = "improved", "re-evaluated with c1 < mu < 1"
    REUSED = "reused", "drawn from B_high"
    YOUNGEST = "youngest", "among the youngest informative groups of B_high"
    REPLAYED = "replayed", "rows of a stored group train with a fresh group of its prompt"
    SUPERVISED = "supervised", "its expert row trains by cross-entropy"
    ALL_INCORRECT = "all_incorrect", "all rewards are 0"
    ALL_CORRECT = "all_correct", "all rewards are 1"
    FILTERED = "filtered", "informative, but the online filter dropped it"
    DUPLICATE_PROMPT = "duplicate_prompt", "another group of the same prompt is in the batch"
    STILL_HARD = "still_hard", "re-evaluated with mu <= c1: stays in B_bad"
    SOLVED = "solved", "re-evaluated with mu = 1: leaves B_bad, nothing to learn"
    NO_ROOM = "no_room", "improved, but the batch is full: stays in B_bad"
    LEFT_BAD = "left_bad", "re-evaluated, but its prompt has left B_bad meanwhile"
    NO_VARIANCE = "no_variance", "all rewards are the same fraction between 0 and 1: no advantage"
    NOT_USED = "not_used", "re-evaluated, but the algorithm, or its ablation, does not use such groups"
    SURPLUS = "surplus", "informative, but the rounds of its step have filled the batch without it"
    STALE = "stale", "sampled more than cadence.max_staleness steps ago: dropped, and its prompt is re-sampled"


NEVER = 1 << 62
"""A step that no run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSchedule:
    """A number of groups per step that changes at some steps.

    Example: phases ((1, 154), (101, 256)): ReMix with B = 256, p = 0.4 and T = 100.
    """

    phases: tuple[tuple[int, int], ...]
    """(first step, groups per step), the first of them from step 1."""

    def at(self, step: int) -> int:
        """Fresh groups of this step."""
        return next((number for first, number in reversed(self.phases) if step >= first), self.phases[0][1])

    def up_to(self, step: int) -> int:
        """Fresh groups of all steps up to this one."""
        return sum(number * max(0, min(step + 1, end) - first) for first, end, number in self._spans())

    def step_of(self, place: int) -> int:
        """Step of the fresh group at this place, from 0."""
        for first, end, number in self._spans():
            if place < number * (end - first):
                return first + place // number
            place -= number * (end - first)
        raise ValueError(f"no run has this many fresh groups: {place}")

    @property
    def most(self) -> int:
        """Fresh groups of the largest step."""
        return max(number for _, number in self.phases)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(first step, step after the last, groups per step) of each phase."""
        ends = [*(first for first, _ in self.phases[1:]), NEVER]
        for (first, number), end in zip(self.phases, ends, strict=True):
            yield first, end, number


OF_BAPO = tuple(
    f"algorithm.{key}"
    for key in (
        "use_x2", "c1", "bad_capacity", "max_reevaluated",
        "use_x3", "c2_range", "c3_range", "threshold_schedule", "x3_policy", "x3_exactly_half", "drop_zero_variance_x3",
    )
)  # fmt: skip
"""Settings of B_bad and B_high as BAPO uses them."""


class Composer(Method, ABC):
    """One algorithm's rule for the batch. Stateless: all state is in the view, so that all of it is in the buffer."""

    prompts_once = True
    """It promises that no prompt trains twice in one step by the surrogate; the assembler checks it."""
    max_rounds = 1
    """Maximum generation rounds per step; 1: never returns NeedMore."""
    takes_experts = False
    """Whether it knows the expert's row of a group (`algorithm.num_experts`)."""
    _own: Any

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """Of the shipped ones only those that know an expert's row get one: else it would train as a sampled one."""
        del own
        algorithm = config.algorithm
        if algorithm.num_experts and not cls.takes_experts and ":" not in algorithm.composer:
            yield (
                f"algorithm.num_experts = {algorithm.num_experts}: algorithm.composer = {algorithm.composer} does not "
                "know an expert's row of a group; set it to 0, or take a preset with experts (docs/methods.md)"
            )

    def __init__(self, settings: AlgorithmConfig, own: Any = None) -> None:
        """`own`: its Settings; None: their defaults."""
        self._settings = settings
        self._own = own or self.Settings()

    @property
    def fresh_schedule(self) -> FreshSchedule:
        """Fresh groups of each step: B, less those in whose place stored ones train."""
        return FreshSchedule(phases=((1, self._settings.batch_size),))

    @property
    def decides_by(self) -> tuple[str, ...]:
        """Those of the thresholds c1, c2 and c3 that decide what trains; others are recorded at most."""
        return ()

    @property
    def high_window(self) -> int | None:
        """S: B_high has groups of this many latest steps, one per prompt; None: the composer has its own rule."""
        return None

    @property
    def reuse_steps(self) -> int:
        """Steps after its first in which a group may train again under its id, for which ratio mode `official` keeps
        its anchors."""
        return self._settings.high_window

    @property
    def ages_by(self) -> tuple[str, ...]:
        """Settings that can be lowered so that the stored groups that train are younger or fewer."""
        return ()

    @abstractmethod
    def compose(self, view: AssemblyView, rng: Rng) -> Decision | NeedMore:
        """D_t and the buffers after it, or a request for another round of fresh groups."""

    def hard_prompts_to_ask(
        self, bad: Sequence[HardPrompt], step: int, excluded: frozenset[str], rng: Rng
    ) -> tuple[str, ...]:
        """Ids of the hard prompts to re-evaluate at a step t with t mod m == 0 (docs/paper.md, Algorithm 1 line 13).

        Args:
            excluded: prompt ids of X_on(t).
        Returns: at most M ids; by default none.
        """
        del bad, step, excluded, rng
        return ()
