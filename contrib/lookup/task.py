"""Task `lookup`: calculate with values that only a tool knows, and keep the last two digits of every value.

    prompt    a+c-b                             hidden: a = 37, c = 5, b = 12
    response  anything, then <answer>30</answer>        37+5 = 42, 42-12 = 30

Operations go from left to right. Every value is 0 to 99: below 0 it continues at 99 (3-5 is 98). The prompt does not
contain the values, so that no response without a tool is right more often than by chance: `contrib.lookup.agent` is the
program that offers the tools and grades the last message.

Splits: `train`, and held out `lookup`. They use different buckets of a hash of the problem with its values, so they are
disjoint; the project's base model was trained on yet other buckets. The same expression may be in two splits with other
values: it says nothing about them.

Not supported: partial credit for steps; other answers than an integer.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from string import ascii_lowercase
from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.core.types import Prompt
from bapo.tasks.answer_formats import written_answer
from bapo.tasks.base import TRAIN, GeneratedOptions, Task, make_prompt, require_split

NAME = "lookup"
ANSWER_FORMAT = "<answer>{answer}</answer>"
MODULUS = 100
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: (left + right) % MODULUS,
    "-": lambda left, right: (left - right) % MODULUS,
}
KEYS = ascii_lowercase
MIN_KEYS, MAX_KEYS = 2, 4
MOST_KEYS = 6
"""Of any problem: an agent then needs 12 model calls, which is as many as it has."""

NUM_BUCKETS = 10
BASE_MODEL_BUCKETS = frozenset(range(8))
TRAIN_BUCKETS = frozenset({8})
HELD_OUT_BUCKETS = frozenset({9})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Distinct keys, the operations between them, and their hidden values."""

    keys: str
    """One letter each."""
    signs: tuple[str, ...]
    """One fewer than keys."""
    values: tuple[int, ...]

    @property
    def text(self) -> str:
        return self.keys[0] + "".join(sign + key for sign, key in zip(self.signs, self.keys[1:], strict=True))

    @property
    def content(self) -> str:
        """The expression and its values: what makes one problem differ from another."""
        return f"{self.text}:{','.join(map(str, self.values))}"

    @property
    def result(self) -> int:
        result, *rest = self.values
        for sign, value in zip(self.signs, rest, strict=True):
            result = OPERATIONS[sign](result, value)
        return result

    @property
    def bucket(self) -> int:
        """0 to 9, from the content alone."""
        return zlib.crc32(self.content.encode()) % NUM_BUCKETS


class LookupOptions(GeneratedOptions):
    """The `[task.options]` table."""

    num_train: int = Field(4000, ge=1)
    min_keys: int = Field(MIN_KEYS, ge=2, le=MOST_KEYS)
    """Fewest keys of a problem; all numbers of them are equally likely."""
    max_keys: int = Field(MAX_KEYS, ge=2, le=MOST_KEYS)
    """Most."""
    held_out: tuple[Literal["lookup"], ...] = ("lookup",)
    """Which splits to evaluate."""

    @model_validator(mode="after")
    def keys_rise(self) -> Self:
        """Check that min_keys <= max_keys."""
        if self.min_keys > self.max_keys:
            raise ValueError(f"task.options.min_keys = {self.min_keys} is more than max_keys = {self.max_keys}")
        return self


class LookupTask(Task):
    """Seeded problems and an exact verifier."""

    name = NAME
    is_fast = True

    def __init__(self, options: LookupOptions) -> None:
        self._options = options
        self.held_out_splits = options.held_out

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split. Raises: ConfigError for an unknown split."""
        require_split(self, split)
        options = self._options
        return _prompts(split, *options.size_of(split), (options.min_keys, options.max_keys))

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the last answer is the result, else 0.0."""
        return 1.0 if self.extract(prompt, text) == str(prompt.answer["value"]) else 0.0

    def extract(self, prompt: Prompt, text: str) -> str | None:
        return written_answer(ANSWER_FORMAT, text)

    def level(self, prompt: Prompt) -> float:
        """Number of keys."""
        return float(prompt.answer["num_keys"])

    def gold(self, prompt: Prompt) -> str:
        return ANSWER_FORMAT.format(answer=prompt.answer["value"])


def prompt_of(problem: Problem) -> Prompt:
    """The prompt of a problem. Its answer contains what tools and verifier need."""
    answer = {
        "values": dict(zip(problem.keys, problem.values, strict=True)),
        "value": problem.result,
        "num_keys": len(problem.keys),
    }
    return make_prompt(NAME, problem.text, answer)


def random_problem(rng: random.Random, num_keys: int) -> Problem:
    return Problem(
        keys="".join(rng.sample(KEYS, num_keys)),
        signs=tuple(rng.choices(tuple(OPERATIONS), k=num_keys - 1)),
        values=tuple(rng.randrange(MODULUS) for _ in range(num_keys)),
    )


def distinct_problems(rng: random.Random, num_keys: tuple[int, int], buckets: Collection[int]) -> Iterator[Problem]:
    """An endless stream of distinct problems from the given buckets."""
    seen: set[str] = set()
    while True:
        problem = random_problem(rng, rng.randint(*num_keys))
        if problem.bucket in buckets and problem.content not in seen:
            seen.add(problem.content)
            yield problem


@lru_cache(maxsize=32)
def _prompts(split: str, num: int, seed: int, num_keys: tuple[int, int]) -> tuple[Prompt, ...]:
    buckets: Collection[int] = TRAIN_BUCKETS if split == TRAIN else HELD_OUT_BUCKETS
    rng = random.Random(f"{NAME}/{split}/{seed}")  # noqa: S311 - reproducible, not secret
    return tuple(map(prompt_of, islice(distinct_problems(rng, num_keys, buckets), num)))
