"""Task `geometry`: read the numbers in a small drawing, and compute an angle, a length or an area.

    prompt    <image>What is the angle x?
    response  anything, then <answer>integer</answer>

    kind         asked for  the drawing shows                               answer           level
    equal        angle x    parallel lines, one across, an acute angle a    a                1
    supplement   angle x    the same, x stands at an obtuse angle           180 - a          1
    radius       diameter   a circle and its radius n                       2 n              1
    diameter     diameter   a circle and its diameter n                     n                1
    triangle     angle x    two angles of a triangle                        180 - a - b      2
    sector       angle x    two of three angles around a center             360 - a - b      2
    perimeter    perimeter  the two sides of a rectangle                    2 (w + h)        2
    area         area       the same                                        w h              3

Splits: `train`, and held out `geometry` (all kinds equally often) and `geometry1` to `geometry3` (one level). They use
different buckets of a hash of the numbers, independent of kind and order: held-out combinations of numbers never occur
in training, nor in that of the project's base model. Training has nine of ten buckets: with one, a model learned its
few numbers instead of reading. Positions of shapes and labels vary by a few pixels, and nothing is drawn to scale.

Controls: `geometry-blank` and `geometry-swapped` ask the questions of `geometry` about white paper, and about the
drawing of another problem of the same kind. A model that uses its images fails on both.

Not supported: answers that are not integers, units, several questions about one drawing.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from pydantic import Field, field_validator

from bapo.core.types import Prompt
from bapo.tasks.answer_formats import marks_of, written_answer
from bapo.tasks.base import IMAGE, TRAIN, GeneratedOptions, Task, make_prompt, require_split, splits_of
from bapo.tasks.images import digest_of
from contrib.geometry.drawing import ADVANCE, GLYPH_HEIGHT, GLYPH_WIDTH, Canvas, toward

NAME = "geometry"
SIZE = 64
"""Pixels of a side, before `scale`."""
QUESTION = "{question}"
DEFAULT_PROMPT_FORMAT = IMAGE + QUESTION
DEFAULT_ANSWER_FORMAT = "<answer>{answer}</answer>"
LEVELS: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
BLANK, SWAPPED = f"{NAME}-blank", f"{NAME}-swapped"
LEVELS_OF_HELD_OUT = {
    NAME: LEVELS, "geometry1": (1,), "geometry2": (2,), "geometry3": (3,), BLANK: LEVELS, SWAPPED: LEVELS
}  # fmt: skip
MAX_SCALE = 32
MAX_PROMPTS = 100_000
"""Per split: their images are kept in memory."""
MAX_VALUE = 399
"""Of all intermediate results and answers."""

NUM_BUCKETS = 10
BASE_MODEL_BUCKETS = frozenset(range(8))
"""Numbers that the project's base model may see before any reinforcement learning."""
TRAIN_BUCKETS = frozenset(range(9))
HELD_OUT_BUCKETS = frozenset({9})

Numbers = tuple[int, ...]
Drawn = tuple[tuple[Prompt, ...], Mapping[str, bytes]]
"""The prompts of a split, and their images by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of problem."""

    question: str
    level: int
    draws: Callable[[random.Random], Numbers]
    """Samples the numbers of a problem, in drawing order."""
    draw: Callable[[Canvas, random.Random, Numbers], None]
    solve: Callable[..., str]
    """Numbers -> the steps of the solution, which end with the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Kind, numbers, and the seed of the drawing."""

    kind: str
    numbers: Numbers
    seed: int
    """Of the positions of shapes and labels."""

    @property
    def steps(self) -> str:
        return KINDS[self.kind].solve(*self.numbers)

    @property
    def answer(self) -> int:
        return int(re.findall("[0-9]+", self.steps)[-1])

    @property
    def bucket(self) -> int:
        """0..9, a function of the numbers only: splits with different buckets cannot share a drawing."""
        return zlib.crc32(",".join(map(str, sorted(self.numbers))).encode()) % NUM_BUCKETS

    def drawing(self) -> Canvas:
        canvas = Canvas(SIZE)
        KINDS[self.kind].draw(canvas, random.Random(self.seed), self.numbers)  # noqa: S311 - reproducible, not secret
        return canvas


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What determines the problems of a split."""

    name: str
    num: int
    levels: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a problem becomes a prompt."""

    prompt_format: str = DEFAULT_PROMPT_FORMAT
    answer_format: str = DEFAULT_ANSWER_FORMAT
    scale: int = 1


