"""Supervised examples of the geometry model: reading exercises for the vision tower, then worked answers.

    exercise   lines, circles and many labels anywhere: which character has its middle in each patch of 8 x 8 pixels,
               and which label begins in each place of 16 x 16
    example    <image>What is the perimeter?   24+17=41,2*41=82;<answer>82</answer>

Exercises show every number, but ask nothing; the problems of examples are of the base model's own numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrib.geometry.drawing import ADVANCE, GLYPH_HEIGHT, GLYPHS, Canvas
from contrib.geometry.task import (
    BASE_MODEL_BUCKETS,
    KINDS,
    LEVELS,
    SIZE,
    Form,
    problems,
    prompt_of,
    random_problem,
)
from models.geometry_model import MERGE, NUM_IMAGE_TOKENS, NUM_PATCHES, PATCH, patch_centers, patches_of, prompt_ids

IGNORE = -100
"""Target of a position that is not trained: prompt and padding."""
CHARACTERS = tuple(GLYPHS)
NOTHING = len(CHARACTERS)
"""Class of a patch in which no character has its middle."""
LABELS = ("x", *map(str, range(100)))
NO_LABEL = len(LABELS)
MAX_LABELS = 10
DRAWINGS_AMONG_EXERCISES = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """Pictures and what stands where."""

    patches_RPD: Tensor
    characters_RP: Tensor
    """Index of the character in a patch, or NOTHING."""
    labels_RQ: Tensor
    """Index of the label that begins in a place, NO_LABEL, or IGNORE where two do; Q places of a picture."""


def exercises(rng: random.Random, num_rows: int) -> Iterator[Exercise]:
    """An endless stream."""
    order = {center: index for index, center in enumerate(patch_centers())}
    while True:
        canvases = [_exercise(rng) for _ in range(num_rows)]
        characters_RP = torch.full((num_rows, NUM_PATCHES), NOTHING)
        labels_RQ = torch.full((num_rows, NUM_IMAGE_TOKENS), NO_LABEL)
        for row, canvas in enumerate(canvases):
            for char, x, y in canvas.glyphs:
                characters_RP[row, order[x // PATCH, y // PATCH]] = CHARACTERS.index(char)
            for text, x, y in canvas.labels:
                place = order[x // PATCH, y // PATCH] // MERGE**2
                is_first = labels_RQ[row, place] == NO_LABEL
                labels_RQ[row, place] = LABELS.index(text) if is_first else IGNORE
        yield Exercise(patches_RPD=_patches(canvases), characters_RP=characters_RP, labels_RQ=labels_RQ)


def batches(rng: random.Random, tokenizer: Any, num_rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """An endless stream of (token ids [R, T], patches [R, P, D], targets [R, T]) over the base model's own numbers."""
    stream = problems(rng, LEVELS, BASE_MODEL_BUCKETS)
    form = Form()
    while True:
        chosen = [next(stream) for _ in range(num_rows)]
        rows = [_encode(tokenizer, *texts_of(problem, form)) for problem in chosen]
        width = max(len(ids) for ids, _ in rows)
        ids_RT = torch.tensor([[*ids, *[tokenizer.pad_token_id] * (width - len(ids))] for ids, _ in rows])
        # Targets are the ids one position later; the last prompt token predicts the first token of the response.
        targets_RT = torch.tensor(
            [
                [*[IGNORE] * (num_prompt - 1), *ids[num_prompt:], *[IGNORE] * (width - len(ids) + 1)]
                for ids, num_prompt in rows
            ]
        )
        yield ids_RT, _patches([problem.drawing() for problem in chosen]), targets_RT


def texts_of(problem: Any, form: Form) -> tuple[str, str]:
    """Prompt and response."""
    prompt, _ = prompt_of(problem, form)
    return prompt.text, f"{problem.steps};{form.answer_format.replace('{answer}', str(problem.answer))}"


def _exercise(rng: random.Random) -> Canvas:
    if rng.random() < DRAWINGS_AMONG_EXERCISES:
        return random_problem(rng, list(KINDS), BASE_MODEL_BUCKETS).drawing()
    canvas = Canvas(SIZE)
    for _ in range(rng.randint(0, 5)):
        canvas.line(_pixel(rng), _pixel(rng))
    for _ in range(rng.randint(0, 1)):
        canvas.circle(_pixel(rng), rng.randint(10, 30))
    taken = np.zeros_like(canvas.ink)
    for _ in range(rng.randint(2, MAX_LABELS)):
        text = "x" if rng.random() < 0.1 else str(rng.randint(2, 9) if rng.random() < 0.2 else rng.randint(10, 99))
        width = ADVANCE * (len(text) - 1) + 5
        x, y = rng.randint(0, SIZE - width), rng.randint(0, SIZE - GLYPH_HEIGHT)
        # With a margin: the middles of two characters are never in one patch.
        box = taken[max(0, y - 3) : y + GLYPH_HEIGHT + 3, max(0, x - 3) : x + width + 3]
        if not box.any():
            taken[y : y + GLYPH_HEIGHT, x : x + width] = True
            canvas.write((x, y), text)
    return canvas


def _pixel(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(SIZE), rng.randrange(SIZE)


def _patches(canvases: list[Canvas]) -> Tensor:
    return patches_of(torch.from_numpy(np.stack([canvas.ink for canvas in canvases])))


def _encode(tokenizer: Any, prompt: str, response: str) -> tuple[list[int], int]:
    """Token ids of prompt + response + end of sequence, and how many of them are the prompt."""
    before = prompt_ids(tokenizer, prompt)
    return [*before, *tokenizer(response)["input_ids"], tokenizer.eos_token_id], len(before)
