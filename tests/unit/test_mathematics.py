r"""The reward of mathematics: the last \boxed{...} against the answer of the row."""

import threading

import pytest

from bapo.tasks.base import make_prompt
from bapo.tasks.mathematics import boxed, last_box


def _prompt(answer: str) -> object:
    return make_prompt("dataset", "x?", {"answer": answer})


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("12", "so it is \\boxed{12}."),
        ("$12$", "\\boxed{12}"),
        ("\\boxed{12}", "\\boxed{12}"),
        ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("\\frac12", "\\boxed{\\dfrac{1}{2}}"),
        ("3\\sqrt{2}", "\\boxed{\\sqrt{18}}"),
        ("x^2+1", "\\boxed{1+x^2}"),
        ("1000", "\\boxed{1,000}"),
        ("\\text{east}", "\\boxed{\\text{east}}"),
        ("12", "first \\boxed{11}, no: \\boxed{12}"),
        ("2", "<think>\\boxed{9}</think> \\boxed{2} and \\boxed{unfinished"),
    ],
)
def test_equal_mathematics_is_right_however_it_is_written(answer: str, response: str) -> None:
    assert boxed(_prompt(answer), response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "12",
        "",
        "\\boxed{}",
        "\\boxed{13}",
        "\\boxed{12} then \\boxed{13}",
        "\\boxed{12",
        "\\boxed{" + "1+" * 600 + "1}",
    ],
)
def test_anything_else_is_wrong(response: str) -> None:
    assert boxed(_prompt("12"), response) == 0.0


@pytest.mark.parametrize("response", ["\\boxed{12}", "\\boxed{}", "12"])
def test_an_answer_of_the_data_set_that_nobody_can_read_is_an_error_and_no_wrong_answer(response: str) -> None:
    with pytest.raises(ValueError, match="cannot parse the answer '' of the data set as mathematics"):
        boxed(_prompt(""), response)


def test_it_grades_outside_of_the_main_thread_too() -> None:
    """math-verify's own timeouts use signals, and give 0 there."""
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(boxed(_prompt("\\frac{1}{2}"), "\\boxed{0.5}")))
    thread.start()
    thread.join(timeout=60)
    assert rewards == [1.0]


def test_braces_inside_of_a_box_belong_to_it() -> None:
    assert last_box("\\boxed{\\frac{1}{2}} ") == "\\frac{1}{2}"
    assert last_box("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert last_box("\\boxed{a \\boxed{b}}") == "b"
    assert last_box("\\boxed{\\left\\{ x \\right.}") == "\\left\\{ x \\right."
    assert last_box("no box") is None
    assert last_box("\\boxed{" * 100_000) is None  # quadratic work would take minutes
