"""How an episode ends: what a rollout function returns, and what the runner reports for it.

0.0 to 1.0   its reward
GRADE        the task's reward function grades the last text that the model wrote
None         ungraded: the episode begins again, and never counts as 0
(any, facts) any of these, and numbers of the episode that are recorded
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any

from bapo.core.types import Prompt


class Grade(Enum):
    """Who gives the reward, if the rollout function does not."""

    BY_TASK = "task"


GRADE = Grade.BY_TASK
"""Returned by a rollout function that leaves the reward to the task."""

Outcome = float | Grade | None | tuple[float | Grade | None, Mapping[str, float]]
OpenAIClient = Any
"""An `openai.AsyncOpenAI`, whose key is that of the episode."""
Rollout = Callable[[OpenAIClient, Prompt], Awaitable[Outcome]]
"""An episode: calls the model, and says how it ended."""
