"""Chain: operations from left to right, splits by content, and the teacher of the base model."""

import random

import pytest

from bapo.core.errors import ConfigError
from contrib.chain.task import (
    BASE_MODEL_BUCKETS,
    HELD_OUT_BUCKETS,
    TRAIN_BUCKETS,
    Chain,
    distinct_chains,
    is_easy,
    prompt_of,
    random_chain,
)
from models.chain_data import RIGHT, examples, kind_of, response_text, slip
from tests.support.tasks import maker

make_task = maker("chain")

CHAIN = Chain(first=47, operations=(("+", 38), ("-", 19), ("*", 7), ("-", 80)))


def test_every_value_keeps_its_last_two_digits_and_continues_below_0() -> None:
    # 47+38 = 85, 85-19 = 66, 66*7 = 462, 62-80 = -18
    assert CHAIN.values == (85, 66, 62, 82)
    assert prompt_of(CHAIN).text == "47+38-19*7-80:"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("47+38=85;<answer>82</answer>", 1.0),
        ("<answer> 82 </answer>", 1.0),
        ("<answer>62</answer><answer>82</answer>", 1.0),
        ("<answer>82</answer><answer>62</answer>", 0.0),
        ("<answer>082</answer>", 0.0),
        ("<answer>-18</answer>", 0.0),
        ("82", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_answer_counts(text: str, reward: float) -> None:
    assert make_task().reward(prompt_of(CHAIN), text) == reward


def test_gold_is_right() -> None:
    task = make_task(num_train=5)
    assert [task.reward(prompt, task.gold(prompt)) for prompt in task.prompts("train")] == [1.0] * 5


def test_splits_have_their_lengths_and_no_problem_in_common() -> None:
    task = make_task(num_train=300, num_held_out=300)
    levels = {split: {task.level(p) for p in task.prompts(split)} for split in ("train", *task.held_out_splits)}
    assert levels == {"train": {2, 3, 4, 5}, "chain": {2, 3, 4, 5}, "chain-long": {6, 7, 8, 9, 10}}
    ids = [prompt.prompt_id for split in levels for prompt in task.prompts(split)]
    assert len(ids) == len(set(ids)) == 900
    assert not TRAIN_BUCKETS & HELD_OUT_BUCKETS
    assert not (TRAIN_BUCKETS | HELD_OUT_BUCKETS) & BASE_MODEL_BUCKETS


def test_easy_problems_are_a_share_of_training_and_a_split_of_their_own() -> None:
    task = make_task(num_train=50, num_held_out=30, min_steps=3, easy_share=0.8, held_out=["chain", "chain-easy"])
    levels = [task.level(prompt) for prompt in task.prompts("train")]
    assert (levels.count(2), min(level for level in levels if level != 2)) == (40, 3)
    assert {task.level(prompt) for prompt in task.prompts("chain-easy")} == {2}
    ids = [prompt.prompt_id for split in ("train", "chain", "chain-easy") for prompt in task.prompts(split)]
    assert len(set(ids)) == 110


def test_a_step_is_easy_if_the_teacher_never_slips_in_it() -> None:
    steps = [(value, sign, number) for value in range(100) for sign in "+-*" for number in range(1, 100)]
    steps = [step for step in steps if step[1] != "*" or 2 <= step[2] <= 9]
    assert [is_easy(*step) for step in steps] == [RIGHT[kind_of(*step)] == 1.0 for step in steps]


def test_problems_without_easy_ones_are_those_of_earlier_studies() -> None:
    task = make_task(num_train=2, num_held_out=1, seed=11, held_out_seed=1)
    assert [task.prompts(split)[0].text for split in ("train", "chain")] == ["81*8*4*4-37:", "44*2*7:"]


def test_other_seeds_train_other_problems_and_measure_the_same() -> None:
    one, two = make_task(num_train=20, num_held_out=20, seed=1), make_task(num_train=20, num_held_out=20, seed=2)
    assert one.prompts("train") != two.prompts("train")
    assert one.prompts("chain") == two.prompts("chain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train": 0}, "num_train"),
        ({"min_steps": 4, "max_steps": 3}, "more than max_steps"),
        ({"held_out": ["chain-short"]}, "chain-long"),
        ({"easy_share": 0.5}, "set min_steps = 3"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "sign", "number", "kind", "wrong"),
    [
        (41, "+", 38, "plus", None),
        (47, "+", 38, "carry", 75),  # 85 without its carry
        (70, "+", 45, "over", 99),
        (47, "-", 35, "minus", None),
        (42, "-", 35, "borrow", 17),  # 7 without its borrow
        (12, "-", 35, "under", 23),
        (23, "*", 3, "times", None),
        (27, "*", 6, "tens", 22),  # 6 * 20 = 120 and 6 * 7 = 42, of which 20 and 2 remain
    ],
)
def test_the_teacher_slips_in_its_own_way_for_each_kind_of_step(
    value: int, sign: str, number: int, kind: str, wrong: int | None
) -> None:
    found = kind_of(value, sign, number)
    assert found == kind
    if wrong is None:
        assert RIGHT[found] == 1.0
    else:
        assert slip(found, value, number) == wrong


def test_a_teacher_that_never_slips_gives_the_values_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.chain_data.RIGHT", dict.fromkeys(RIGHT, 1.0))
    text = response_text(random.Random(0), CHAIN)
    assert text == "47+38=85-19=66*7=62-80=82;<answer>82</answer>"


def test_the_base_model_is_taught_problems_that_no_run_uses() -> None:
    stream = examples(random.Random(3))
    taught = {next(stream)[0] for _ in range(200)}
    used = distinct_chains(random.Random(3), (1, 10), TRAIN_BUCKETS | HELD_OUT_BUCKETS)
    assert not taught & {f"{next(used).text}:" for _ in range(200)}


def test_slips_stay_in_range() -> None:
    rng = random.Random(1)
    for _ in range(500):
        chain = random_chain(rng, 1)
        ((sign, number),) = chain.operations
        kind = kind_of(chain.first, sign, number)
        assert RIGHT[kind] == 1.0 or 0 <= slip(kind, chain.first, number) <= 99