class GeometryOptions(GeneratedOptions):
    """The `[task.options]` table."""

    num_train: int = Field(2000, ge=1, le=MAX_PROMPTS)
    num_held_out: int = Field(1000, ge=1, le=MAX_PROMPTS)
    levels: tuple[Literal[1, 2, 3], ...] = Field(LEVELS, min_length=1)
    """Difficulty levels of the problems in `train`."""
    held_out: tuple[
        Literal["geometry", "geometry1", "geometry2", "geometry3", "geometry-blank", "geometry-swapped"], ...
    ] = ("geometry", "geometry3")
    """Which splits to evaluate."""
    prompt_format: str = DEFAULT_PROMPT_FORMAT
    """Text of a prompt, with one <image> and the field {question}."""
    answer_format: str = DEFAULT_ANSWER_FORMAT
    """Position of the answer in a response, like `gold_format` of datasets, e.g. "\\\\boxed{{answer}}"."""
    scale: int = Field(1, ge=1, le=MAX_SCALE)
    """Factor by which the drawing of 64 x 64 pixels is enlarged, for models with larger patches."""

    @field_validator("prompt_format")
    @classmethod
    def prompt_format_has_the_image_and_the_question(cls, prompt_format: str) -> str:
        """Check the fields."""
        if prompt_format.count(IMAGE) != 1 or QUESTION not in prompt_format:
            raise ValueError(f"{prompt_format!r} must contain one {IMAGE} and {QUESTION}")
        return prompt_format

    @field_validator("answer_format")
    @classmethod
    def answer_format_has_marks(cls, answer_format: str) -> str:
        """Check that an answer can be found."""
        if marks_of(answer_format) is None:
            raise ValueError(f"{answer_format!r} must have text before {{answer}}")
        return answer_format


class GeometryTask(Task):
    """Seeded drawings and an exact verifier."""

    name = NAME
    is_fast = True

    def __init__(self, options: GeometryOptions) -> None:
        self._options = options
        self.held_out_splits = options.held_out
        self._form = Form(prompt_format=options.prompt_format, answer_format=options.answer_format, scale=options.scale)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split; kinds are mixed. Raises: ConfigError for an unknown split."""
        return self._drawn(split)[0]

    def image(self, digest: str) -> bytes:
        """The drawing, a PNG. Raises: KeyError for a digest that no prompt of this task has."""
        for split in splits_of(self):
            if image := self._drawn(split)[1].get(digest):
                return image
        raise KeyError(digest)

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the last answer in the response is the correct integer, else 0.0."""
        found = self.extract(prompt, text)
        return float(found is not None and _integer(found) == prompt.answer["answer"])

    def extract(self, prompt: Prompt, text: str) -> str | None:
        return written_answer(self._form.answer_format, text)

    def level(self, prompt: Prompt) -> float:
        """1: read one number; 2: read two and add; 3: read two and multiply."""
        return float(KINDS[prompt.answer["kind"]].level)

    def gold(self, prompt: Prompt) -> str | None:
        return self._form.answer_format.replace("{answer}", str(prompt.answer["answer"]))

    def expert(self, prompt: Prompt) -> str | None:
        """The steps, then the answer."""
        return f"{KINDS[prompt.answer['kind']].solve(*prompt.answer['numbers'])};{self.gold(prompt)}"

    def _drawn(self, name: str) -> Drawn:
        require_split(self, name)
        levels = tuple(sorted(set(self._options.levels))) if name == TRAIN else LEVELS_OF_HELD_OUT[name]
        num, seed = self._options.size_of(name)
        return _drawn(Split(name=name, num=num, levels=levels, seed=seed), self._form)


