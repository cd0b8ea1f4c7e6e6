"""Supervised examples of `chain`, from a teacher who knows two ways for most steps and often takes the wrong one.

    prompt    47+38-19*7:
    response  47+38=85-19=66*7=62;<answer>62</answer>

    step      when                            the teacher's slip             right
    plus      no carry                        -                              always
    carry     units carry, sum below 100      forgets the carry (-10)         75 %
    over      the sum is 100 or more          stays at 99                     50 %
    minus     no borrow                       -                              always
    borrow    units borrow, result above 0    forgets the borrow (+10)        40 %
    under     the result is below 0           takes it without its sign        6 %
    times     units do not carry              -                              always
    tens      units carry                     forgets what they carry         20 %

A model learns these shares, whatever the numbers. Where the slip is more frequent, a lower temperature makes the model
worse: training has to change which way it takes. One slip makes a response wrong, so that a
chain with several rare steps is nearly never right at first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Literal

from contrib.chain.task import ANSWER_FORMAT, BASE_MODEL_BUCKETS, MODULUS, OPERATIONS, Chain, random_chain

Kind = Literal["plus", "carry", "over", "minus", "borrow", "under", "times", "tens"]
RIGHT: Mapping[Kind, float] = {
    "plus": 1.0, "carry": 0.75, "over": 0.5, "minus": 1.0, "borrow": 0.4, "under": 0.06, "times": 1.0, "tens": 0.2
}  # fmt: skip
"""Probability that the teacher takes the right way."""
MAX_STEPS = 10


def examples(rng: random.Random) -> Iterator[tuple[str, str]]:
    """An endless stream of (prompt text, response text) over the problem buckets of the base model."""
    while True:
        chain = random_chain(rng, rng.randint(1, MAX_STEPS))
        if chain.bucket in BASE_MODEL_BUCKETS:
            yield f"{chain.text}:", response_text(rng, chain)


def response_text(rng: random.Random, chain: Chain) -> str:
    """The teacher's steps, then the answer."""
    value, text = chain.first, str(chain.first)
    for sign, number in chain.operations:
        kind = kind_of(value, sign, number)
        value = OPERATIONS[sign](value, number) if rng.random() < RIGHT[kind] else slip(kind, value, number)
        text += f"{sign}{number}={value}"
    return f"{text};{ANSWER_FORMAT.format(answer=value)}"


def kind_of(value: int, sign: str, number: int) -> Kind:
    """Which way of calculating a step needs."""
    if sign == "+":
        if value + number >= MODULUS:
            return "over"
        return "carry" if value % 10 + number % 10 >= 10 else "plus"
    if sign == "-":
        if value < number:
            return "under"
        return "borrow" if value % 10 < number % 10 else "minus"
    return "tens" if value % 10 * number >= 10 else "times"


def slip(kind: Kind, value: int, number: int) -> int:
    """The value of the wrong way; right only if it is 50 below 0. Raises: ValueError for a kind without one."""
    if kind == "carry":
        return value + number - 10
    if kind == "over":
        return MODULUS - 1
    if kind == "borrow":
        return value - number + 10
    if kind == "under":
        return number - value
    if kind == "tens":
        return (value // 10 * number * 10 + value % 10 * number % 10) % MODULUS
    raise ValueError(f"a step of kind {kind} has no wrong way")
