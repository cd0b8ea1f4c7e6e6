"""The Countdown verifier: what is right, what is wrong, and that no text can make it raise."""

import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bapo.tasks.countdown import Problem, is_right, last_answer, prompt_of
from tests.support.tasks import maker

make_task = maker("countdown")

TASK = make_task(num_train=1, num_held_out=1)


def _reward(numbers: tuple[int, ...], target: int, text: str) -> float:
    return TASK.reward(prompt_of(Problem(numbers=numbers, target=target, chain=())), text)


@pytest.mark.parametrize(
    ("numbers", "target", "expression"),
    [
        ((12, 7, 4), 80, "12*7-4"),
        ((12, 7, 4), 80, "(12*7)-4"),
        ((12, 7, 4), 80, " 12 * 7 - 4 "),
        ((12, 7, 4), 80, "(((12*7-4)))"),
        ((2, 3, 4), 14, "2+3*4"),  # * before +
        ((2, 3, 4), 20, "(2+3)*4"),
        ((20, 5, 3), 12, "20-5-3"),  # from the left
        ((24, 4, 3), 2, "24/4/3"),
        ((3, 3, 8, 8), 24, "8/(3-8/3)"),  # exact: floats give 23.999999999999989
        ((5, 5, 7), 17, "5+5+7"),  # a number given twice is used twice
    ],
)
def test_a_right_expression_is_rewarded(numbers: tuple[int, ...], target: int, expression: str) -> None:
    assert _reward(numbers, target, f"<answer>{expression}</answer>") == 1.0


@pytest.mark.parametrize(
    "expression",
    [
        "12*7+4",  # 88
        "84-4",  # 84 was not given
        "12*7-4+12-12",  # 12 is used three times
        "12*7",  # 4 is not used
        "12*7-4=80",
        "80",
        "",
        "12*7-",
        "12 7*4-",
        "(12*7-4",
        "12*7-4)",
        "()12*7-4",
        "12**7-4",
        "12//7-4",
        "-4+12*7",  # unary minus is not covered, even where the value is right
        "+12*7-4",
        "12*(7)(4)",
        "12*7-4#",
        "12*7-4.0",
        "1 2*7-4",  # a space separates: 1 and 2 were not given
        "\uff11\uff12*7-4",  # full-width digits
        "12\u00d77-4",
        "__import__('os')",
        "12/(7-7)*4",
        "(" * 17 + "12*7-4" + ")" * 17,  # nested too deep
        "12*7-4" + " " * 95,  # over 100 characters
    ],
)
def test_a_wrong_or_unreadable_expression_is_not_rewarded(expression: str) -> None:
    assert _reward((12, 7, 4), 80, f"<answer>{expression}</answer>") == 0.0


def test_division_by_zero_is_wrong_and_raises_nothing() -> None:
    assert _reward((7, 5, 5), 7, "<answer>7/(5-5)</answer>") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1+1</answer>", "1+1"),
        ("thinking <answer>1</answer> no: <answer>2</answer> done", "2"),
        ("<answer>1</answer><answer>2", "1"),  # the last one never ends
        ("<answer>1<answer>2</answer>", "2"),
        ("</answer>1<answer>", None),
        ("1+1", None),
        ("<answer>1", None),
        ("", None),
    ],
)
def test_only_the_last_complete_answer_counts(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


def test_a_right_answer_before_a_wrong_one_is_not_rewarded() -> None:
    assert _reward((12, 7, 4), 80, "<answer>12*7-4</answer><answer>12+7+4</answer>") == 0.0
    assert _reward((12, 7, 4), 80, "<answer>12+7+4</answer><answer>12*7-4</answer>") == 1.0


@given(st.text(alphabet="<>answer/0123456789+-*()= \n²", max_size=300) | st.text())
@example("<answer>" + "(" * 100_000 + "</answer>")
@example("<answer>" + "9" * 100_000 + "</answer>")
@example("<answer>²+7+4</answer>")
def test_no_text_raises_and_every_reward_is_zero_or_one(text: str) -> None:
    assert _reward((12, 7, 4), 80, text) in (0.0, 1.0)
    assert _reward((12, 7, 4), 80, f"<answer>{text}</answer>") in (0.0, 1.0)


NUMBERS = st.integers(1, 99).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.booleans()).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})" if parts[3] else "".join(parts[:3])
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_precedence_and_value_agree_with_python_on_every_expression(expression: str) -> None:
    """Only the expressions that this test has made reach `eval`, with each number as an exact fraction."""
    numbers = [int(number) for number in re.findall(r"[0-9]+", expression)]
    try:
        value = eval(re.sub(r"([0-9]+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        value = None
    for target in (24, int(value or 0)):
        assert is_right(f"<answer>{expression}</answer>", numbers, target) is (value == target)