def random_problem(rng: random.Random, kinds: Sequence[str], buckets: Collection[int]) -> Problem:
    """A problem with numbers of these buckets; all kinds are equally likely."""
    kind = rng.choice(kinds)
    while True:
        problem = Problem(kind=kind, numbers=KINDS[kind].draws(rng), seed=0)
        if problem.bucket in buckets:
            return Problem(kind=kind, numbers=problem.numbers, seed=rng.getrandbits(32))


def problems(rng: random.Random, levels: Collection[int], buckets: Collection[int]) -> Iterator[Problem]:
    """An endless stream."""
    kinds = [name for name, kind in KINDS.items() if kind.level in levels]
    while True:
        yield random_problem(rng, kinds, buckets)


def prompt_of(problem: Problem, form: Form) -> tuple[Prompt, bytes]:
    """The prompt of a problem, and its image."""
    return _prompt(problem, problem.drawing().png(form.scale), _answer(problem), form)


def _answer(problem: Problem) -> dict[str, Any]:
    """What is needed to grade and sort a problem: no steps."""
    return {"kind": problem.kind, "numbers": list(problem.numbers), "answer": problem.answer}


def _prompt(problem: Problem, png: bytes, answer: Mapping[str, Any], form: Form) -> tuple[Prompt, bytes]:
    text = form.prompt_format.replace(QUESTION, KINDS[problem.kind].question)
    return make_prompt(NAME, text, answer, images=[digest_of(png)]), png


@lru_cache(maxsize=32)
def _drawn(split: Split, form: Form) -> Drawn:
    """Distinct prompts and their images. Cached: a thousand take half a second."""
    pairs = _control(split, form) if split.name in (BLANK, SWAPPED) else [drawn for _, drawn in _distinct(split, form)]
    return tuple(prompt for prompt, _ in pairs), {prompt.images[0]: png for prompt, png in pairs}


def _distinct(split: Split, form: Form) -> list[tuple[Problem, tuple[Prompt, bytes]]]:
    """Problems with different prompts, as many as the split has."""
    buckets = TRAIN_BUCKETS if split.name == TRAIN else HELD_OUT_BUCKETS
    rng = random.Random(f"{NAME}/{split.name}/{split.seed}")  # noqa: S311 - reproducible, not secret
    stream = problems(rng, split.levels, buckets)
    found: dict[str, tuple[Problem, tuple[Prompt, bytes]]] = {}
    while len(found) < split.num:
        for problem in islice(stream, split.num - len(found)):
            drawn = prompt_of(problem, form)
            found[drawn[0].prompt_id] = problem, drawn
    return list(found.values())


def _control(split: Split, form: Form) -> list[tuple[Prompt, bytes]]:
    """The problems of `geometry` with another image. The seed distinguishes prompts that share image and numbers."""
    pairs = _distinct(replace(split, name=NAME), form)
    blank = Canvas(SIZE).png(form.scale)
    of_kind = {kind: [png for problem, (_, png) in pairs if problem.kind == kind] for kind in KINDS}
    next_of_kind = {kind: iter([*pngs[1:], *pngs[:1]]) for kind, pngs in of_kind.items()}
    return [
        _prompt(
            problem,
            blank if split.name == BLANK else next(next_of_kind[problem.kind]),
            _answer(problem) | {"seed": problem.seed},
            form,
        )
        for problem, _ in pairs
    ]


# [0-9], not \d: int accepts digits of other scripts too.
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


# Drawings: positions of shapes vary by a few pixels, and each label has one of several places.


