"""`task.reward`: a function that grades, or several whose weighted mean is the reward."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from bapo.algorithms.settings import Frozen
from bapo.core.errors import did_you_mean

OWN = "task"
"""Names the task's own reward among several."""
JUDGE = "judge:"
"""Begins the name of a reward that a model gives, in [0, 1] by its rubric."""
MAX_REWARDS = 32
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Names are keys of metrics: without a slash, which separates a fact from its reward."""


class RewardConfig(Frozen):
    """One of several rewards (docs/your_task.md); the reward of a response is their weighted mean."""

    function: str
    """As `task.reward` alone, or `task` for the task's own reward."""
    weight: float = 1.0
    """Above 0; divided by the sum of the weights."""
    name: str = Field("", pattern=NAME_PATTERN, validate_default=True)
    """In metrics; default: the function's name, or that of the judge's rubric."""
    range: tuple[float, float] | None = None
    """Mapped linearly to [0, 1]; default: `task.reward_range`, for a judge [0, 1]."""
    optional: bool = False
    """None for a whole group: this reward does not apply to its prompt, and the others count; otherwise None means
    ungraded."""

    @model_validator(mode="before")
    @classmethod
    def name_is_the_functions(cls, table: Any) -> Any:
        """Fill in the name."""
        function = table.get("function") if isinstance(table, Mapping) else None
        if not isinstance(function, str) or table.get("name"):
            return table
        last = function.removesuffix(".py").removesuffix(".toml").replace(":", ".").replace("/", ".").rpartition(".")[2]
        return {**table, "name": last.lstrip("_")}

    @field_validator("weight")
    @classmethod
    def weight_is_positive(cls, weight: float) -> float:
        """Check it, and say what else a user may want."""
        if not weight > 0:
            raise ValueError(
                "must be above 0; to record a number that does not count, return (reward, facts); for a penalty, "
                "return a lower reward"
            )
        return weight

    @model_validator(mode="after")
    def range_rises(self) -> Self:
        """Check that low < high."""
        if self.range is not None:
            require_rising("range", self.range)
        return self


def require_rising(key: str, found: tuple[float, float]) -> None:
    """Raises: ValueError unless low < high, a finite distance apart."""
    low, high = found
    if not 0 < high - low < float("inf"):
        raise ValueError(f"{key} must be [low, high] with low < high and a finite high - low, got {[low, high]}")


def read_rewards(value: Any) -> Any:
    """`task.reward` as it is written: several are tables or names of functions in a list, on the command line in JSON
    or TOML. Raises: ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
    if isinstance(value, Mapping):
        raise ValueError(  # noqa: TRY004 - pydantic reports ValueErrors
            "one table is not a list: write [[task.reward]], or [{ function = ... }, ...]"
        )
    if not isinstance(value, list | tuple):
        return value
    if not 0 < len(value) <= MAX_REWARDS:
        empty = "; leave task.reward out for the task's own reward"
        raise ValueError(f"a list has 1 to {MAX_REWARDS} rewards, got {len(value)}{'' if value else empty}")
    rewards = tuple(_reward(number, one) for number, one in enumerate(value, start=1))
    _require_distinct(rewards)
    return rewards


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{text!r:.200} is neither JSON nor TOML: {error}") from error


def _reward(number: int, written: Any) -> RewardConfig:
    table = {"function": written} if isinstance(written, str) else written
    if isinstance(table, Mapping):
        for key in table.keys() - RewardConfig.model_fields.keys():
            near = did_you_mean(str(key), RewardConfig.model_fields)
            raise ValueError(f"reward {number} of the list has no key {key!r}{near}")
    try:
        return RewardConfig.model_validate(table)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(map(str, details["loc"]))
        problem = details["msg"].removeprefix("Value error, ")
        raise ValueError(f"reward {number} of the list{', ' if key else ''}{key}: {problem}") from error


def _require_distinct(rewards: Sequence[RewardConfig]) -> None:
    ((name, number),) = Counter(reward.name for reward in rewards).most_common(1)
    if number > 1:
        raise ValueError(f"{number} rewards of the list are named {name!r}: set name")
