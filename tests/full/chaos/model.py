"""What Algorithm 1 makes of the groups that a ledger names: B_bad, B_high, r_tot and the batch of every step.

Written from the paper in counts of right responses, like `tests.support.plain_loop`, whose window and draws it
shares; no code of the composer or of a store. It says nothing of *which* groups a step got: that is the ledger's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bapo.algorithms.randomness import rng_for
from bapo.config.tree import Config
from tests.support.plain_loop import draw, window


@dataclass(frozen=True)
class Seen:
    """A group that a step looked at."""

    group_id: str
    prompt: str
    right: int
    """Responses with reward 1."""


@dataclass(frozen=True)
class Expected:
    """What a step must have trained, and what it must have left behind."""

    x1: list[str]
    x2: list[str]
    x3: list[str]
    r_tot: float
    bad: list[tuple[str, int]]
    """(prompt, step of birth), oldest first."""
    high: list[tuple[str, int]]
    """(group id, step of birth), oldest first."""


@dataclass
class Model:
    """B_bad and B_high between steps."""

    config: Config
    bad: dict[str, int] = field(default_factory=dict)
    high: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Prompt -> (group id, right responses, birth): B_high has one group of a prompt, the newest."""

    def step(self, t: int, fresh: Sequence[Seen], reevaluated: Sequence[Seen]) -> Expected:
        """Lines 4-13 of Algorithm 1; both sequences in the order of their requests."""
        settings, seed = self.config.algorithm, self.config.run.seed
        size, group = settings.batch_size, settings.group_size
        c1 = math.floor(settings.c1 * group + 1e-9)
        r_tot = sum(entry.right for entry in fresh) / (len(fresh) * group)
        low, top = window(self.config, r_tot)

        x1 = _one_per_prompt([entry for entry in fresh if 1 <= entry.right <= group - 1])
        newest = {entry.prompt: entry for entry in reevaluated if entry.prompt in self.bad}
        solved = [prompt for prompt, entry in newest.items() if entry.right == group]
        for prompt in solved:
            del self.bad[prompt]
        taken = {entry.prompt for entry in x1}
        improved = [
            e for e in reevaluated if newest.get(e.prompt) == e and c1 < e.right < group and e.prompt not in taken
        ]
        x2 = _drawn(improved, size - len(x1), seed, t, "x2")
        for entry in x2:
            del self.bad[entry.prompt]
        taken |= {entry.prompt for entry in x2}

        reusable = [
            Seen(group_id, prompt, right)
            for prompt, (group_id, right, birth) in self.high.items()
            if t - settings.high_window <= birth < t
            and low <= right <= top
            and 0 < right < group
            and prompt not in taken
        ]
        x3 = _drawn(reusable, size - len(x1) - len(x2), seed, t, "x3")
        self._keep(t, fresh, c1=c1, low=low, top=top)
        return Expected(
            x1=[entry.group_id for entry in x1],
            x2=[entry.group_id for entry in x2],
            x3=[entry.group_id for entry in x3],
            r_tot=r_tot,
            bad=list(self.bad.items()),
            high=[(group_id, birth) for group_id, _, birth in self.high.values()],
        )

    def _keep(self, t: int, fresh: Sequence[Seen], *, c1: int, low: int, top: int) -> None:
        settings = self.config.algorithm
        self.high = {p: kept for p, kept in self.high.items() if kept[2] > t - settings.high_window}
        for entry in fresh:
            if entry.right <= c1:
                self.bad.pop(entry.prompt, None)
                self.bad[entry.prompt] = t
            if low <= entry.right <= top:
                self.high.pop(entry.prompt, None)
                self.high[entry.prompt] = (entry.group_id, entry.right, t)
        self.bad = dict(list(self.bad.items())[-settings.capacity :])


def _one_per_prompt(groups: Sequence[Seen]) -> list[Seen]:
    """The first of each prompt: at the seam of two epochs a step may hold one twice."""
    first: dict[str, Seen] = {}
    for entry in groups:
        first.setdefault(entry.prompt, entry)
    return list(first.values())


def _drawn(groups: Sequence[Seen], most: int, seed: int, step: int, purpose: str) -> list[Seen]:
    by_id = {entry.group_id: entry for entry in groups}
    return [by_id[key] for key in draw(list(by_id), most, rng_for(seed, step, purpose))]
