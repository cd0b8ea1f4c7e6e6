"""A recorded run as its assemblies saw it: one row of RUN/groups per group becomes the composer's input again.

Rows stand in the order in which the composer saw their groups. Three kinds differ by their birth and
their reason: groups that this assembly saw for the first time (fresh, re-evaluated), stored groups that it used
again (born in an earlier step), and groups that were too old and never reached the composer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from bapo.algorithms.composer import Reason
from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, RecordError
from bapo.core.types import GroupResult, GroupStat, Origin, Outcome, Purpose
from bapo.core.types import stat_of as stat_of_rows
from bapo.runtime.run_directory.layout import RunDirectory

Kind = Literal["fresh", "reevaluated", "reused"]
_ROUND = re.compile(r"reevaluate-(\d+)-")


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """What the assembly of one step saw, and the batch that resulted."""

    step: int
    results: tuple[GroupResult, ...]
    metrics: Mapping[str, Any] | None = None
    """The step's row of metrics.jsonl; None when it has none."""

    @cached_property
    def fresh(self) -> tuple[GroupResult, ...]:
        """X_on, in the order of the requests."""
        return tuple(result for result in self._inspected if result.purpose is Purpose.FRESH)

    @cached_property
    def reevaluated(self) -> tuple[GroupResult, ...]:
        """Groups of re-evaluations that had arrived, in the order of their requests."""
        return tuple(result for result in self._inspected if result.purpose is Purpose.REEVALUATE)

    @cached_property
    def batch(self) -> dict[Origin, list[str]]:
        """Origin -> ids of items (of whole groups: the groups'), in the order of the batch."""
        named = [
            (result.item or result.group_id, result.origin) for result in self.results if result.origin is not None
        ]
        return {origin: list(dict.fromkeys(name for name, its in named if its is origin)) for origin in Origin}

    @property
    def _inspected(self) -> list[GroupResult]:
        new = (result for result in self.results if result.birth == self.step and result.reason != Reason.STALE)
        # Once: a group of which several items of the batch are made has several rows.
        return list({result.group_id: result for result in new}.values())


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps 1 .. T' of a run, without a gap, and the settings that they were made with."""

    name: str
    config: Config
    steps: tuple[RecordedStep, ...]

    @cached_property
    def prompt_ids(self) -> frozenset[str]:
        return frozenset(result.prompt_id for step in self.steps for result in step.results)

    def step(self, number: int) -> RecordedStep:
        """One step. Raises: ConfigError that says which steps there are."""
        if not 1 <= number <= len(self.steps):
            raise ConfigError(f"run {self.name} has records of steps 1 to {len(self.steps)}, none of step {number}")
        return self.steps[number - 1]


def read_recording(run: RunDirectory) -> Recording:
    """Everything that the run has recorded of its groups so far.

    Raises: RecordError for damaged ones; ConfigError when there are none, or when they do not begin at step 1 or have
        a gap: B_bad and B_high of a step follow from all steps before it.
    """
    rows = {row["step"]: row for row in run.read_metrics()}
    steps = tuple(
        RecordedStep(step=step, results=tuple(results), metrics=rows.get(step)) for step, results in run.read_groups()
    )
    for step in steps:
        if not step.results or any(not result.rewards for result in step.results):
            raise RecordError(
                f"the group records of step {step.step} of run {run.path} are missing groups, or their rewards"
            )
    found = [step.step for step in steps]
    if not found:
        raise ConfigError(f"run {run.path} has no group records: it has no step yet, or is an archive without them")
    if found != list(range(1, len(found) + 1)):
        missing = next(step for step in range(1, found[-1] + 1) if step not in found)
        raise ConfigError(f"run {run.path} has no group records of step {missing}, on which all later steps depend")
    return Recording(name=run.name, config=load_resolved(run.config_path), steps=steps)


def stat_of(result: GroupResult) -> GroupStat:
    """What the composer saw of a group; no outcomes means that every row was graded."""
    return stat_of_rows(
        group_id=result.group_id,
        prompt_id=result.prompt_id,
        policy_version=result.policy_version,
        rewards=result.rewards,
        outcomes=result.outcomes or bytes([Outcome.GRADED] * len(result.rewards)),
    )


def round_of(result: GroupResult, arrived_at: int) -> int:
    """The step in which a re-evaluated group was asked for; its arrival when its id does not say."""
    found = _ROUND.match(result.group_id)
    return int(found[1]) if found else arrived_at


def kind_of(result: GroupResult, step: int) -> Kind:
    """How the assembly of `step` met a group."""
    if result.birth < step and result.birth > 0 and result.reason != Reason.STALE:
        return "reused"
    return "reevaluated" if result.purpose is Purpose.REEVALUATE else "fresh"
