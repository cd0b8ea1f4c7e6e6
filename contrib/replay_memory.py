"""What replay methods share: groups that are kept over steps, oldest first, and rows picked from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field

from bapo.algorithms.composer import OF_BAPO, Composer, FreshSchedule, Reason
from bapo.algorithms.filters import Groups
from bapo.core.batch_items import Part
from bapo.core.types import GroupStat

Row = tuple[int, int]
"""(place of the group, row of it)."""


class ShareSettings(Composer.Settings):
    """Of a composer that replaces a share of the fresh groups by stored ones."""

    share: float = Field(0.0, ge=0, lt=1)
    """Fraction of B that is replayed instead of sampled: p of ReMix."""
    first_step: int = Field(1, ge=1)
    """First step with replay; earlier ones are all fresh."""
    last_step: int | None = Field(None, ge=1)
    """Last step with replay: T of ReMix, on-policy afterwards; null: no end."""


class ReplaysShare(Composer):
    """Base of composers that replay a share of B."""

    ignores = (*OF_BAPO, "algorithm.max_rounds", "loss.advantage_pool")

    class Settings(ShareSettings):
        """Those of the share."""

    _own: Settings

    @classmethod
    def check(cls, config: Any, own: Settings) -> Iterator[str]:
        yield from super().check(config, own)
        size = config.algorithm.batch_size
        if own.last_step is not None and own.last_step < own.first_step:
            yield (
                f"algorithm.options.last_step = {own.last_step} is before first_step = {own.first_step}, so no step "
                f"would replay; set last_step = {own.first_step} or later, or null"
            )
        if round(own.share * size) >= size:
            yield (
                f"algorithm.options.share = {own.share} of batch_size = {size} leaves no fresh group; use a smaller "
                "share"
            )

    @property
    def fresh_schedule(self) -> FreshSchedule:
        own, size = self._own, self._settings.batch_size
        phases = [(1, size), (own.first_step, size - round(own.share * size))][own.first_step == 1 :]
        if own.last_step is not None:
            phases.append((own.last_step + 1, size))
        return FreshSchedule(phases=tuple(phases))

    @property
    def ages_by(self) -> tuple[str, ...]:
        return ("algorithm.options.share",) if self._own.share > 0 else ()

    def num_replayed(self, step: int) -> int:
        """Stored groups that take the place of fresh ones in this step."""
        return self._settings.batch_size - self.fresh_schedule.at(step)


class KeepsPerPrompt(Composer):
    """Base of composers that keep the last responses of each prompt."""

    ignores = (*OF_BAPO, "algorithm.online_filter", "algorithm.max_rounds")

    class Settings(Composer.Settings):
        """Of the memory."""

        per_prompt: int = Field(16, ge=1)
        """Maximum responses per prompt in the memory (ARPO: successes)."""
        capacity: int | None = Field(None, ge=1)
        """Maximum groups in the memory, first in first out; null: limited only per prompt."""

    _own: Settings

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """Joined rows have a new id at every visit, so nothing stored for an old one is found."""
        yield from super().check(config, own)
        if config.loss.ratio_mode == "official":
            yield (
                f'loss.ratio_mode = official with algorithm.composer = "{config.algorithm.composer}": anchors are kept '
                "by group, and its stored rows train in a new one each time; set loss.ratio_mode = decoupled"
            )

    @property
    def ages_by(self) -> tuple[str, ...]:
        return ("algorithm.options.per_prompt",) if self._own.per_prompt > 1 else ()


def with_fresh(memory: Iterable[GroupStat], fresh: Iterable[GroupStat], step: int) -> Groups:
    """The memory and after it the fresh groups, born in this step."""
    return (*memory, *(stat.born(step) for stat in fresh))


def newest(memory: Groups, capacity: int | None) -> Groups:
    """First in, first out: at most `capacity` groups; None: all."""
    return memory if capacity is None else memory[max(0, len(memory) - capacity) :]


def once_per_prompt(memory: Iterable[GroupStat]) -> Groups:
    """The newest group of each prompt, in the order of their births."""
    latest: dict[str, GroupStat] = {}
    for stat in memory:
        latest.pop(stat.prompt_id, None)
        latest[stat.prompt_id] = stat
    return tuple(latest.values())


def by_prompt(memory: Iterable[GroupStat]) -> dict[str, list[GroupStat]]:
    """Prompt id -> its groups, oldest first."""
    found: dict[str, list[GroupStat]] = {}
    for stat in memory:
        found.setdefault(stat.prompt_id, []).append(stat)
    return found


def first_of_each_prompt(fresh: Iterable[GroupStat]) -> tuple[Groups, dict[str, str]]:
    """The fresh groups without repeated prompts, and the reason of each that is left out."""
    found: dict[str, GroupStat] = {}
    left_out: dict[str, str] = {}
    for stat in fresh:
        if found.setdefault(stat.prompt_id, stat) is not stat:
            left_out[stat.group_id] = Reason.DUPLICATE_PROMPT
    return tuple(found.values()), left_out


def parts_of(groups: Sequence[GroupStat], rows: Iterable[Row]) -> tuple[Part, ...]:
    """Rows of several groups as parts, each group once, in the order of its first row."""
    chosen: dict[int, list[int]] = {}
    for place, row in rows:
        chosen.setdefault(place, []).append(row)
    return tuple(Part(group_id=groups[place].group_id, rows=tuple(found)) for place, found in chosen.items())
