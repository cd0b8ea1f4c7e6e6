"""Task `countdown`: make the target from 3 (CD-3) or 4 (CD-4) numbers; CD-34 is half of each.

    prompt    12,99,7->80:
    response  anything, then <answer>expression</answer>

Splits: `train`, and held out `cd3`, `cd34`, `cd4`. They take different buckets of a hash of (sorted numbers, target),
so no problem is in both; the project's base model was made from other buckets again.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.base import make_prompt

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


# Countdown problems: a seeded generator of solvable ones, the buckets that keep splits apart, a solver.
#
# A problem is solved by a *chain*: n - 1 steps, each of which replaces two values by one, until only the target is
# left. Every value on the way is an integer in 1..199, so that each one is a single token of the project's own model.
#
# Does not cover: grading (see `countdown_verifier`), prompts and splits (see `countdown`).

MAX_NUMBER = 99
MAX_VALUE = 199
"""Largest intermediate value of a generated chain."""
MIN_TARGET, MAX_TARGET = 10, 99

NUM_BUCKETS = 10
BASE_MODEL_BUCKETS = frozenset(range(8))
"""Problems that the project's base model may see before any reinforcement learning."""
TRAIN_BUCKETS = frozenset({8})
HELD_OUT_BUCKETS = frozenset({9})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a chain: `left op right = value`."""

    left: int
    op: str
    """One of + - * /; a division is exact."""
    right: int
    value: int


Chain = tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Make `target` from `numbers`, each used exactly once.

    Example: numbers (12, 7, 4) and target 80 are solved by 12*7=84, 84-4=80.
    """

    numbers: tuple[int, ...]
    """3 (CD-3) or 4 (CD-4) integers in 1..99, in the order in which the prompt shows them; repeats are possible."""
    target: int
    chain: Chain
    """The chain that the problem was made from: one solution of perhaps many."""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What makes two problems the same one: order does not matter."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def bucket(self) -> int:
        """0..9, a function of the content alone: splits that take different buckets cannot share a problem."""
        numbers, target = self.key
        return zlib.crc32(f"{','.join(map(str, numbers))}->{target}".encode()) % NUM_BUCKETS


def random_chain(rng: random.Random, numbers: Sequence[int]) -> Chain | None:
    """Combine two random values by a random allowed operation until one is left.

    Returns: None when a pair allows no operation; 1-1 and 198+2 leave the range 1..199.
    """
    values = list(numbers)
    chain: list[Step] = []
    while len(values) > 1:
        left = values.pop(rng.randrange(len(values)))
        right = values.pop(rng.randrange(len(values)))
        steps = allowed_steps(left, right)
        if not steps:
            return None
        step = rng.choice(steps)
        chain.append(step)
        values.append(step.value)
    return tuple(chain)


