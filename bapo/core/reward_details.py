"""What graders report of a response besides its reward: the values of several rewards, and facts.

    {"format": [G], "exact": [G], "facts/num_steps": [G], "facts/exact/length": [G]}

A component of a reward has its name, and values in [0, 1]. A fact is any finite number; where the reward has
components, its name begins with that of the one that reports it. NaN: not known of this response, or the component does
not apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo.core.errors import ContractError, Refusal
from bapo.core.token_arrays import Float32s

Details = Mapping[str, Float32s]
Means = Mapping[str, float]

FACTS = "facts/"
"""Begins the names of facts."""
FACT_CHARS = 64
MAX_FACT = 3e38
"""What a float32 holds."""
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
MAX_DETAILS = 64
"""Components and facts of a group."""


def is_fact(name: object, value: float) -> bool:
    """Whether it can be recorded: a finite number with a name of 1 to 64 characters that can be printed."""
    return isinstance(name, str) and 0 < len(name) <= FACT_CHARS and name.isprintable() and abs(value) < MAX_FACT


def require_details(group_id: str, details: Details, size: int) -> None:
    """Raises: ContractError for details that are not those of a group of `size` responses."""
    if len(details) > MAX_DETAILS:
        message = f"group {group_id}: {len(details)} details of its rewards, the limit is {MAX_DETAILS}"
        raise ContractError(message, Refusal.REWARDS)
    for name, values in details.items():
        if values.shape != (size,) or not _NAME.fullmatch(name):
            message = f"group {group_id}: the detail {name!r:.100} must be {[size]}, got {list(values.shape)}"
            raise ContractError(message, Refusal.SHAPE)
        is_out = np.isinf(values) if name.startswith(FACTS) else (values < 0) | (values > 1)
        if is_out.any():  # NaN fails every comparison
            message = (
                f"group {group_id}: a component of the reward must be in [0, 1], a fact finite: {name} is {values}"
            )
            raise ContractError(message, Refusal.REWARDS)


def joined_details(parts: Sequence[tuple[Details, int]]) -> dict[str, Float32s]:
    """The details of groups, given with their sizes, one after the other."""
    names = dict.fromkeys(name for details, _ in parts for name in details)
    return {
        name: np.concatenate([details.get(name, np.full(size, np.nan, np.float32)) for details, size in parts])
        for name in names
    }


def details_of(details: Details, row: int) -> dict[str, float]:
    """Those that are known of one response."""
    return {name: _short(values[row]) for name, values in details.items() if not np.isnan(values[row])}


def means_of(details: Mapping[str, Sequence[float] | Float32s]) -> dict[str, float]:
    """The mean of each over the responses of which it is known."""
    found = {name: np.asarray(values, np.float64) for name, values in details.items()}
    known = {name: values[~np.isnan(values)] for name, values in found.items()}
    return {name: _short(values.mean()) for name, values in known.items() if len(values)}


def limited(details: Details) -> dict[str, Float32s]:
    """The first `MAX_DETAILS`, components before facts."""
    return {name: details[name] for name in sorted(details, key=lambda name: name.startswith(FACTS))[:MAX_DETAILS]}


def mean_of_groups(groups: Iterable[Means]) -> dict[str, float]:
    """The mean of each over the groups that have it; facts up to `MAX_DETAILS`."""
    found: dict[str, list[float]] = {}
    for means in groups:
        for name, value in means.items():
            if name in found or len(found) < MAX_DETAILS or not name.startswith(FACTS):
                found.setdefault(name, []).append(value)
    return means_of(found)


def as_columns(means: Means) -> dict[str, dict[str, float]]:
    """`reward_parts` and `reward_facts` of a row of metrics; a row without any has neither."""
    parts = {name: value for name, value in means.items() if not name.startswith(FACTS)}
    facts = {name.removeprefix(FACTS): value for name, value in means.items() if name.startswith(FACTS)}
    return ({"reward_parts": parts} if parts else {}) | ({"reward_facts": facts} if facts else {})


def shown_details(row: Mapping[str, Any]) -> str:
    """`format 0.4, exact 0.1; length 12.5` of what `as_columns` made; empty without any."""
    found = [row.get(name) or {} for name in ("reward_parts", "reward_facts")]
    return "; ".join(", ".join(f"{name} {value:.4g}" for name, value in values.items()) for values in found if values)


def _short(value: float) -> float:
    """With the digits that a float32 has."""
    return float(f"{value:.7g}")
