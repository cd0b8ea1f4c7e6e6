"""What a batch composer is: a pure rule from what the buffer holds to what step t trains.

The buffer service calls `compose` once per step, inside the atomic assembly of that step, and then applies the
Decision to its store. So an algorithm is one file of this folder; store, wire and learner do not know its name.

    AssemblyView (what there is)  --compose-->  Decision (what trains, what stays, and why)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bapo.types import GroupStat, HardPrompt, Origin

Rng = Callable[[str], random.Random]
"""Purpose -> generator, counter-based: keyed by (run seed, step, purpose), so that a resumed run draws the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyView:
    """What the buffer holds when step t is assembled."""

    step: int
    """t, from 1."""
    fresh: tuple[GroupStat, ...]
    """X_on(t): exactly B groups, in the order of their requests."""
    reevaluated: tuple[GroupStat, ...]
    """Groups of re-evaluations that arrived since the last assembly, in the order of their requests."""
    bad: tuple[HardPrompt, ...]
    """B_bad, oldest first."""
    high: tuple[GroupStat, ...]
    """B_high, oldest first; `birth` is the step that inserted it."""
    previous_r_tot: float | None
    """r_tot of the step before; None at t = 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What step t trains, and B_bad and B_high after its inserts and evictions.

    Invariants: no prompt occurs twice in x1 + x2 + x3; together they hold at most B groups; every group of
    `fresh` and `reevaluated` has a reason. A group of B_high has one only when it trains.
    """

    x1: tuple[str, ...]
    """Group ids."""
    x2: tuple[str, ...]
    x3: tuple[str, ...]
    r_tot: float
    c2: float
    c3: float
    bad: tuple[HardPrompt, ...]
    """B_bad after this step, oldest first."""
    high: tuple[GroupStat, ...]
    """B_high after this step, oldest first."""
    reasons: Mapping[str, str]
    """Group id -> why it trains or does not: one of the words of `Reason`."""

    @property
    def origins(self) -> dict[str, Origin]:
        """Group id -> origin, in the order X1, X2, X3."""
        parts = ((Origin.X1, self.x1), (Origin.X2, self.x2), (Origin.X3, self.x3))
        return {group_id: origin for origin, ids in parts for group_id in ids}


class Reason:
    """The words that say why a group trains in a step or does not."""

    INFORMATIVE = "informative"
    """x1: passed the online filter."""
    IMPROVED = "improved"
    """x2: c1 < mu' < 1 at its re-evaluation."""
    REUSED = "reused"
    """x3: drawn from B_high."""
    ALL_WRONG = "all_wrong"
    ALL_RIGHT = "all_right"
    FILTERED = "filtered"
    """Informative, but the Gaussian or uniform filter left it out."""
    DUPLICATE_PROMPT = "duplicate_prompt"
    """Another group of the same prompt is in the batch."""
    STILL_HARD = "still_hard"
    """Re-evaluated with mu' <= c1: stays in B_bad."""
    SOLVED = "solved"
    """Re-evaluated with mu' = 1: leaves B_bad, nothing to learn."""
    NO_ROOM = "no_room"
    """Improved, but the batch is full: stays in B_bad."""
    LEFT_BAD = "left_bad"
    """Re-evaluated, but its prompt has meanwhile left B_bad."""
    NO_VARIANCE = "no_variance"
    """All rewards are the same fraction: neither all wrong nor all right, and still no advantage."""
    NOT_USED = "not_used"
    """Re-evaluated, but the algorithm, or the ablation, does not use such groups."""
    STALE = "stale"
    """Fresh, but sampled more than `cadence.max_staleness` steps ago: the buffer drops it and asks its prompt again."""


class Composer(Protocol):
    """One algorithm's rule for the batch. Stateless: all state is in the view, so that all of it is in the buffer."""

    name: str

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t and the buffers after it."""
        ...

    def hard_prompts_to_ask(
        self, bad: Sequence[HardPrompt], step: int, excluded: frozenset[str], rng: Rng
    ) -> tuple[str, ...]:
        """Ids of the hard prompts to re-evaluate at a step t with t mod m == 0 (spec A.3 line 6).

        Args:
            excluded: prompt ids of X_on(t).
        Returns: at most M ids; empty for an algorithm that never asks again.
        """
        ...
