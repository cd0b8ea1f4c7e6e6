"""Supervised examples: a few attempts that fail, one that works, then the answer.

    prompt    36,89,24->77:
    response  36+24=60+89=149;36-24=12,89-12=77;<answer>89-(36-24)</answer>

An attempt is a chain; a step that continues from the previous value does not repeat it ("36+24=60+89=149").
Failed attempts are random chains. The model learns to search, which leaves room for reinforcement learning: better
attempts, and more of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bapo.tasks.countdown import (
    ANSWER_END,
    ANSWER_START,
    BASE_MODEL_BUCKETS,
    Chain,
    Problem,
    prompt_of,
    random_chain,
    random_problem,
)
from models.tokenizer import WORD_PATTERN

IGNORE = -100
"""Target of a position that is not trained: prompt and padding."""
_POOL = 4096
"""Examples that are sorted by length, to reduce padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Distribution of the examples: it determines how strong the base model gets."""

    cd3_share: float = 0.7
    """Share of problems with 3 numbers; the others have 4."""
    success: float = 0.5
    """Probability that the next attempt is the one that works."""
    max_tokens: int = 64
    """Longest response, with end of sequence: room for 4 failed attempts with 3 numbers, or 2 with 4."""


def examples(rng: random.Random, curriculum: Curriculum) -> Iterator[tuple[str, str]]:
    """An endless stream of (prompt text, response text) over the problem buckets of the base model."""
    while True:
        problem = random_problem(rng, 3 if rng.random() < curriculum.cd3_share else 4)
        if problem.bucket in BASE_MODEL_BUCKETS:
            yield prompt_of(problem).text, response_text(rng, problem, curriculum)


def response_text(rng: random.Random, problem: Problem, curriculum: Curriculum) -> str:
    """Failed attempts, then the problem's own chain, then the answer."""
    ending = f"{chain_text(problem.chain)};{ANSWER_START}{expression(problem)}{ANSWER_END}"
    failures = ""
    while rng.random() >= curriculum.success:
        longer = f"{failures}{chain_text(_failed_chain(rng, problem))};"
        if num_tokens(longer + ending) + 1 > curriculum.max_tokens:
            break
        failures = longer
    return failures + ending


def num_tokens(text: str) -> int:
    """Tokens of a text, without end of sequence."""
    return len(re.findall(WORD_PATTERN, text))


def chain_text(chain: Chain) -> str:
    """Steps as text: "12*7=84-4=80", with a comma before a step that does not start from the previous value."""
    text = ""
    previous: int | None = None
    for step in chain:
        left, right = step.left, step.right
        if right == previous and step.op in "+*":  # commutative, so the previous value can come first
            left, right = right, left
        start = "" if left == previous else f"{',' if text else ''}{left}"
        text += f"{start}{step.op}{right}={step.value}"
        previous = step.value
    return text


def expression(problem: Problem) -> str:
    """The problem's chain as one expression, with inner steps in parentheses."""
    terms = [(number, str(number)) for number in problem.numbers]
    for step in problem.chain:
        left, right = (terms.pop(_index(terms, value))[1] for value in (step.left, step.right))
        terms.append((step.value, f"({left}{step.op}{right})"))
    return terms[0][1][1:-1]


def batches(
    stream: Iterator[tuple[str, ...]], rng: random.Random, tokenizer: PreTrainedTokenizerFast, tokens_per_batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless stream of (token ids [R, T], targets [R, T]) with at most `tokens_per_batch` = R * T tokens.

    Args:
        stream: endless (prompt text, response text), or more such pairs in turn: an episode of many turns.
    """
    while True:
        pool = sorted((_encode(tokenizer, texts) for texts in islice(stream, _POOL)), key=lambda row: len(row[0]))
        cuts: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in pool:
            if (len(cuts[-1]) + 1) * len(row[0]) > tokens_per_batch:
                cuts.append([])
            cuts[-1].append(row)
        rng.shuffle(cuts)
        yield from (_collate(rows, tokenizer.pad_token_id) for rows in cuts)


def _failed_chain(rng: random.Random, problem: Problem) -> Chain:
    while True:
        chain = random_chain(rng, problem.numbers)
        if chain is not None and chain[-1].value != problem.target:
            return chain


def _index(terms: list[tuple[int, str]], value: int) -> int:
    return next(i for i, (term, _) in enumerate(terms) if term == value)


def _encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Token ids of prompts and responses in turn, each response with its end of sequence; and their targets."""
    ids: list[int] = []
    trained: list[int] = []
    for prompt, response in zip(texts[::2], texts[1::2], strict=True):
        prompt_ids = tokenizer(prompt)["input_ids"]
        response_ids = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        ids += [*prompt_ids, *response_ids]
        trained += [*[IGNORE] * len(prompt_ids), *response_ids]
    # Targets are the ids one position later; the last prompt token predicts the first token of the response.
    return ids, [*trained[1:], IGNORE]


def _collate(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in rows)
    ids_RT = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids, _ in rows])
    targets_RT = torch.tensor([[*targets, *[IGNORE] * (width - len(targets))] for _, targets in rows])
    return ids_RT, targets_RT
