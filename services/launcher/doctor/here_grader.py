"""Grading in the calling process: for verifiers that neither hang nor crash, where starting a process would be felt."""

from __future__ import annotations

from collections.abc import Sequence

from bapo.config.tree import TaskConfig
from bapo.core.types import Prompt
from bapo.tasks.base import Task
from bapo.tasks.grading.components import components_of, grade_by_all
from bapo.tasks.grading.pool import Grades, UngradedError, VerifierRaisedError, grades_of, prompt_words


class HereGrader:
    """Grades as a grading process does."""

    def __init__(self, task: Task, settings: TaskConfig) -> None:
        self._components = components_of(task, settings)

    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Grades:
        """The rewards of the responses to one prompt. Raises: VerifierRaisedError, UngradedError."""
        answer = grade_by_all(self._components, prompt, list(texts))
        for key, error in (("failed", VerifierRaisedError), ("ungraded", UngradedError)):
            if key in answer:
                raise error(f"the verifier of task {prompt.task!r} {answer[key]}{prompt_words(prompt)}")
        return grades_of(answer)

    def close(self) -> None:
        """Nothing was started."""
