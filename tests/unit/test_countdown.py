"""Countdown: problems, splits and gold answers. The verifier has its own file."""

import random
from itertools import islice

import pytest

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.countdown import (
    BASE_MODEL_BUCKETS,
    Problem,
    Step,
    distinct_problems,
    prompt_of,
    random_problem,
    solve,
)
from tests.support.tasks import maker

make_task = maker("countdown")


def _problem(numbers: tuple[int, ...], target: int) -> Problem:
    return Problem(numbers=numbers, target=target, chain=())


def _key(prompt: Prompt) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(prompt.answer["numbers"])), prompt.answer["target"]


def test_a_prompt_shows_the_numbers_in_order_and_then_the_target() -> None:
    prompt = prompt_of(_problem((12, 99, 7), 80))
    assert prompt.text == "12,99,7->80:"
    assert prompt.task == "countdown"
    assert prompt.answer == {"numbers": [12, 99, 7], "target": 80}


def test_the_id_of_a_prompt_does_not_depend_on_the_chain_it_was_made_from() -> None:
    step = Step(left=12, op="*", right=7, value=84)
    made_otherwise = Problem(numbers=(12, 99, 7), target=80, chain=(step,))
    assert prompt_of(made_otherwise).prompt_id == prompt_of(_problem((12, 99, 7), 80)).prompt_id


def test_a_generated_chain_uses_every_number_and_ends_at_the_target() -> None:
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    rng = random.Random(1)
    for size in (3, 4):
        for _ in range(200):
            problem = random_problem(rng, size)
            values = list(problem.numbers)
            assert all(1 <= number <= 99 for number in values)
            for step in problem.chain:
                values.remove(step.left)
                values.remove(step.right)
                assert compute[step.op](step.left, step.right) == step.value
                assert step.op != "/" or step.left % step.right == 0
                values.append(step.value)
            assert values == [problem.target]
            assert 10 <= problem.target <= 99


def test_a_problem_keeps_its_bucket_for_ever() -> None:
    """The shipped base model was trained on buckets 0..7 of exactly this hash, so it must not change."""
    # crc32("7,12,99->80") = 195518696, crc32("3,5,8,9->24") = 2997577241
    assert _problem((12, 99, 7), 80).bucket == 6
    assert _problem((9, 8, 5, 3), 24).bucket == 1


def test_no_problem_is_in_two_of_base_model_data_train_and_held_out() -> None:
    task = make_task(num_train=3000, cd3_share=0.5, num_held_out=1000, held_out=["cd3", "cd34", "cd4"])
    rng = random.Random(0)
    base_model = {p.key for size in (3, 4) for p in islice(distinct_problems(rng, size, BASE_MODEL_BUCKETS), 5000)}
    train = {_key(prompt) for prompt in task.prompts("train")}
    held_out = {_key(prompt) for split in task.held_out_splits for prompt in task.prompts(split)}
    assert (len(base_model), len(train)) == (10000, 3000)
    assert not base_model & train
    assert not base_model & held_out
    assert not train & held_out


@pytest.mark.parametrize(("split", "num_cd3"), [("train", 50), ("cd3", 100), ("cd34", 50), ("cd4", 0)])
def test_each_split_has_its_share_of_three_number_problems(split: str, num_cd3: int) -> None:
    task = make_task(num_train=200, cd3_share=0.25, num_held_out=100, held_out=["cd3", "cd34", "cd4"])
    sizes = [len(prompt.answer["numbers"]) for prompt in task.prompts(split)]
    assert sizes.count(3) == num_cd3
    assert sizes.count(4) == len(sizes) - num_cd3


def test_the_seed_changes_training_problems_and_never_the_held_out_ones() -> None:
    a, b = make_task(num_train=50, seed=0), make_task(num_train=50, seed=1)
    assert a.prompts("train") == make_task(num_train=50, seed=0).prompts("train")
    assert a.prompts("train") != b.prompts("train")
    assert a.prompts("cd34") == b.prompts("cd34")


@pytest.mark.parametrize(
    ("numbers", "target", "solvable"),
    [
        ((12, 7, 4), 80, True),
        ((3, 3, 8, 8), 24, True),  # only 8/(3-8/3): the way leads over fractions
        ((1, 1, 1), 99, False),
        ((5,), 5, True),
    ],
)
def test_the_solver_finds_a_solution_exactly_when_there_is_one(
    numbers: tuple[int, ...], target: int, solvable: bool
) -> None:
    assert (solve(numbers, target) is not None) is solvable


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_train": 0}, "num_train"),
        ({"num_held_out": 1.5}, "num_held_out"),
        ({"cd3_share": 1.2}, "cd3_share"),
        ({"held_out": ["cd5"]}, "cd5"),
        ({"prompt_format": "{numbers} {x}"}, "prompt_format"),
        ({"prompt_format": "{numbers}"}, "prompt_format"),
        ({"prompt_format": "{"}, "prompt_format"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_task(**options)  # type: ignore[arg-type]
