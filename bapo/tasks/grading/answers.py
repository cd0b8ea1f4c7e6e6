"""What a verifier returned for a group, checked: rewards and facts, or a message of what is wrong."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol, runtime_checkable

from bapo.core.reward_details import FACT_CHARS, is_fact
from bapo.core.types import SAME_REWARD, Prompt
from bapo.core.user_code import place_of
from bapo.tasks.base import ROW, NoRewardError
from bapo.tasks.rewards import Verifier

MAX_SHOWN = 500
"""Characters of what a verifier raised or returned."""
MAX_TOLD = 20
"""Warnings of facts that are not recorded: a function may name any number of them."""


def grade(verifier: Verifier, prompt: Prompt, texts: list[str], reward_range: tuple[float, float]) -> dict[str, Any]:
    """What one verifier says of a group, whose mistakes become messages, never a reward.

    Returns: {"rewards": [G] in [0, 1]} with "facts", {name: [G], NaN where there is none}, if there are any;
        {"failed": message}; or {"ungraded": message}, with "num_ungraded", the number of Nones.
    """
    where = f"(on the response {texts[0][:200]!r})" if len(set(texts)) == 1 else f"(on {len(texts)} responses)"
    try:
        return _checked(list(verifier(prompt, texts)), texts, reward_range)
    except NoRewardError as error:
        return {"ungraded": f"cannot grade: {error}"}
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and return what raises
        return {"failed": f"raised {described(error)}{place_of(error)} {where}{_hint(error, prompt)}"}


def _hint(error: Exception, prompt: Prompt) -> str:
    """Advice for a function that reads a column which the prompts do not have."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if ROW not in prompt.answer or not isinstance(name, str) or name in prompt.answer:
        return ""
    return f"; for a column {name!r} of the data, set task.options.extra_columns (bapo reward test: --columns {name})"


def _checked(found: Sequence[object], texts: list[str], reward_range: tuple[float, float]) -> dict[str, Any]:
    if len(found) != len(texts):
        return {"failed": f"returned {len(found)} rewards for {len(texts)} responses"}
    low, high = reward_range
    rewards: list[float] = []
    facts: dict[str, list[float]] = {}
    for row, (returned, text) in enumerate(zip(found, texts, strict=True)):
        given = _without_facts(returned, facts, row, len(texts))
        if given is None:
            continue
        reward = number_of(given)
        mapped = math.nan if reward is None else (reward - low) / (high - low)
        if not -SAME_REWARD <= mapped <= 1 + SAME_REWARD:  # NaN fails both comparisons
            what = f"not a number in [{low:g}, {high:g}] (on the response {text[:200]!r}){_advice(reward)}"
            return {"failed": f"returned {shown(given)}, which is {what}"}
        rewards.append(min(max(mapped, 0.0), 1.0))
    if len(rewards) < len(texts):
        num = len(texts) - len(rewards)
        return {"ungraded": f"left {num} of {len(texts)} responses ungraded (it returned None)", "num_ungraded": num}
    return {"rewards": rewards} | ({"facts": facts} if facts else {})


def _without_facts(returned: object, facts: dict[str, list[float]], row: int, size: int) -> object:
    """The reward of `(reward, facts)`, whose facts go to their columns; anything else is the reward."""
    while isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, given = returned
        for name, value in given.items():
            number = None if value is None else number_of(value)
            if number is not None and is_fact(name, number):
                facts.setdefault(name, [math.nan] * size)[row] = number
            elif value is not None:
                tell_left_out(name, f"a fact is a finite number, named in 1 to {FACT_CHARS} printable characters")
    return returned


_told: set[str] = set()


def tell_left_out(name: object, why: str) -> None:
    """Warn of a fact that is not recorded, once per process."""
    if (shown_name := shown(name)) not in _told and len(_told) < MAX_TOLD:
        _told.add(shown_name)
        sys.stderr.write(f"grader: the fact {shown_name} is not recorded: {why}\n")


def number_of(given: object) -> float | None:
    """`given` as the float that is stored: of Python's numbers, numpy's scalars (bool, too), arrays and tensors of one
    element; None for anything else, and for a number that no float holds."""
    if not isinstance(given, numbers.Real) and isinstance(given, _Array) and math.prod(given.shape) == 1:
        given = given.item()
    if not isinstance(given, numbers.Real | Decimal):
        return None
    try:
        return float(given)
    except OverflowError:
        return None


@runtime_checkable
class _Array(Protocol):
    """numpy's, torch's on any device, jax's: none of which is imported for it."""

    shape: Sequence[int]

    def item(self) -> object: ...


def _advice(reward: float | None) -> str:
    if reward is None:
        return ""
    if not math.isfinite(reward):
        return "; return None for a response that cannot be graded, 0 for an incorrect one"
    return "; set task.reward_range to the range of your reward"


def described(error: Exception) -> str:
    """Class and words, cut: many exceptions repeat the text that they are about, and each message is a log line."""
    try:
        words = str(error)
    except Exception as worse:  # noqa: BLE001 - a user's exception
        words = f"(message not printable: {type(worse).__name__})"
    return f"{type(error).__name__}: {_cut(words)}"


def shown(value: object) -> str:
    try:
        return _cut(repr(value))
    except Exception as error:  # noqa: BLE001 - a user's value; also an integer of more digits than Python writes
        return f"a {type(value).__name__} that is not printable ({type(error).__name__})"


def _cut(words: str) -> str:
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}... ({len(words)} characters)"
