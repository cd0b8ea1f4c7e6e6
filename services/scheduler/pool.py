"""The training split as a prompt selector knows it: ids, the task's levels, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo.algorithms.selectors.base import PromptPool
from bapo.tasks.base import Task
from bapo.types import Prompt


def make_pool(task: Task, prompts: Sequence[Prompt]) -> PromptPool:
    """`prompts`: the training split, in the order that the selector's indices mean."""
    level: Any = getattr(task, "level", None)
    return PromptPool(
        prompt_ids=tuple(prompt.prompt_id for prompt in prompts),
        levels=None if level is None else np.array([level(prompt) for prompt in prompts], dtype=np.float64),
    )
