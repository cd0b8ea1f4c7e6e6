"""The training split as a prompt selector knows it: ids, the task's levels, embeddings."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo.algorithms.selectors.base import Floats, PromptPool
from bapo.config.tree import Config
from bapo.errors import DeadlineError
from bapo.prompt_embeddings import embeddings_path, read_embeddings
from bapo.records import RunDirectory
from bapo.tasks.base import Task
from bapo.types import Prompt

log = logging.getLogger(__name__)

EMBEDDING_S = 3600.0
"""Longest wait for the learner's embeddings: 100,000 prompts of a large model take a while."""
LOOK_S = 0.5


def make_pool(config: Config, run: RunDirectory, task: Task, prompts: Sequence[Prompt]) -> PromptPool:
    """`prompts`: the training split, in the order that the selector's indices mean."""
    prompt_ids = tuple(prompt.prompt_id for prompt in prompts)

    def embed() -> NDArray[np.float32]:
        path = embeddings_path(config, run)
        _wait_for(path, EMBEDDING_S)
        return read_embeddings(path, prompt_ids)

    return PromptPool(
        prompt_ids=prompt_ids,
        levels=_levels(task, prompts),
        embed=embed,
    )


def _levels(task: Task, prompts: Sequence[Prompt]) -> Floats | None:
    """[N]; None when the task has none, or not for every prompt."""
    level: Any = getattr(task, "level", None)
    levels = [None] if level is None else [level(prompt) for prompt in prompts]
    return None if None in levels else np.array(levels, dtype=np.float64)


def _wait_for(path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    if not path.exists():
        log.info("waits for the embeddings of the prompts, which the learner makes: %s", path)
    while not path.exists():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"no embeddings of the prompts at {path} after {timeout_s:.0f} s: the learner makes them before its "
                "first step, or python -m learner.model.embeddings does"
            )
        time.sleep(LOOK_S)
