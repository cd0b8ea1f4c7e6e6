r"""Problems in words and in LaTeX with boxed answers: data in DeepScaleR's layout, and what a tiny model is taught.

    python -m models.word_problems examples/mathematics        writes train.jsonl, words.jsonl and latex.jsonl

    problem    Ann has 12 apples and buys 3 bags of 7 apples. How many apples does Ann have?
    solution   3*7=21;12+21=33;\boxed{33}

    problem    Solve $\frac{x}{4}-3=9$.
    solution   x/4=12;x=48;\boxed{48}

Numbers on the way are 0 to 199, one token each. Problems are told apart by kind and numbers, never by names: of ten
buckets 0 to 7 are what the tiny model is taught, 8 is trained, 9 is held out. Some of what it is taught goes wrong in
its first step (`SLOPPY`): that leaves something to learn by reinforcement.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from pathlib import Path
from zlib import crc32

from bapo.tasks.countdown import MAX_VALUE
from models.tokenizer import BOS, EOS, PAD, UNKNOWN

NAMES = ("Ann", "Ben", "Carla", "David", "Eva", "Finn")
THINGS = ("apples", "books", "coins", "marbles", "pens", "stamps")
WORDS, LATEX = "words", "latex"
SLOPPY = 0.45
"""Share of the taught solutions whose first step is wrong."""
TAUGHT, TRAINED, HELD_OUT = range(8), (8,), (9,)
NUM_TRAIN, NUM_HELD_OUT = 1500, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """A problem, and its solution step by step."""

    kind: str
    numbers: tuple[int, ...]
    text: str
    steps: tuple[str, ...]
    answer: str
    sloppy: tuple[tuple[str, ...], str]
    """Steps and answer of a solution that goes wrong."""

    @property
    def bucket(self) -> int:
        """0 to 9, by kind and numbers."""
        return crc32(f"{self.kind}{self.numbers}".encode()) % 10

    @property
    def solution(self) -> str:
        return _written(self.steps, self.answer)


def _written(steps: Sequence[str], answer: str) -> str:
    return "".join(f"{step};" for step in steps) + f"\\boxed{{{answer}}}"


def _buys(rng: random.Random) -> MathProblem | None:
    a, b, c = rng.randint(2, 60), rng.randint(2, 9), rng.randint(2, 12)
    text = "{name} has {a} {things} and buys {b} bags of {c} {things}. How many {things} does {name} have?"
    return _words(rng, "buys", text, a, b, c, (f"{b}*{c}={b * c}", f"{a}+{b * c}={a + b * c}"), a + b * c,
                  (f"{a}+{b}={a + b}", f"{a + b}+{c}={a + b + c}"), a + b + c)  # fmt: skip


def _gives(rng: random.Random) -> MathProblem | None:
    a, b, c = rng.randint(20, 150), rng.randint(2, 9), rng.randint(2, 12)
    text = "{name} has {a} {things} and gives {b} {things} to each of {c} friends. How many {things} are left?"
    return _words(rng, "gives", text, a, b, c, (f"{b}*{c}={b * c}", f"{a}-{b * c}={a - b * c}"), a - b * c,
                  (f"{a}-{b}={a - b}", f"{a - b}-{c}={a - b - c}"), a - b - c)  # fmt: skip


def _shares(rng: random.Random) -> MathProblem | None:
    b, c, share = rng.randint(2, 9), rng.randint(2, 20), rng.randint(2, 20)
    a = b * share
    text = "{name} shares {a} {things} among {b} friends. Each had {c} before. How many {things} has each now?"
    return _words(rng, "shares", text, a, b, c, (f"{a}/{b}={share}", f"{share}+{c}={share + c}"), share + c,
                  (f"{a}-{b}={a - b}", f"{a - b}+{c}={a - b + c}"), a - b + c)  # fmt: skip


def _linear(rng: random.Random) -> MathProblem | None:
    a, b, x = rng.randint(2, 9), rng.randint(1, 60), rng.randint(2, 25)
    right = a * x + b
    steps = (f"{a}x={right - b}", f"x={x}")
    return _latex("linear", (a, b, right), f"Solve ${a}x+{b}={right}$.", steps, str(x),
                  ((f"{a}x={right + b}",), str((right + b) // a)))  # fmt: skip


def _quotient(rng: random.Random) -> MathProblem | None:
    a, b, share = rng.randint(2, 9), rng.randint(1, 20), rng.randint(2, 20)
    steps = (f"x/{a}={share}", f"x={a * share}")
    return _latex("quotient", (a, b, share), f"Solve $\\frac{{x}}{{{a}}}-{b}={share - b}$.", steps, str(a * share),
                  ((f"x/{a}={abs(share - 2 * b)}",), str(a * abs(share - 2 * b))))  # fmt: skip


def _fractions(rng: random.Random) -> MathProblem | None:
    b, d = rng.randint(2, 9), rng.randint(2, 9)
    a, c = rng.randint(1, b - 1), rng.randint(1, d - 1)
    both = b * d // gcd(b, d)
    left, right = a * both // b, c * both // d
    top, most = left + right, gcd(left + right, both)
    steps = (f"{left}+{right}={top}", f"{_fraction(top, both)}")
    answer = _fraction(top // most, both // most) if most < both else str(top // both)
    return _latex("fractions", (a, b, c, d), f"Compute ${_fraction(a, b)}+{_fraction(c, d)}$.", steps, answer,
                  ((f"{a}+{c}={a + c}", f"{b}+{d}={b + d}"), _fraction(a + c, b + d)))  # fmt: skip


def _fraction(top: int, bottom: int) -> str:
    return f"\\frac{{{top}}}{{{bottom}}}"


def _words(
    rng: random.Random, kind: str, text: str, a: int, b: int, c: int, steps: tuple[str, ...], answer: int,
    wrong_steps: tuple[str, ...], wrong: int,
) -> MathProblem | None:  # fmt: skip
    filled = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b, c=c)
    return _latex(kind, (a, b, c), filled, steps, str(answer), (wrong_steps, str(wrong)))


def _latex(
    kind: str, numbers: tuple[int, ...], text: str, steps: tuple[str, ...], answer: str,
    sloppy: tuple[tuple[str, ...], str],
) -> MathProblem | None:  # fmt: skip
    """None when a number on the way is none of 0 to 199."""
    written = " ".join((text, *steps, answer, *sloppy[0], sloppy[1]))
    if any(int(number) > MAX_VALUE for number in re.findall(r"\d+", written)) or "--" in written or "=-" in written:
        return None
    return MathProblem(kind=kind, numbers=numbers, text=text, steps=steps, answer=answer, sloppy=sloppy)


KINDS: dict[str, tuple[Callable[[random.Random], MathProblem | None], ...]] = {
    WORDS: (_buys, _gives, _shares),
    LATEX: (_linear, _quotient, _fractions),
}


def problems(
    rng: random.Random, buckets: Sequence[int], families: Sequence[str] = (WORDS, LATEX)
) -> Iterator[MathProblem]:
    """An endless stream of problems of these buckets."""
    kinds = [kind for family in families for kind in KINDS[family]]
    while True:
        problem = rng.choice(kinds)(rng)
        if problem is not None and problem.bucket in buckets:
            yield problem


def examples(rng: random.Random) -> Iterator[tuple[str, str]]:
    """An endless stream of (prompt text, response text) that the tiny model is taught."""
    for problem in problems(rng, TAUGHT):
        response = _written(*problem.sloppy) if rng.random() < SLOPPY else problem.solution
        yield f"{problem.text}\n", response


WORD_PATTERN = r"\\boxed\{|\\frac\{|\}\{| ?[A-Za-z]+|[0-9]+|[^0-9]"
"""One match is one token."""


def vocabulary() -> tuple[str, ...]:
    """Every token of every problem and solution."""
    rng = random.Random(0)
    texts = [problem.text + problem.solution + "".join(problem.sloppy[0])
             for problem, _ in zip(problems(rng, range(10)), range(2000), strict=False)]  # fmt: skip
    texts += [f"{name} {things}" for name, things in product(NAMES, THINGS)]
    words = {word for text in texts for word in re.findall(WORD_PATTERN, text) if not word.isdecimal()}
    return (PAD, EOS, BOS, UNKNOWN, *map(str, range(MAX_VALUE + 1)), *sorted(words | {"\n"}))


def write(folder: Path, seed: int = 0) -> None:
    """The three files: training problems of both families, held-out ones of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, buckets, families, number in (
        ("train", TRAINED, (WORDS, LATEX), NUM_TRAIN),
        (WORDS, HELD_OUT, (WORDS,), NUM_HELD_OUT),
        (LATEX, HELD_OUT, (LATEX,), NUM_HELD_OUT),
    ):
        different: dict[tuple[str, tuple[int, ...]], MathProblem] = {}
        for problem in problems(random.Random(seed), buckets, families):
            different.setdefault((problem.kind, problem.numbers), problem)
            if len(different) == number:
                break
        rows = ({"problem": p.text, "answer": p.answer, "solution": p.solution} for p in different.values())
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
