"""Several rewards as one: each in [0, 1] by its own range, and their weighted mean, so that it is in [0, 1] as theorem
3.2 asks. Weights are divided by their sum.

None means ungraded, as of a single reward. An `optional` one that returns None for all responses of a group does not
apply to the prompt: the mean is over the others. Nothing else of a group is left out: its responses are compared by the
same rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo.config.rewards import OWN, RewardConfig
from bapo.config.tree import TaskConfig
from bapo.core.reward_details import FACTS, MAX_DETAILS
from bapo.core.types import Prompt
from bapo.tasks.base import Task
from bapo.tasks.grading.answers import grade, tell_left_out
from bapo.tasks.rewards import Verifier, load_reward

OPTIONAL = "; a reward that applies to some prompts alone needs optional = true"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One of the rewards, or the only one."""

    verifier: Verifier
    range: tuple[float, float]
    settings: RewardConfig | None = None
    """None: it is the only one, and has no name."""


def components_of(task: Task, settings: TaskConfig) -> list[Component]:
    """What grades. Imports the user's code. Raises: ConfigError."""
    if not isinstance(settings.reward, tuple):
        return [_component(task, settings, settings.reward or OWN)]
    return [_component(task, settings, reward.function, reward) for reward in settings.reward]


def _component(task: Task, settings: TaskConfig, function: str, reward: RewardConfig | None = None) -> Component:
    general = (0.0, 1.0) if settings.is_judge(function) else settings.reward_range
    return Component(
        verifier=_verifier(task, function),
        range=(reward and reward.range) or general,
        settings=reward,
    )


def _verifier(task: Task, function: str) -> Verifier:
    if function != OWN:
        return load_reward(function)
    task.load_reward()
    return task.rewards


def grade_by_all(components: Sequence[Component], prompt: Prompt, texts: list[str]) -> dict[str, Any]:
    """The answer to one group: that of the only reward, or of the mean; the first that fails is the answer."""
    rewards, weights = [0.0] * len(texts), 0.0
    parts: dict[str, list[float]] = {}
    facts: dict[str, list[float]] = {}
    for component in components:
        settings = component.settings
        answer = grade(component.verifier, prompt, texts, component.range)
        applies_to_none = answer.get("num_ungraded") == len(texts)
        if settings is not None and settings.optional and applies_to_none:
            continue
        if "rewards" not in answer:
            return answer if settings is None else _named(answer, settings, OPTIONAL if applies_to_none else "")
        weight = 1.0 if settings is None else settings.weight
        weights += weight
        rewards = [total + weight * reward for total, reward in zip(rewards, answer["rewards"], strict=True)]
        own = "" if settings is None else f"{settings.name}/"
        parts |= {} if settings is None else {settings.name: answer["rewards"]}
        facts |= {f"{FACTS}{own}{name}": values for name, values in answer.get("facts", {}).items()}
    if not weights:
        return {"ungraded": "left all responses ungraded (all of the rewards are optional, and returned None)"}
    details = list((parts | facts).items())
    for name, _ in details[MAX_DETAILS:]:
        tell_left_out(name, f"a response has at most {MAX_DETAILS} rewards and facts")
    return {"rewards": [min(1.0, reward / weights) for reward in rewards], "details": dict(details[:MAX_DETAILS])}


def _named(answer: dict[str, Any], settings: RewardConfig, advice: str) -> dict[str, Any]:
    """The answer of the one of several that failed."""
    range_too = ("set task.reward_range to", "set its range, or task.reward_range, to")
    words = {key: f"{answer[key]}{advice}".replace(*range_too) for key in ("failed", "ungraded") if key in answer}
    return words | {"by": settings.function}
