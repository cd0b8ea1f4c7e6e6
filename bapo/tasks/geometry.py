"""Task `geometry`: read the numbers in a small drawing, and compute what the question asks.

    prompt    <image>What is the angle x?
    response  anything, then <answer>integer</answer>

    kind         asked for  the drawing shows                                      answer                     level
    equal        angle x    two parallel lines, one across, the angle a            a, x stands at its like    1
    supplement   angle x    the same                                               180 - a                    1
    radius       diameter   a circle with its radius n                             2 n                        1
    diameter     diameter   a circle with its diameter n                           n                          1
    triangle     angle x    two angles of a triangle                               180 - a - b                2
    sector       angle x    two of three angles around a center                    360 - a - b                2
    perimeter    perimeter  a rectangle with its two sides                         2 (w + h)                  2
    area         area       the same                                               w h                        3

Splits: `train`, and held out `geometry` (all kinds alike) and `geometry1` to `geometry3` (one level). They take
different buckets of a hash of the numbers, whatever the kind and the order: held-out numbers are nowhere in training,
in no shape. The project's base model was trained on other buckets. Shapes and labels stand a few pixels elsewhere in
each drawing, and nothing is to scale.

Does not cover: answers that are no integers, units, several questions about one drawing.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.answer_formats import marks_of, written_answer
from bapo.tasks.base import IMAGE, make_prompt
from bapo.tasks.drawing import ADVANCE, GLYPH_HEIGHT, Canvas, toward
from bapo.tasks.images import digest_of

NAME = "geometry"
TRAIN = "train"
SIZE = 64
"""Pixels of a side, before `scale`."""
QUESTION = "{question}"
DEFAULT_PROMPT_FORMAT = IMAGE + QUESTION
DEFAULT_ANSWER_FORMAT = "<answer>{answer}</answer>"
LEVELS = (1, 2, 3)
LEVELS_OF_HELD_OUT = {NAME: LEVELS, "geometry1": (1,), "geometry2": (2,), "geometry3": (3,)}
MOST_SCALE = 32
MAX_VALUE = 399
"""Of all numbers on the way to an answer, and of the answers."""

NUM_BUCKETS = 10
BASE_MODEL_BUCKETS = frozenset(range(8))
"""Numbers that the project's base model may see before any reinforcement learning."""
TRAIN_BUCKETS = frozenset({8})
HELD_OUT_BUCKETS = frozenset({9})

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One sort of problem."""

    question: str
    level: int
    draws: Callable[[random.Random], Numbers]
    """The numbers of a random problem, in the order in which they are drawn."""
    draw: Callable[[Canvas, random.Random, Numbers], None]
    solve: Callable[..., str]
    """Numbers -> the solution's steps: the last number is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Numbers, what is done with them, and one of many drawings of it."""

    kind: str
    numbers: Numbers
    seed: int
    """Of the drawing: where shapes and labels stand."""

    @property
    def steps(self) -> str:
        return KINDS[self.kind].solve(*self.numbers)

    @property
    def answer(self) -> int:
        return int(re.findall("[0-9]+", self.steps)[-1])

    @property
    def bucket(self) -> int:
        """0..9, a function of the numbers alone: splits that take different buckets cannot share a drawing."""
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


