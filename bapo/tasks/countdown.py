"""Task `countdown`: make the target from 3 (CD-3) or 4 (CD-4) numbers; CD-34 is half of each.

    prompt    12,99,7->80:
    response  anything, then <answer>expression</answer>

Splits: `train`, and held out `cd3`, `cd34`, `cd4`. They take different buckets of a hash of (sorted numbers, target),
so no problem is in both; the project's base model was made from other buckets again.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import islice

from bapo.errors import ConfigError
from bapo.tasks.base import make_prompt
from bapo.tasks.countdown_problems import HELD_OUT_BUCKETS, TRAIN_BUCKETS, Problem, distinct_problems, solve
from bapo.tasks.countdown_verifier import ANSWER_END, ANSWER_START, is_right, last_answer
from bapo.types import Prompt

NAME = "countdown"
CD3_SHARE_OF_HELD_OUT = {"cd3": 1.0, "cd34": 0.5, "cd4": 0.0}
DEFAULT_PROMPT_FORMAT = "{numbers}->{target}:"


class CountdownTask:
    """Seeded problems and an exact verifier; see `make_task` for the options."""

    name = NAME

    def __init__(
        self, *, problems: dict[str, tuple[int, float, int]], held_out: tuple[str, ...], prompt_format: str
    ) -> None:
        """`problems`: (number of problems, share of CD-3, seed) of each split."""
        self._problems = problems
        self._held_out = held_out
        self._prompt_format = prompt_format

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        """The splits that are measured."""
        return self._held_out

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split; CD-3 and CD-4 are mixed. Raises: ConfigError for an unknown split."""
        if split not in self._problems:
            raise ConfigError(f"task {NAME} has no split {split!r}; it has {', '.join(self._problems)}")
        num, cd3_share, seed = self._problems[split]
        return _prompts(split, num, cd3_share, seed, self._prompt_format)

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the last answer uses each number once and equals the target, else 0.0."""
        return 1.0 if is_right(text, prompt.answer["numbers"], prompt.answer["target"]) else 0.0

    def extract(self, prompt: Prompt, text: str) -> str | None:
        """What stands in the last answer tag."""
        return last_answer(text)

    def level(self, prompt: Prompt) -> float:
        """How many numbers there are: CD-3 is easier than CD-4."""
        return float(len(prompt.answer["numbers"]))

    def gold(self, prompt: Prompt) -> str | None:
        """The first solution of an exhaustive search, as a response."""
        expression = solve(prompt.answer["numbers"], prompt.answer["target"])
        return None if expression is None else f"{ANSWER_START}{expression}{ANSWER_END}"


def make_task(
    *,
    num_train: int = 2000,
    cd3_share: float = 0.25,
    seed: int = 0,
    num_held_out: int = 1000,
    held_out: Sequence[str] = ("cd34", "cd4"),
    held_out_seed: int = 0,
    prompt_format: str = DEFAULT_PROMPT_FORMAT,
) -> CountdownTask:
    """The task with its options, as the `[task.options]` table gives them.

    Args:
        num_train: problems in `train`; cd3_share: share of them with 3 numbers, the others have 4.
        seed: of the training problems. `held_out_seed` is apart from it, so that runs with different seeds
            are measured on the same problems.
        num_held_out: problems in each held-out split; held_out: which of cd3, cd34, cd4 are measured.
        prompt_format: text of a prompt, with the fields {numbers} ("12,99,7") and {target}.
    Raises: ConfigError for an option that makes no sense.
    """
    _check_count("num_train", num_train)
    _check_count("num_held_out", num_held_out)
    if not 0.0 <= cd3_share <= 1.0:
        raise ConfigError(f"task.options.cd3_share must be in [0, 1], got {cd3_share}")
    unknown = [name for name in held_out if name not in CD3_SHARE_OF_HELD_OUT]
    if unknown:
        raise ConfigError(f"task.options.held_out names {unknown}; known are {', '.join(CD3_SHARE_OF_HELD_OUT)}")
    _check_format(prompt_format)
    problems = {"train": (num_train, float(cd3_share), seed)}
    problems |= {name: (num_held_out, CD3_SHARE_OF_HELD_OUT[name], held_out_seed) for name in held_out}
    return CountdownTask(problems=problems, held_out=tuple(held_out), prompt_format=prompt_format)


def prompt_of(problem: Problem, prompt_format: str = DEFAULT_PROMPT_FORMAT) -> Prompt:
    """The prompt that shows `problem`. Its answer has no solution, only what the verifier needs."""
    numbers = ",".join(map(str, problem.numbers))
    answer = {"numbers": list(problem.numbers), "target": problem.target}
    return make_prompt(NAME, prompt_format.format(numbers=numbers, target=problem.target), answer)


@lru_cache(maxsize=32)
def _prompts(split: str, num: int, cd3_share: float, seed: int, prompt_format: str) -> tuple[Prompt, ...]:
    """Cached: a thousand held-out problems take 0.2 s to make, and every evaluation asks for them."""
    buckets: Collection[int] = TRAIN_BUCKETS if split == "train" else HELD_OUT_BUCKETS
    rng = random.Random(f"{NAME}/{split}/{seed}")  # noqa: S311 - reproducible, not secret
    num_cd3 = round(num * cd3_share)
    problems = list(islice(distinct_problems(rng, 3, buckets), num_cd3))
    problems += islice(distinct_problems(rng, 4, buckets), num - num_cd3)
    rng.shuffle(problems)
    return tuple(prompt_of(problem, prompt_format) for problem in problems)


def _check_count(option: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"task.options.{option} must be an integer of at least 1, got {value!r}")


def _check_format(prompt_format: str) -> None:
    try:
        shown = prompt_format.format(numbers="12,99,7", target=80)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"task.options.prompt_format {prompt_format!r} cannot be filled: {error!r}; "
            "it has the fields {numbers} and {target}, and a literal brace is written twice"
        ) from error
    if "12,99,7" not in shown or "80" not in shown:
        raise ConfigError(f"task.options.prompt_format {prompt_format!r} must show {{numbers}} and {{target}}")
