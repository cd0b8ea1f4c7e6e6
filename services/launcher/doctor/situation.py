"""What the checks of one command share: the config, the task, which is read once, and how thorough they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bapo.config.tree import Config
from bapo.runtime.model_files import folder_of
from bapo.tasks.base import Task, splits_of
from bapo.tasks.registry import task_of


@dataclass(kw_only=True)
class Situation:
    """A start, a dry run, or a doctor."""

    config: Config
    with_learner: bool = True
    """Whether this command starts a learner."""
    has_learner: bool = True
    """Whether a learner uses this machine, also if it is started by hand (`bapo up`)."""
    is_resumed: bool = False
    """Findings in the data are only warnings: the run has trained on them."""
    num_gold: int = 8
    """Rows whose gold answer is graded, from the start of the training data."""
    seconds: float = 5.0
    """Longest time of a check of all rows; and of grading."""

    @cached_property
    def task(self) -> Task:
        """Raises: ConfigError."""
        return task_of(self.config)

    @property
    def splits(self) -> tuple[str, ...]:
        """All splits of the task. Raises: ConfigError."""
        return splits_of(self.task)

    @property
    def model_folder(self) -> Path | None:
        """None: not on this machine yet."""
        return folder_of(self.config.model.path)
