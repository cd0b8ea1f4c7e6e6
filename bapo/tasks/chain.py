"""Task `chain`: carry out operations from left to right, and keep the last two digits of every value.

    prompt    47+38-19*7:
    response  anything, then <answer>62</answer>          47+38 = 85, 85-19 = 66, 66*7 = 462

Every value is 0 to 99: below 0 it continues at 99 (3-5 is 98). A response is right only if all its steps are, so that
accuracy falls with the number of operations as a power, and rises with it when a step is learned.

Splits: `train`, and held out `chain` (as many operations as in training) and `chain-long` (6 to 10). They use different
buckets of a hash of the prompt, so they are disjoint; the project's base model was trained on yet other buckets.

Not supported: partial credit for steps; other answers than an integer.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.answer_formats import written_answer
from bapo.tasks.base import make_prompt

NAME = "chain"
LONG = f"{NAME}-long"
TRAIN = "train"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What determines the problems of a split."""

    name: str
    num: int
    steps: tuple[int, int]
    """Fewest and most operations, all equally often."""
    seed: int


class ChainTask:
    """Seeded problems and an exact verifier; see `make_task` for the options."""

    name = NAME

    def __init__(self, splits: Sequence[Split]) -> None:
        self._splits = {split.name: split for split in splits}

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        return tuple(name for name in self._splits if name != TRAIN)

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split not in self._splits:
            raise ConfigError(f"task {NAME} has no split {split!r}; choose from {', '.join(self._splits)}")
        return _prompts(self._splits[split])

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


def make_task(
    *,
    num_train: int = 4000,
    min_steps: int = MIN_STEPS,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
    num_held_out: int = 1000,
    held_out: Sequence[str] = (NAME, LONG),
    held_out_seed: int = 0,
) -> ChainTask:
    """Create the task from the `[task.options]` table.

    Args:
        num_train: problems in `train`; seed: of these.
        min_steps, max_steps: operations of a problem of `train` and of `chain`.
        num_held_out: problems in each held-out split; held_out: which of chain and chain-long to evaluate.
        held_out_seed: separate, so that runs with different seeds are evaluated on the same problems.
    Raises: ConfigError for an invalid option.
    """
    counts = {"num_train": num_train, "num_held_out": num_held_out, "min_steps": min_steps, "max_steps": max_steps}
    for option, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"task.options.{option} must be an integer >= 1, got {value!r}")
    if min_steps > max_steps:
        raise ConfigError(f"task.options.min_steps = {min_steps} is more than max_steps = {max_steps}")
    steps = {NAME: (min_steps, max_steps), LONG: LONG_STEPS}
    unknown = [name for name in held_out if name not in steps]
    if unknown:
        raise ConfigError(f"task.options.held_out has unknown {unknown}; known: {', '.join(steps)}")
    train = Split(name=TRAIN, num=num_train, steps=(min_steps, max_steps), seed=seed)
    return ChainTask(
        [train, *(Split(name=name, num=num_held_out, steps=steps[name], seed=held_out_seed) for name in held_out)]
    )


def prompt_of(chain: Chain) -> Prompt:
    """The prompt of a chain. Its answer contains what the verifier needs."""
    answer = {"value": chain.values[-1], "num_steps": len(chain.operations)}
    return make_prompt(NAME, f"{chain.text}:", answer)


def random_chain(rng: random.Random, num_steps: int) -> Chain:
    signs = rng.choices(tuple(OPERATIONS), OPERATION_WEIGHTS, k=num_steps)
    operations = tuple((sign, rng.randint(2, MAX_FACTOR) if sign == "*" else rng.randint(1, 99)) for sign in signs)
    return Chain(first=rng.randrange(MODULUS), operations=operations)


def distinct_chains(rng: random.Random, steps: tuple[int, int], buckets: Collection[int]) -> Iterator[Chain]:
    """An endless stream of distinct chains from the given buckets."""
    seen: set[str] = set()
    while True:
        chain = random_chain(rng, rng.randint(*steps))
        if chain.bucket in buckets and chain.text not in seen:
            seen.add(chain.text)
            yield chain


@lru_cache(maxsize=32)
def _prompts(split: Split) -> tuple[Prompt, ...]:
    buckets: Collection[int] = TRAIN_BUCKETS if split.name == TRAIN else HELD_OUT_BUCKETS
    rng = random.Random(f"{NAME}/{split.name}/{split.seed}")  # noqa: S311 - reproducible, not secret
    return tuple(map(prompt_of, islice(distinct_chains(rng, split.steps, buckets), split.num)))
