r"""The reward of mathematics: the last \boxed{...} against the answer of the row."""

import os
import re
import threading
import tomllib
from pathlib import Path

import pytest

from bapo.tasks import mathematics
from bapo.tasks.base import make_prompt
from bapo.tasks.guard import share_of
from bapo.tasks.mathematics import boxed, last_box


def _prompt(answer: object) -> object:
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
    with pytest.raises(ValueError, match="is empty"):
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


PAIRS = tomllib.loads(Path(__file__).with_name("math_pairs.toml").read_text())


def test_every_pair_is_graded_as_the_table_says() -> None:
    """Of our own; in one test, because each pair would otherwise pay for sympy."""
    rows = [(gold, found, 1.0) for gold, found, _ in PAIRS["right"]]
    rows += [(gold, found, 0.0) for gold, found, _ in PAIRS["wrong"]]
    rows += [(gold, found, float(graded)) for gold, found, graded, _ in PAIRS["undecidable"]]
    other = [(gold, found) for gold, found, want in rows if boxed(_prompt(gold), f"\\boxed{{{found}}}") != want]
    assert len({(gold, found) for gold, found, _ in rows}) == len(rows) >= 150
    assert other == []


def test_one_of_several_answers_is_right_and_so_are_all_together() -> None:
    for found in ("2", "3", "2, 3", "3,2"):
        assert boxed(_prompt(["$2$", "$3$"]), f"\\boxed{{{found}}}") == 1.0
    assert boxed(_prompt(["2", "3"]), "\\boxed{4}") == 0.0


@pytest.mark.parametrize("answer", [[], ["2", None], [None], [[]], ["", "2"]], ids=str)
def test_boxed_refuses_an_answer_without_a_text_and_never_calls_every_response_wrong(answer: object) -> None:
    with pytest.raises(ValueError, match="the answer"):
        boxed(_prompt(answer), "\\boxed{2}")


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ([3, 4], ["3", "4", "3, 4"], ["5", "3, 5", "34"]),
        ([["1", "2"], "7"], ["1, 2", "7", "2,1"], ["1", "2", "8"]),
        (["\\frac12"], ["0.5"], ["2"]),
        (["B", "C"], ["B", "C"], ["A", "D"]),
        (["none"], ["\\text{none}"], ["0"]),
    ],
    ids=str,
)
def test_boxed_takes_any_answer_of_a_list_and_a_list_within_it_as_one(
    answer: object, right: list[str], wrong: list[str]
) -> None:
    prompt = _prompt(answer)
    assert [boxed(prompt, f"\\boxed{{{text}}}") for text in right] == [1.0] * len(right)
    assert [boxed(prompt, f"\\boxed{{{text}}}") for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize("answer", [27.0, [27.0, 5.0], "27.0"], ids=str)
def test_a_float_with_an_integer_value_is_that_integer_and_no_rounding(answer: object) -> None:
    assert [boxed(_prompt(answer), f"\\boxed{{{text}}}") for text in ("27", "27.0", "\\frac{54}{2}")] == [1.0] * 3
    assert [boxed(_prompt(answer), f"\\boxed{{{text}}}") for text in ("27.04", "\\sqrt{730}", "8.6\\pi")] == [0.0] * 3
    assert boxed(_prompt(27.25), "\\boxed{27.254}") == 1.0


BOMBS = {
    "tower": "9^{9^{9^9}}",
    "factorial": "(10^9)!",
    "sum": "\\sum_{n=1}^{1000000000} \\frac{1}{n^2+1}",
    "fractions": "\\frac{1}{1+" * 60 + "x" + "}" * 60,
    "parentheses": "(" * 450 + "1" + ")" * 450,
    "exponent": "1e999999999",
    "million characters": "1+" * 500_000 + "1",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_response_that_keeps_the_verifier_busy_is_incorrect_in_its_share_of_the_time(name: str) -> None:
    before = os.times().children_user
    with share_of(4.0, 1):
        assert boxed(_prompt("x+1"), f"\\boxed{{{BOMBS[name]}}}") == 0.0
    assert os.times().children_user - before < 3.0


def test_a_long_text_that_keeps_the_comparison_of_texts_busy_is_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "decided", lambda gold, found: re.search("(x+x+)+y", "x" * 60) is not None)
    with share_of(1.0, 1) as busy:
        assert boxed(_prompt("5"), f"\\boxed{{{'x' * 101}}}") == 0.0
    assert len(busy) == 1


def test_an_answer_of_the_data_set_that_keeps_it_busy_is_an_error() -> None:
    with share_of(1.0, 1), pytest.raises(ValueError, match="cannot be read as mathematics"):
        boxed(_prompt(BOMBS["parentheses"]), "\\boxed{x}")
