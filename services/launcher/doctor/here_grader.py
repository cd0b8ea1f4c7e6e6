"""Grading in the calling process: for verifiers that neither hang nor crash, where starting a process would be felt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapo.core.types import Prompt
from bapo.tasks.grading.pool import Grades, UngradedError, VerifierRaisedError, prompt_words
from bapo.tasks.grading.process import grade
from bapo.tasks.rewards import Verifier


class HereGrader:
    """Grades as a grading process does."""

    def __init__(self, verifier: Verifier, reward_range: tuple[float, float]) -> None:
        self._verifier, self._range = verifier, reward_range

    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Grades:
        """The rewards of the responses to one prompt. Raises: VerifierRaisedError, UngradedError."""
        answer = grade(self._verifier, prompt, list(texts), self._range)
        for key, error in (("failed", VerifierRaisedError), ("ungraded", UngradedError)):
            if key in answer:
                raise error(f"the verifier of task {prompt.task!r} {answer[key]}{prompt_words(prompt)}")
        return Grades(rewards=np.asarray(answer["rewards"], np.float32))

    def close(self) -> None:
        """Nothing was started."""
