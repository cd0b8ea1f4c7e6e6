"""Task `chain`: carry out operations from left to right, and keep the last two digits of every value.

    prompt    47+38-19*7:
    response  anything, then <answer>62</answer>          47+38 = 85, 85-19 = 66, 66*7 = 462

Every value is 0 to 99: below 0 it continues at 99 (3-5 is 98). A response is right only if all its steps are, so that
accuracy falls with the number of operations as a power, and rises with it when a step is learned.

Splits: `train`, and held out `chain` (as many operations as in training), `chain-long` (6 to 10) and `chain-easy`. They
use different buckets of a hash of the prompt, so they are disjoint; the project's base model was trained on yet other
buckets. Easy problems, `easy_share` of `train` and all of `chain-easy`, have two operations that neither carry nor
borrow: the base model is right in more than nine of ten responses.

Not supported: partial credit for steps; other answers than an integer.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.core.types import Prompt
from bapo.tasks.answer_formats import written_answer
from bapo.tasks.base import TRAIN, GeneratedOptions, Task, make_prompt, require_split

NAME = "chain"
LONG, EASY = f"{NAME}-long", f"{NAME}-easy"
ANSWER_FORMAT = "<answer>{answer}</answer>"
MODULUS = 100
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda value, number: (value + number) % MODULUS,
    "-": lambda value, number: (value - number) % MODULUS,
    "*": lambda value, number: (value * number) % MODULUS,
}
OPERATION_WEIGHTS = (2, 2, 1)
MAX_FACTOR = 9
"""Of a multiplication; it begins at 2. Other numbers are 1 to 99."""
MIN_STEPS, MAX_STEPS = 2, 5
LONG_STEPS = (6, 10)
EASY_STEPS = (2, 2)
EASY_TRAIN = f"{TRAIN}-easy"
"""The easy problems of `train`."""

NUM_BUCKETS = 10
BASE_MODEL_BUCKETS = frozenset(range(8))
TRAIN_BUCKETS = frozenset({8})
HELD_OUT_BUCKETS = frozenset({9})

Operation = tuple[str, int]
"""Its sign and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A first value and what to do with it."""

    first: int
    operations: tuple[Operation, ...]

    @property
    def text(self) -> str:
        return str(self.first) + "".join(f"{sign}{number}" for sign, number in self.operations)

    @property
    def values(self) -> tuple[int, ...]:
        """The value after every operation."""
        values = [self.first]
        for sign, number in self.operations:
            values.append(OPERATIONS[sign](values[-1], number))
        return tuple(values[1:])

    @property
    def bucket(self) -> int:
        """0 to 9, from the content alone."""
        return zlib.crc32(self.text.encode()) % NUM_BUCKETS


class ChainOptions(GeneratedOptions):
    """The `[task.options]` table."""

    num_train: int = Field(4000, ge=1)
    min_steps: int = Field(MIN_STEPS, ge=1)
    """Fewest operations of a problem of `train` and of `chain`; all numbers of them are equally likely."""
    max_steps: int = Field(MAX_STEPS, ge=1)
    """Most."""
    easy_share: float = Field(0.0, ge=0, le=1)
    """Share of `train` that are easy problems; the others have `min_steps` to `max_steps` operations."""
    held_out: tuple[Literal["chain", "chain-long", "chain-easy"], ...] = ("chain", "chain-long")
    """Which splits to evaluate."""

    @model_validator(mode="after")
    def steps_rise(self) -> Self:
        """Check that min_steps <= max_steps."""
        if self.min_steps > self.max_steps:
            raise ValueError(f"task.options.min_steps = {self.min_steps} is more than max_steps = {self.max_steps}")
        return self

    @model_validator(mode="after")
    def easy_ones_are_shorter(self) -> Self:
        """Check that no problem is drawn twice."""
        if self.easy_share and self.min_steps <= EASY_STEPS[1]:
            raise ValueError(
                f"task.options.easy_share = {self.easy_share} adds problems of {EASY_STEPS[1]} operations, which "
                f"min_steps = {self.min_steps} has as well; set min_steps = {EASY_STEPS[1] + 1} or more"
            )
        return self


class ChainTask(Task):
    """Seeded problems and an exact verifier."""

    name = NAME
    is_fast = True

    def __init__(self, options: ChainOptions) -> None:
        self._options = options
        self.held_out_splits = options.held_out

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split. Raises: ConfigError for an unknown split."""
        require_split(self, split)
        options = self._options
        num, seed = options.size_of(split)
        if split == EASY:
            return _prompts(split, num, seed, EASY_STEPS)
        num_easy = round(options.easy_share * num) if split == TRAIN else 0
        steps = LONG_STEPS if split == LONG else (options.min_steps, options.max_steps)
        return _prompts(split, num - num_easy, seed, steps) + _prompts(EASY_TRAIN, num_easy, seed, EASY_STEPS)

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the last answer is the last value, else 0.0."""
        return 1.0 if self.extract(prompt, text) == str(prompt.answer["value"]) else 0.0

    def extract(self, prompt: Prompt, text: str) -> str | None:
        return written_answer(ANSWER_FORMAT, text)

    def level(self, prompt: Prompt) -> float:
        """Number of operations."""
        return float(prompt.answer["num_steps"])

    def gold(self, prompt: Prompt) -> str:
        return ANSWER_FORMAT.format(answer=prompt.answer["value"])


def prompt_of(chain: Chain) -> Prompt:
    """The prompt of a chain. Its answer contains what the verifier needs."""
    answer = {"value": chain.values[-1], "num_steps": len(chain.operations)}
    return make_prompt(NAME, f"{chain.text}:", answer)


def random_chain(rng: random.Random, num_steps: int) -> Chain:
    signs = rng.choices(tuple(OPERATIONS), OPERATION_WEIGHTS, k=num_steps)
    operations = tuple((sign, rng.randint(2, MAX_FACTOR) if sign == "*" else rng.randint(1, 99)) for sign in signs)
    return Chain(first=rng.randrange(MODULUS), operations=operations)


def easy_chain(rng: random.Random, num_steps: int) -> Chain:
    """A chain in which each operation is drawn anew until it neither carries nor borrows."""
    chain = Chain(first=rng.randrange(MODULUS), operations=())
    while len(chain.operations) < num_steps:
        value = chain.values[-1] if chain.operations else chain.first
        (operation,) = random_chain(rng, 1).operations
        if is_easy(value, *operation):
            chain = Chain(first=chain.first, operations=(*chain.operations, operation))
    return chain


def is_easy(value: int, sign: str, number: int) -> bool:
    """Whether a step neither carries nor borrows, in units or tens."""
    units = value % 10
    if sign == "+":
        return units + number % 10 < 10 and value + number < MODULUS
    if sign == "-":
        return units >= number % 10 and value >= number
    return units * number < 10


def distinct_chains(
    rng: random.Random,
    steps: tuple[int, int],
    buckets: Collection[int],
    make: Callable[[random.Random, int], Chain] = random_chain,
) -> Iterator[Chain]:
    """An endless stream of distinct chains from the given buckets; `make` draws one."""
    seen: set[str] = set()
    while True:
        chain = make(rng, rng.randint(*steps))
        if chain.bucket in buckets and chain.text not in seen:
            seen.add(chain.text)
            yield chain


@lru_cache(maxsize=32)
def _prompts(split: str, num: int, seed: int, steps: tuple[int, int]) -> tuple[Prompt, ...]:
    buckets: Collection[int] = TRAIN_BUCKETS if split in (TRAIN, EASY_TRAIN) else HELD_OUT_BUCKETS
    make = easy_chain if split in (EASY, EASY_TRAIN) else random_chain
    rng = random.Random(f"{NAME}/{split}/{seed}")  # noqa: S311 - reproducible, not secret
    return tuple(map(prompt_of, islice(distinct_chains(rng, steps, buckets, make), num)))
