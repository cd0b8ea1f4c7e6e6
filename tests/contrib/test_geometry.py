"""Geometry: drawings, splits by content, and the verifier."""

import hashlib
import io
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from contrib.geometry.drawing import GLYPHS, Canvas, png
from contrib.geometry.task import (
    BASE_MODEL_BUCKETS,
    HELD_OUT_BUCKETS,
    KINDS,
    MAX_VALUE,
    SIZE,
    TRAIN_BUCKETS,
    Form,
    Problem,
    problems,
    prompt_of,
    random_problem,
)
from tests.support.tasks import maker

make_task = maker("geometry")

ALL_BUCKETS = range(10)


def _numbers(prompt: Prompt) -> tuple[int, ...]:
    return tuple(sorted(prompt.answer["numbers"]))


def _some(count: int, kinds: list[str] | None = None) -> list[Problem]:
    rng = random.Random(7)
    return [random_problem(rng, kinds or list(KINDS), ALL_BUCKETS) for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "numbers", "steps", "answer"),
    [
        ("equal", (47,), "x=47", 47),
        ("supplement", (47,), "180-47=133", 133),
        ("radius", (24,), "2*24=48", 48),
        ("diameter", (24,), "x=24", 24),
        ("triangle", (47, 38), "47+38=85,180-85=95", 95),
        ("sector", (47, 38), "47+38=85,360-85=275", 275),
        ("perimeter", (24, 17), "24+17=41,2*41=82", 82),
        ("area", (24, 7), "24*7=140+28=168", 168),
    ],
)
def test_the_steps_lead_to_the_answer(kind: str, numbers: tuple[int, ...], steps: str, answer: int) -> None:
    problem = Problem(kind=kind, numbers=numbers, seed=1)
    assert (problem.steps, problem.answer) == (steps, answer)


def test_every_step_is_true_and_every_number_fits_the_base_models_tokens() -> None:
    for problem in _some(2000):
        for step in problem.steps.split(","):
            sides = {eval(side) for side in step.removeprefix("x=").split("=")}
            assert len(sides) == 1, problem.steps
            assert all(
                0 <= int(number) <= MAX_VALUE
                for number in step.replace("x", "0").replace("=", " ").split()
                if number.isdigit()
            )
        assert 0 < problem.answer <= MAX_VALUE


def test_every_character_of_a_drawing_is_whole_and_says_its_numbers() -> None:
    for problem in _some(4000):
        canvas = problem.drawing()
        assert canvas.ink.shape == (SIZE, SIZE)
        for char, x, y in canvas.glyphs:
            assert np.array_equal(canvas.ink[y - 3 : y + 4, x - 2 : x + 3], GLYPHS[char]), problem
        written = "".join(char for char, _, _ in canvas.glyphs)
        assert written.replace("x", "") == "".join(map(str, problem.numbers))
        assert ("x" in written) == (KINDS[problem.kind].question == "What is the angle x?")


def test_drawings_differ_by_their_numbers_and_by_where_things_stand() -> None:
    for kind in KINDS:
        one, moved = Problem(kind=kind, numbers=(24, 7), seed=1), Problem(kind=kind, numbers=(24, 7), seed=2)
        other = Problem(kind=kind, numbers=(25, 8), seed=1)
        images = [problem.drawing().png() for problem in (one, moved, other)]
        assert len(set(images)) == 3
        assert one.drawing().png() == images[0]


def test_where_x_stands_decides_which_angle_of_parallel_lines_is_asked() -> None:
    """The given angle is acute; x is equal where it stands at an acute one, and its supplement elsewhere."""
    for problem in _some(400, ["equal", "supplement"]):
        canvas = problem.drawing()
        first, last = (int(np.flatnonzero(canvas.ink[row]).mean()) for row in (1, 62))
        lines = [row for row in range(SIZE) if canvas.ink[row].sum() > 50]

        def is_acute(x: int, y: int, first: int = first, last: int = last, lines: list[int] = lines) -> bool:
            above = y < min((abs(line - y), line) for line in lines)[1]
            right = x > first + (last - first) * (y - 1) / 61
            return (right == above) == (first > last)

        acute = {char == "x": is_acute(x, y) for char, x, y in canvas.glyphs}
        assert acute == {False: True, True: problem.kind == "equal"}, problem


def test_no_numbers_of_one_split_are_in_another_in_any_shape() -> None:
    task = make_task(num_train=1500, num_held_out=600, held_out=["geometry", "geometry1", "geometry2", "geometry3"])
    train = {_numbers(prompt) for prompt in task.prompts("train")}
    for split in task.held_out_splits:
        held_out = {_numbers(prompt) for prompt in task.prompts(split)}
        assert len(held_out) >= 8
        assert not train & held_out
    assert not HELD_OUT_BUCKETS & (TRAIN_BUCKETS | BASE_MODEL_BUCKETS)
    assert (
        Problem(kind="area", numbers=(24, 7), seed=1).bucket
        == Problem(kind="perimeter", numbers=(7, 24), seed=2).bucket
    )


def test_controls_ask_the_same_questions_about_white_paper_and_about_each_others_drawings() -> None:
    task = make_task(num_held_out=300, held_out=["geometry", "geometry-blank", "geometry-swapped"])
    own, blank, swapped = map(task.prompts, task.held_out_splits)
    for prompts in (blank, swapped):
        assert [(p.text, p.answer["answer"]) for p in prompts] == [(p.text, p.answer["answer"]) for p in own]
        assert len({p.prompt_id for p in prompts}) == 300
    assert {task.image(p.images[0]) for p in blank} == {Canvas(SIZE).png()}
    kind_of = {p.images[0]: p.answer["kind"] for p in own}
    assert {p.images[0] for p in swapped} == set(kind_of)
    assert all(
        p.images != q.images and kind_of[p.images[0]] == p.answer["kind"] for p, q in zip(swapped, own, strict=True)
    )