class GeometryTask:
    """Seeded drawings and an exact verifier; see `make_task` for the options."""

    name = NAME

    def __init__(self, *, splits: Sequence[Split], form: Form) -> None:
        self._splits = {split.name: split for split in splits}
        self._form = form

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self._splits if split != TRAIN)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split; kinds are mixed. Raises: ConfigError for an unknown split."""
        if split not in self._splits:
            raise ConfigError(f"task {NAME} has no split {split!r}; it has {', '.join(self._splits)}")
        return _drawn(self._splits[split], self._form)[0]

    def image(self, digest: str) -> bytes:
        """The drawing, a PNG. Raises: KeyError for a digest of none of this task's prompts."""
        for split in self._splits.values():
            images = _drawn(split, self._form)[1]
            if digest in images:
                return images[digest]
        raise KeyError(digest)

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the last answer of the response is the right integer, else 0.0."""
        found = self.extract(prompt, text)
        return float(found is not None and _integer(found) == prompt.answer["answer"])

    def extract(self, prompt: Prompt, text: str) -> str | None:
        return written_answer(self._form.answer_format, text)

    def level(self, prompt: Prompt) -> float:
        """1: one number is read; 2: two, and added; 3: two, and multiplied."""
        return float(KINDS[prompt.answer["kind"]].level)

    def gold(self, prompt: Prompt) -> str | None:
        return self._form.answer_format.replace("{answer}", str(prompt.answer["answer"]))

    def expert(self, prompt: Prompt) -> str | None:
        """The steps, then the answer."""
        return f"{KINDS[prompt.answer['kind']].solve(*prompt.answer['numbers'])};{self.gold(prompt)}"


def make_task(
    *,
    num_train: int = 2000,
    levels: Sequence[int] = LEVELS,
    seed: int = 0,
    num_held_out: int = 1000,
    held_out: Sequence[str] = (NAME, "geometry3"),
    held_out_seed: int = 0,
    prompt_format: str = DEFAULT_PROMPT_FORMAT,
    answer_format: str = DEFAULT_ANSWER_FORMAT,
    scale: int = 1,
) -> GeometryTask:
    """The task with its options, as the `[task.options]` table gives them.

    Args:
        num_train: problems in `train`; levels: their difficulties, of 1, 2 and 3.
        seed: of the training problems. `held_out_seed` is apart from it, so that runs with different seeds are
            measured on the same problems.
        num_held_out: problems in each held-out split; held_out: which of geometry, geometry1, geometry2, geometry3.
        prompt_format: text of a prompt, with one <image> and the field {question}.
        answer_format: where a response has its answer, as `gold_format` of datasets: "\\\\boxed{{answer}}" too.
        scale: pixels of the image for one of the drawing, which has 64 x 64: larger for models with larger patches.
    Raises: ConfigError for an option that makes no sense.
    """
    for option, value, most in (("num_train", num_train, None), ("num_held_out", num_held_out, None)):
        _check_count(option, value, most)
    _check_count("scale", scale, MOST_SCALE)
    if not levels or any(level not in LEVELS for level in levels):
        raise ConfigError(f"task.options.levels must be some of 1, 2 and 3, got {list(levels)}")
    unknown = [name for name in held_out if name not in LEVELS_OF_HELD_OUT]
    if unknown:
        raise ConfigError(f"task.options.held_out names {unknown}; known are {', '.join(LEVELS_OF_HELD_OUT)}")
    if prompt_format.count(IMAGE) != 1 or QUESTION not in prompt_format:
        raise ConfigError(f"task.options.prompt_format {prompt_format!r} must have one {IMAGE} and {QUESTION}")
    if marks_of(answer_format) is None:
        raise ConfigError(f"task.options.answer_format {answer_format!r} must have something before {{answer}}")
    train = Split(name=TRAIN, num=num_train, levels=tuple(sorted(set(levels))), seed=seed)
    others = [
        Split(name=name, num=num_held_out, levels=LEVELS_OF_HELD_OUT[name], seed=held_out_seed) for name in held_out
    ]
    form = Form(prompt_format=prompt_format, answer_format=answer_format, scale=scale)
    return GeometryTask(splits=[train, *others], form=form)


def random_problem(rng: random.Random, kinds: Sequence[str], buckets: Collection[int]) -> Problem:
    """One with numbers of these buckets; each kind is as likely as any other."""
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
    """The prompt that shows `problem`, and its image. Its answer has no steps, only what grades and sorts it."""
    png = problem.drawing().png(form.scale)
    text = form.prompt_format.replace(QUESTION, KINDS[problem.kind].question)
    answer = {"kind": problem.kind, "numbers": list(problem.numbers), "answer": problem.answer}
    return make_prompt(NAME, text, answer, images=[digest_of(png)]), png


@lru_cache(maxsize=32)
def _drawn(split: Split, form: Form) -> tuple[tuple[Prompt, ...], Mapping[str, bytes]]:
    """Prompts and their images, all different. Cached: a thousand take half a second."""
    buckets = TRAIN_BUCKETS if split.name == TRAIN else HELD_OUT_BUCKETS
    rng = random.Random(f"{NAME}/{split.name}/{split.seed}")  # noqa: S311 - reproducible, not secret
    prompts: dict[str, Prompt] = {}
    images: dict[str, bytes] = {}
    stream = (prompt_of(problem, form) for problem in problems(rng, split.levels, buckets))
    while len(prompts) < split.num:
        for prompt, png in islice(stream, split.num - len(prompts)):
            prompts[prompt.prompt_id] = prompt
            images[prompt.images[0]] = png
    return tuple(prompts.values()), images


def _check_count(option: str, value: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise ConfigError(f"task.options.{option} must be an integer of at least 1{limit}, got {value!r}")


# [0-9], not \d: int accepts digits of other scripts too.
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


# What is drawn. `corner` is the upper left pixel of a label; labels of two digits are 13 pixels wide and 7 high.

LABEL = ADVANCE + 5


def _rectangle(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
    """The width stands below, the height at the right."""
    left, top = rng.randint(2, 8), rng.randint(2, 9)
    right, bottom = left + rng.randint(24, 36), top + rng.randint(22, 40)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    for start, end in zip(corners, [*corners[1:], corners[0]], strict=True):
        canvas.line(start, end)
    width, height = numbers
    middle = (left + right - LABEL) // 2
    canvas.write((middle + rng.randint(-4, 4), bottom + rng.randint(3, 6)), str(width))
    canvas.write((right + rng.randint(3, 5), (top + bottom - GLYPH_HEIGHT) // 2 + rng.randint(-4, 4)), str(height))


def _triangle(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
    """The angles at the base are given, x is at the top."""
    base = rng.randint(53, 61)
    left, right = (rng.randint(1, 4), base), (rng.randint(59, 62), base)
    top = (rng.randint(25, 38), rng.randint(1, 6))
    for start, end in ((left, right), (right, top), (top, left)):
        canvas.line(start, end)
    first, second = numbers
    canvas.write((left[0] + rng.randint(9, 12), base - rng.randint(9, 12)), str(first))
    canvas.write((right[0] - LABEL - rng.randint(9, 12), base - rng.randint(9, 12)), str(second))
    canvas.write((top[0] - 2 + rng.randint(-1, 1), top[1] + rng.randint(9, 15)), "x")


def _sectors(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
    """Spokes up, down left and down right; x is below."""
    center, radius = (rng.randint(30, 33), rng.randint(29, 33)), rng.randint(27, 29)
    canvas.circle(center, radius)
    for direction in (
        (rng.randint(-3, 3), -16),
        (-16, rng.randint(9, 15)),
        (16, rng.randint(9, 15)),
    ):
        canvas.line(center, toward(center, direction, radius))
    first, second = numbers
    x, y = center
    canvas.write((x - 18 + rng.randint(-2, 1), y - 10 + rng.randint(-3, 3)), str(first))
    canvas.write((x + 6 + rng.randint(-1, 2), y - 10 + rng.randint(-3, 3)), str(second))
    canvas.write((x - 2 + rng.randint(-4, 4), y + rng.randint(12, 17)), "x")


def _circle(across: bool) -> Callable[[Canvas, random.Random, Numbers], None]:
    """A line from the center to the right, or from side to side; its length stands above it."""

    def draw(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
        radius = rng.randint(22, 28)
        x, y = rng.randint(radius + 1, 62 - radius), rng.randint(radius + 1, 62 - radius)
        canvas.circle((x, y), radius)
        canvas.line((x - radius if across else x, y), (x + radius, y))
        canvas.line((x, y - 1), (x, y + 1))
        start = x - LABEL // 2 + rng.randint(-6, 6) if across else x + (radius - LABEL) // 2 + rng.randint(-2, 2)
        canvas.write((start, y - GLYPH_HEIGHT - rng.randint(2, 5)), str(numbers[0]))

    return draw


def _parallel(like: bool) -> Callable[[Canvas, random.Random, Numbers], None]:
    """The line across leans to the right, so that the angles right above and left below each crossing are acute.

    The given angle is one of the acute ones at one crossing; x is at the other crossing, at a like angle or not.
    """

    def draw(canvas: Canvas, rng: random.Random, numbers: Numbers) -> None:
        upper, lower = rng.randint(15, 20), rng.randint(43, 48)
        lean = rng.randint(5, 9)
        middle = rng.randint(29, 33)
        canvas.line((1, upper), (62, upper))
        canvas.line((1, lower), (62, lower))
        canvas.line((middle + lean * 2, 1), (middle - lean * 2, 62))
        crossings = [(middle + lean * (63 - 2 * y) * 2 // 61, y) for y in (upper, lower)]
        if rng.random() < 0.5:
            crossings.reverse()
        given, asked = crossings
        above = rng.random() < 0.5
        _at_crossing(canvas, rng, given, str(numbers[0]), right=above, above=above)
        above = rng.random() < 0.5
        _at_crossing(canvas, rng, asked, "x", right=above == like, above=above)

    return draw


def _at_crossing(
    canvas: Canvas, rng: random.Random, crossing: tuple[int, int], text: str, *, right: bool, above: bool
) -> None:
    """In one of the four quarters."""
    x, y = crossing
    width = ADVANCE * (len(text) - 1) + 5
    away = (6 if right == above else 4) + rng.randint(0, 2)
    label_x = x + away if right else x - away - width + 1
    label_y = y - GLYPH_HEIGHT - rng.randint(2, 4) if above else y + rng.randint(3, 4)
    canvas.write((label_x, label_y), text)


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
    """Tens and units apart: "24*7=140+28=168"."""
    return f"{width}*{height}={width // 10 * 10 * height}+{width % 10 * height}={width * height}"


ANGLE, DIAMETER = "What is the angle x?", "What is the diameter?"
KINDS: Mapping[str, Kind] = {
    "equal": Kind(
        question=ANGLE, level=1, draws=_uniform(20, 89), draw=_parallel(True), solve=lambda a: f"x={a}"
    ),
    "supplement": Kind(
        question=ANGLE, level=1, draws=_uniform(20, 89), draw=_parallel(False), solve=lambda a: f"180-{a}={180 - a}"
    ),
    "radius": Kind(
        question=DIAMETER, level=1, draws=_uniform(11, 99), draw=_circle(False), solve=lambda n: f"2*{n}={2 * n}"
    ),
    "diameter": Kind(
        question=DIAMETER, level=1, draws=_uniform(11, 99), draw=_circle(True), solve=lambda n: f"x={n}"
    ),
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
    "area": Kind(
        question="What is the area?", level=3, draws=_sides_of_area, draw=_rectangle, solve=_area_steps
    ),
}
