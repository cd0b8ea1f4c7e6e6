"""Countdown problems: a seeded generator of solvable ones, the buckets that keep splits apart, a solver.

A problem is solved by a *chain*: n - 1 steps, each of which replaces two values by one, until only the target is
left. Every value on the way is an integer in 1..199, so that each one is a single token of the project's own model.

Does not cover: grading (see `countdown_verifier`), prompts and splits (see `countdown`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

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