def allowed_steps(left: int, right: int) -> list[Step]:
    """All steps from `left` and `right`, in this order, whose value is an integer in 1..199."""
    results = [("+", left + right), ("-", left - right), ("*", left * right)]
    if left % right == 0:
        results.append(("/", left // right))
    return [Step(left=left, op=op, right=right, value=value) for op, value in results if 1 <= value <= MAX_VALUE]


def random_problem(rng: random.Random, num_numbers: int) -> Problem:
    """A solvable problem: random numbers, a random chain, and its last value as the target if it is in 10..99."""
    while True:
        numbers = tuple(rng.randint(1, MAX_NUMBER) for _ in range(num_numbers))
        chain = random_chain(rng, numbers)
        if chain and MIN_TARGET <= chain[-1].value <= MAX_TARGET:
            return Problem(numbers=numbers, target=chain[-1].value, chain=chain)


def distinct_problems(rng: random.Random, num_numbers: int, buckets: Collection[int]) -> Iterator[Problem]:
    """An endless stream of problems from the given buckets, none of them twice (in whatever order of numbers)."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    while True:
        problem = random_problem(rng, num_numbers)
        if problem.bucket in buckets and problem.key not in seen:
            seen.add(problem.key)
            yield problem


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression over all `numbers` that equals `target`, by exhaustive search over exact fractions.

    Returns: None if there is none. The same arguments always give the same expression.
    Cost: milliseconds for four numbers; it grows with the factorial of their count.
    """
    return _search([(Fraction(n), str(n)) for n in numbers], Fraction(target))


def _search(terms: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(terms) == 1:
        value, text = terms[0]
        return _without_outer_parentheses(text) if value == target else None
    for i, left in enumerate(terms):
        for j, right in enumerate(terms):
            if i == j:
                continue
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for combined in _combinations(left, right, i < j):
                found = _search([*rest, combined], target)
                if found is not None:
                    return found
    return None


def _combinations(
    left: tuple[Fraction, str], right: tuple[Fraction, str], first_order: bool
) -> Iterator[tuple[Fraction, str]]:
    """Both orders of a pair are tried, but + and * commute, so they are tried in the first order only."""
    (a, a_text), (b, b_text) = left, right
    if first_order:
        yield a + b, f"({a_text}+{b_text})"
        yield a * b, f"({a_text}*{b_text})"
    yield a - b, f"({a_text}-{b_text})"
    if b != 0:
        yield a / b, f"({a_text}/{b_text})"


def _without_outer_parentheses(text: str) -> str:
    """Every combination wraps itself in one pair, so the outermost pair is always redundant."""
    return text[1:-1] if text.startswith("(") else text


# Verify a Countdown answer: uses each given number once, + - * / only, equals the target.
#
#     response := (expr | term op term ...)        read by one tokenizer and one recursive descent
#     expr     := term (("+" | "-") term)*
#     term     := factor (("*" | "/") factor)*
#     factor   := number | "(" expr ")"
#
# Covers: parentheses, exact fractions, spaces, the last <answer> tag only. Never evaluates text.
# Does not cover: partial credit, unary minus, answers over 100 characters or nested deeper than 16 (all reward 0.0).

ANSWER_START, ANSWER_END = "<answer>", "</answer>"
MAX_CHARS = 100
"""Four numbers, three operators and all useful parentheses need about 25."""
MAX_DEPTH = 16

# [0-9], not \d: \d also matches digits of other scripts, which `int` would accept.
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
# One class, repeated: nested repeats would take exponential time on a long number before a bad character.
_TEXT = re.compile(r"[-+*/() 0-9]*")


def is_right(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the last answer in `text` is an expression over exactly `numbers` that equals `target`.

    Never raises, whatever the text: what cannot be read is wrong.
    """
    answer = last_answer(text)
    if answer is None or len(answer) > MAX_CHARS or not _TEXT.fullmatch(answer):
        return False
    tokens = _TOKEN.findall(answer)
    # Compared before anything is computed: a number that was not given never enters the arithmetic.
    used = sorted(int(token) for token in tokens if token.isdigit())
    if used != sorted(numbers):
        return False
    try:
        return _Parser(tokens).value() == target
    except (_SyntaxError, ZeroDivisionError):
        return False


def last_answer(text: str) -> str | None:
    """What stands between the last </answer> and the nearest <answer> before it; None if there is no such pair."""
    end = text.rfind(ANSWER_END)
    start = text.rfind(ANSWER_START, 0, max(end, 0))
    if start < 0:
        return None
    return text[start + len(ANSWER_START) : end]


class _SyntaxError(Exception):
    """The tokens are no expression; never leaves this module."""


class _Parser:
    """Recursive descent over the grammar at the top; consumes `tokens` from the left."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def value(self) -> Fraction:
        """The value of all tokens. Raises: _SyntaxError, ZeroDivisionError."""
        result = self._expr()
        if self._next != len(self._tokens):
            raise _SyntaxError
        return result

    def _expr(self) -> Fraction:
        result = self._term()
        while (op := self._peek()) in ("+", "-"):
            self._next += 1
            term = self._term()
            result = result + term if op == "+" else result - term
        return result

    def _term(self) -> Fraction:
        result = self._factor()
        while (op := self._peek()) in ("*", "/"):
            self._next += 1
            factor = self._factor()
            result = result * factor if op == "*" else result / factor
        return result

    def _factor(self) -> Fraction:
        first = self._peek()
        self._next += 1
        if first.isdigit():
            return Fraction(int(first))
        if first != "(" or self._depth >= MAX_DEPTH:
            raise _SyntaxError
        self._depth += 1
        result = self._expr()
        self._depth -= 1
        if self._peek() != ")":
            raise _SyntaxError
        self._next += 1
        return result

    def _peek(self) -> str:
        """The next token, or an empty string at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else ""