def _width(text: str) -> int:
    """Of a label, in pixels."""
    return ADVANCE * (len(text) - 1) + GLYPH_WIDTH


def _rectangle(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
    """The width is above or below, the height at the left or right."""
    width, height = map(str, numbers)
    wide, high = rng.randint(24, 36), rng.randint(22, 38)
    below, at_right = rng.random() < 0.5, rng.random() < 0.5
    left = rng.randint(2, 6) if at_right else 61 - rng.randint(0, 4) - wide
    top = rng.randint(2, 8) if below else 61 - rng.randint(0, 6) - high
    right, bottom = left + wide, top + high
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    for start, end in zip(corners, [*corners[1:], corners[0]], strict=True):
        canvas.line(start, end)
    away = rng.randint(3, 6)
    x = (left + right - _width(width)) // 2 + rng.randint(-4, 4)
    canvas.write((x, bottom + away if below else top - GLYPH_HEIGHT - away), width)
    away = rng.randint(3, 5)
    y = (top + bottom - GLYPH_HEIGHT) // 2 + rng.randint(-4, 4)
    canvas.write((right + away if at_right else left - _width(height) - away, y), height)


def _triangle(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
    """x is one of the three angles; the given ones are in the order left, top, right."""
    base = rng.randint(53, 61)
    left, right = (rng.randint(1, 4), base), (rng.randint(59, 62), base)
    top = (rng.randint(25, 38), rng.randint(1, 6))
    for start, end in ((left, right), (right, top), (top, left)):
        canvas.line(start, end)
    at_left, at_top, at_right = _with_x(rng, numbers)
    canvas.write((left[0] + rng.randint(9, 12), base - rng.randint(9, 12)), at_left)
    down = rng.randint(15, 18)
    canvas.write(((top[0] * (base - down) + 31 * down) // base - _width(at_top) // 2, top[1] + down), at_top)
    canvas.write((right[0] - _width(at_right) - rng.randint(9, 12), base - rng.randint(9, 12)), at_right)


def _sectors(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
    """Spokes up, down left and down right; the given angles are in the order left, right, below."""
    center, radius = (rng.randint(30, 33), rng.randint(29, 33)), rng.randint(27, 29)
    canvas.circle(center, radius)
    for direction in ((rng.randint(-3, 3), -16), (-16, rng.randint(9, 15)), (16, rng.randint(9, 15))):
        canvas.line(center, toward(center, direction, radius))
    at_left, at_right, below = _with_x(rng, numbers)
    x, y = center
    canvas.write((x - 5 - _width(at_left) - rng.randint(-1, 2), y - 10 + rng.randint(-3, 3)), at_left)
    canvas.write((x + 6 + rng.randint(-1, 2), y - 10 + rng.randint(-3, 3)), at_right)
    canvas.write((x - _width(below) // 2 + rng.randint(-3, 3), y + rng.randint(12, 16)), below)


def _with_x(rng: random.Random, numbers: Numbers) -> list[str]:
    """The three labels of a problem with two numbers."""
    labels = list(map(str, numbers))
    labels.insert(rng.randrange(len(labels) + 1), "x")
    return labels


def _circle(across: bool) -> Callable[[Canvas, random.Random, Numbers], None]:
    """A line from the center to the left or right, or from side to side; its length is above or below it."""

    def draw(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
        label = str(numbers[0])
        radius = rng.randint(22, 28)
        x, y = rng.randint(radius + 1, 62 - radius), rng.randint(radius + 1, 62 - radius)
        canvas.circle((x, y), radius)
        side = rng.choice((-1, 1))
        canvas.line((x - side * radius if across else x, y), (x + side * radius, y))
        canvas.line((x, y - 1), (x, y + 1))
        middle = x + rng.randint(-6, 6) if across else x + side * (radius // 2) + rng.randint(-2, 2)
        away = rng.randint(2, 5)
        canvas.write(
            (middle - _width(label) // 2, y - GLYPH_HEIGHT - away if rng.random() < 0.5 else y + away + 1), label
        )

    return draw


def _parallel(like: bool) -> Callable[[Canvas, random.Random, Numbers], None]:
    """The line across leans to either side; the given angle is one of the acute ones at one of its crossings.

    x is at the other crossing: at an acute angle if it is `like` the given one, else at an obtuse one.
    """

    def draw(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
        rows = [rng.randint(15, 20), rng.randint(43, 48)]
        lean, middle, side = rng.randint(5, 9), rng.randint(30, 33), rng.choice((-1, 1))
        for row in rows:
            canvas.line((1, row), (62, row))
        canvas.line((middle + side * lean * 2, 1), (middle - side * lean * 2, 62))
        crossings = [(middle + side * (lean * (63 - 2 * row) * 2 // 61), row) for row in rows]
        rng.shuffle(crossings)
        for crossing, text, acute in zip(crossings, (str(numbers[0]), "x"), (True, like), strict=True):
            above = rng.random() < 0.5
            right = (above == acute) == (side > 0)
            away = (6 if acute else 4) + rng.randint(0, 2)
            x = crossing[0] + away if right else crossing[0] - away - _width(text) + 1
            y = crossing[1] - GLYPH_HEIGHT - rng.randint(2, 4) if above else crossing[1] + rng.randint(3, 4)
            canvas.write((x, y), text)

    return draw


def _uniform(low: int, high: int, count: int = 1, most_sum: int | None = None) -> Callable[[random.Random], Numbers]:
    """Numbers of low..high."""

    def draws(rng: random.Random) -> Numbers:
        while True:
            numbers = tuple(rng.randint(low, high) for _ in range(count))
            if most_sum is None or sum(numbers) <= most_sum:
                return numbers

    return draws


def _sides_of_area(rng: random.Random) -> Numbers:
    while True:
        width, height = rng.randint(11, 99), rng.randint(2, 9)
        if width * height <= MAX_VALUE:
            return width, height


def _area_steps(width: int, height: int) -> str:
    """Tens and units separately: "24*7=140+28=168"."""
    return f"{width}*{height}={width // 10 * 10 * height}+{width % 10 * height}={width * height}"


ANGLE, DIAMETER = "What is the angle x?", "What is the diameter?"
KINDS: Mapping[str, Kind] = {
    "equal": Kind(question=ANGLE, level=1, draws=_uniform(20, 89), draw=_parallel(True), solve=lambda a: f"x={a}"),
    "supplement": Kind(
        question=ANGLE, level=1, draws=_uniform(20, 89), draw=_parallel(False), solve=lambda a: f"180-{a}={180 - a}"
    ),
    "radius": Kind(
        question=DIAMETER, level=1, draws=_uniform(11, 99), draw=_circle(False), solve=lambda n: f"2*{n}={2 * n}"
    ),
    "diameter": Kind(question=DIAMETER, level=1, draws=_uniform(11, 99), draw=_circle(True), solve=lambda n: f"x={n}"),
    "triangle": Kind(
        question=ANGLE,
        level=2,
        draws=_uniform(20, 99, 2, 160),
        draw=_triangle,
        solve=lambda a, b: f"{a}+{b}={a + b},180-{a + b}={180 - a - b}",
    ),
    "sector": Kind(
        question=ANGLE,
        level=2,
        draws=_uniform(20, 99, 2),
        draw=_sectors,
        solve=lambda a, b: f"{a}+{b}={a + b},360-{a + b}={360 - a - b}",
    ),
    "perimeter": Kind(
        question="What is the perimeter?",
        level=2,
        draws=_uniform(11, 99, 2),
        draw=_rectangle,
        solve=lambda w, h: f"{w}+{h}={w + h},2*{w + h}={2 * (w + h)}",
    ),
    "area": Kind(question="What is the area?", level=3, draws=_sides_of_area, draw=_rectangle, solve=_area_steps),
}