def test_no_held_out_numbers_are_among_those_that_the_base_model_is_taught() -> None:
    stream = problems(random.Random(1), (1, 2, 3), BASE_MODEL_BUCKETS)
    taught = {tuple(sorted(next(stream).numbers)) for _ in range(2000)}
    task = make_task(num_held_out=500)
    assert not taught & {_numbers(prompt) for prompt in task.prompts("geometry")}


def test_a_task_is_the_same_each_time_and_seeds_move_training_alone() -> None:
    one, again, other = (make_task(num_train=60, num_held_out=40, seed=seed) for seed in (3, 3, 4))
    assert one.prompts("train") == again.prompts("train")
    assert one.prompts("train") != other.prompts("train")
    assert one.prompts("geometry") == other.prompts("geometry")
    # Bytes that no library's version changes: runs of several machines name the same images.
    digests = "".join(prompt.images[0] for prompt in one.prompts("train"))
    assert hashlib.sha256(digests.encode()).hexdigest()[:16] == "ac9ea7800bee73b0"


def test_prompts_are_different_name_their_image_and_are_of_their_levels() -> None:
    task = make_task(num_train=400, levels=[1, 3], num_held_out=200, held_out=["geometry2", "geometry3"])
    prompts = task.prompts("train")
    assert len({prompt.prompt_id for prompt in prompts}) == 400
    assert {task.level(prompt) for prompt in prompts} == {1.0, 3.0}
    assert {task.level(prompt) for prompt in task.prompts("geometry2")} == {2.0}
    assert {prompt.answer["kind"] for prompt in task.prompts("geometry3")} == {"area"}
    for prompt in (*prompts[:20], *task.prompts("geometry2")[:20]):
        (digest,) = prompt.images
        assert hashlib.sha256(task.image(digest)).hexdigest() == digest
        assert prompt.text.count("<image>") == 1
    with pytest.raises(KeyError):
        task.image("0" * 64)


def test_all_kinds_of_the_levels_are_as_frequent() -> None:
    counts = Counter(prompt.answer["kind"] for prompt in make_task(num_train=800).prompts("train"))
    assert set(counts) == set(KINDS)
    assert min(counts.values()) > 60


def test_the_steps_and_the_gold_are_right_and_others_are_not() -> None:
    task = make_task(num_train=200, num_held_out=1)
    for prompt in task.prompts("train"):
        answer = prompt.answer["answer"]
        assert task.reward(prompt, str(task.gold(prompt))) == 1.0
        assert task.reward(prompt, str(task.expert(prompt))) == 1.0
        for text in (
            f"<answer>{answer + 1}</answer>",
            f"<answer>{answer}.0</answer>",
            f"<answer>-{answer}</answer>",
            str(answer),
        ):
            assert task.reward(prompt, text) == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<answer>95</answer>", True),
        ("thinking <answer>1</answer> no, <answer> 95 </answer> done", True),
        ("<answer>095</answer>", True),
        ("<answer>95</answer> <answer>96</answer>", False),
        ("<answer>180-85</answer>", False),
        ("<answer>９５</answer>", False),
        ("<answer>95", False),
        ("<answer>" + "9" * 5000 + "</answer>", False),
    ],
)
def test_the_last_answer_counts_and_must_be_an_integer(text: str, right: bool) -> None:
    prompt, _ = prompt_of(Problem(kind="triangle", numbers=(47, 38), seed=0), Form())
    assert make_task(num_train=1).reward(prompt, text) == float(right)


def test_boxed_answers_and_larger_pictures() -> None:
    image = pytest.importorskip("PIL.Image", reason="requirements of images")
    task = make_task(
        num_train=3,
        prompt_format="<image>\n{question} Think, then \\boxed{{}}.",
        answer_format="\\boxed{{answer}}",
        scale=4,
    )
    for prompt in task.prompts("train"):
        assert prompt.text.startswith("<image>\nWhat is the ")
        assert task.reward(prompt, f"so \\boxed{{{prompt.answer['answer']}}}") == 1.0
        picture = image.open(io.BytesIO(task.image(prompt.images[0])))
        assert picture.size == (256, 256)
        assert picture.convert("L").getextrema() == (0, 255)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (7, 13), (1024, 1024)])
def test_a_png_shows_its_ink(shape: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image", reason="requirements of images")
    ink = np.random.default_rng(0).random(shape) < 0.5
    shown = np.asarray(image.open(io.BytesIO(png(ink))).convert("L"))
    assert np.array_equal(shown == 0, ink)


def test_nothing_is_drawn_outside_of_a_canvas() -> None:
    canvas = Canvas(16)
    canvas.line((-5, 8), (40, 8))
    canvas.circle((0, 0), 20)
    assert canvas.ink[8].all()
    with pytest.raises(ValueError, match="does not fit"):
        canvas.write((4, 4), "88")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train": 0}, "num_train"),
        ({"num_held_out": True}, "num_held_out"),
        ({"num_held_out": 100_001}, "num_held_out = 100001"),
        ({"levels": []}, "levels"),
        ({"levels": [4]}, "levels"),
        ({"held_out": ["cd4"]}, "geometry3"),
        ({"scale": 33}, "scale = 33"),
        ({"prompt_format": "{question}"}, "<image>"),
        ({"prompt_format": "<image>"}, "question"),
        ({"answer_format": "{answer}"}, "answer_format"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(**options)


def test_an_unknown_split_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="train, geometry, geometry3"):
        make_task(num_train=1, num_held_out=1).prompts("cd4")
