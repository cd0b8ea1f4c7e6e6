"""Tasks `reasoning_gym:NAME`: a generator and its scorer of the package reasoning-gym (optional, see requirements).

    [task]
    name = "reasoning_gym:countdown"
    options = { num_train = 2000, config = { min_numbers = 3, max_numbers = 4 } }

The answer is what stands in the last <answer> tags of a response; scores are the generator's own, some of them partial.
A prompt carries the number of its problem, and a grader makes the problem again from the seed: problems hold values
that are no JSON. Some scorers hand the model's text to sympy, which evaluates it: grade in a container if that matters.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import Field, field_validator

from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import Prompt
from bapo.tasks.base import TRAIN, GeneratedOptions, Task, TaskContext, make_prompt, require_split
from bapo.tasks.right_answers import folded

FAMILY_NAME = "reasoning_gym"
ANSWER_START, ANSWER_END = "<answer>", "</answer>"
QUESTION = "{question}"
PROMPT_FORMAT = QUESTION + "\nGive the final answer in <answer> and </answer>.\n"
TEST = "test"


class ReasoningGymOptions(GeneratedOptions):
    """The `[task.options]` table. Questions that a generator repeats are left out."""

    num_held_out: int = Field(200, ge=1)
    held_out_seed: int = 1_000_003
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator, such as { min_numbers = 3 }."""
    prompt_format: str = PROMPT_FORMAT
    """Text of a prompt, with the field {question}."""

    @field_validator("prompt_format")
    @classmethod
    def prompt_format_has_the_question(cls, prompt_format: str) -> str:
        """Check the field."""
        if QUESTION not in prompt_format:
            raise ValueError(f"{prompt_format!r} must contain {QUESTION}")
        return prompt_format


class ReasoningGymTask(Task):
    """One generator, with a seed for each split."""

    is_family = True
    held_out_splits = (TEST,)

    def __init__(self, options: ReasoningGymOptions, context: TaskContext) -> None:
        """Raises: ConfigError for an unknown generator or setting, or when the package is missing."""
        self.name = f"{FAMILY_NAME}:{context.member}"
        self._problems = {
            split: _generate(context.member, *options.size_of(split), options.config) for split in (TRAIN, TEST)
        }
        self._form = options.prompt_format

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Each question of a split once; none of `train` is in `test`. Raises: ConfigError for an unknown split."""
        require_split(self, split)
        return self._prompts[split]

    def reward(self, prompt: Prompt, text: str) -> float:
        """The generator's score of the last answer; 0.0 without one."""
        answer = _last_answer(text)
        if answer is None:
            return 0.0
        problems, index = self._problems[prompt.answer["split"]], prompt.answer["index"]
        return float(problems.score_answer(answer, problems[index]))

    def extract(self, prompt: Prompt, text: str) -> str | None:
        return _last_answer(text)

    def gold(self, prompt: Prompt) -> str | None:
        """The generator's answer; some generators know none."""
        answer = prompt.answer["answer"]
        return None if answer is None else f"{ANSWER_START}{answer}{ANSWER_END}"

    @cached_property
    def _prompts(self) -> dict[str, tuple[Prompt, ...]]:
        test, train = self._of_split(TEST), self._of_split(TRAIN)
        kept = tuple(prompt for question, prompt in train.items() if question not in test)
        if not kept:
            raise ConfigError(f"task {self.name}: every training problem is in the test split; it has too few problems")
        return {TRAIN: kept, TEST: tuple(test.values())}

    def _of_split(self, split: str) -> dict[str, Prompt]:
        """The first prompt of each question: of several right answers a generator may give another one each time."""
        by_question: dict[str, Prompt] = {}
        problems = self._problems[split]
        for index in range(len(problems)):
            problem = problems[index]
            text = self._form.replace(QUESTION, problem["question"])
            place = {"split": split, "index": index}
            prompt = make_prompt(self.name, text, {"answer": problem["answer"]}, extra=place)
            by_question.setdefault(folded(problem["question"]), prompt)
        return by_question


def _generate(member: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task reasoning_gym:{member} requires the package reasoning-gym ({error}): "
            "pip install --no-deps -r requirements/reasoning-gym.txt"
        ) from error
    if member not in known:
        raise ConfigError(f"reasoning-gym has no generator {member!r}{did_you_mean(member, known)}")
    try:
        return package.create_dataset(member, size=size, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.options.config: rejected by reasoning-gym's {member}: {error}") from error


def _last_answer(text: str) -> str | None:
    """What stands in the last pair of tags, stripped."""
    start = text.rfind(ANSWER_START)
    end = text.find(ANSWER_END, start)
    return None if start < 0 or end < 0 else text[start + len(ANSWER_START) : end].strip()
