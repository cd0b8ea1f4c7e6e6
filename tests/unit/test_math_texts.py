r"""What texts decide between two answers of mathematics: properties of every pair of a kind, and bounds of time."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from bapo.tasks.math_answers import decided, spelled
from bapo.tasks.math_numbers import as_fractions

SPACES = ("\\,", "\\;", "\\:", "\\!", "\\ ", "~", "\\quad", "\\qquad", " ", "{\\,}", "\\,\\,", "\\hspace{1em}")
FONTS = ("\\text{%s}", "\\mathrm{%s}", "\\text{ %s}", "{\\rm %s}", "\\mathrm{~%s}", "\\textbf{%s}", "%s")
UNITS = ("cm", "m", "kg", "s", "km", "g")
LETTERS = "ABCDEFGHIJ"
FEW = settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])

units = st.sampled_from(UNITS)
spaces = st.sampled_from(SPACES)
fonts = st.sampled_from(FONTS)


@FEW
@given(st.integers(1, 999), units, units, spaces, spaces, fonts, fonts)
def test_no_space_and_no_font_hides_a_unit(
    number: int, ours: str, theirs: str, gap: str, other_gap: str, font: str, other: str
) -> None:
    assume((font != "%s" or not gap[-1].isalpha()) and (other != "%s" or not other_gap[-1].isalpha()))
    gold, found = f"{number}{gap}{font % ours}", f"{number}{other_gap}{other % theirs}"
    assert decided(gold, found) is (ours == theirs)
    assert decided(gold, f"{number + 1}{other_gap}{other % theirs}") is False
    assert decided(gold, str(number)) is True


@FEW
@given(st.integers(0, 99), st.text("0123456789", max_size=3), st.text("0123456789", min_size=1, max_size=4), st.data())
def test_a_repeating_decimal_is_its_fraction_on_either_side_and_no_other(
    whole: int, once: str, again: str, data: st.DataObject
) -> None:
    value = whole + Fraction(int(once or 0), 10 ** len(once))
    value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
    form = data.draw(
        st.sampled_from(["\\overline{%s}", "\\bar{%s}", "{\\overline{%s}}", "(%s)", "\\overline{%s}\\ldots"])
    )
    written = f"{whole}.{once}{form % again}"
    exact = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert decided(written, exact) is True
    assert decided(exact, written) is True
    assert decided(f"-{exact}", f"-{written}") is True
    other = value + Fraction(1, 10 ** (len(once) + len(again) + 1))
    assert decided(f"\\frac{{{other.numerator}}}{{{other.denominator}}}", written) is False
    assert decided(written, f"\\frac{{{other.numerator}}}{{{other.denominator}}}") is False


@pytest.mark.parametrize(
    ("written", "exact"),
    [("0.\\dot{3}", "1/3"), ("0.\\dot3", "1/3"), ("0.\\dot{1}4285\\dot{7}", "1/7"), ("0.1\\dot6", "1/6"),
     ("0.\\dot1\\dot2", "12/99"), ("0.333...", "1/3"), ("0.1666\\ldots", "1/6"), ("0.1212…", "12/99"),
     (".\\overline{9}", "1"), ("0.3\u0305", "1/3"), ("0.3\u0307", "1/3")],
)  # fmt: skip
def test_other_ways_to_write_a_repeating_decimal(written: str, exact: str) -> None:
    assert decided(written, exact) is decided(exact, written) is True
    assert decided(written, "0.3") is decided("0.3", written) is False


@pytest.mark.parametrize(
    "text", ["0.\\overline{3}x", "\\overline{AB}", "\\dot{x}", "f(3)", "1.41421...", "0.\\overline{}"]
)
def test_what_is_no_repeating_decimal_is_left_alone(text: str) -> None:
    assert as_fractions(text) in (text, "\\frac{1}{3}x")


def _scientific(digits: int, exponent: int, places: int) -> str:
    text = str(digits)
    return f"{text[0]}.{text[1:]}e{exponent + places}"


@FEW
@given(st.integers(10**6, 10**12), st.sampled_from([1, -1]), st.integers(6, 9))
def test_a_rounding_of_the_gold_answer_is_right_and_its_neighbors_are_not(size: int, sign: int, digits: int) -> None:
    places = len(str(size)) - digits
    if places <= 0:
        return
    unit = 10**places
    down, rest = divmod(size, unit)
    minus = "-" if sign < 0 else ""
    right = {down} | ({down + 1} if 2 * rest >= unit else set())  # cut off; rounded, a half either way
    for near in range(max(down - 2, 10 ** (digits - 1)), min(down + 4, 10**digits)):
        found = minus + _scientific(near, digits - 1, places)
        assert decided(f"{sign * size}", found) is (near in right), found
        assert decided(f"{sign * size}", f"{sign * near * unit}") is (near * unit == size)


@pytest.mark.parametrize(
    ("gold", "found", "right"),
    [("123456", "1.23457e5", False), ("123456", "123457", False), ("123456", "1.23456e5", True),
     ("0.1234565", "0.123456", True), ("0.1234565", "0.123457", True), ("0.1234565", "0.123455", False),
     ("0.1234565", "0.123458", False), ("-0.1234565", "-0.123457", True), ("-0.1234565", "0.123457", False),
     ("0.334", "0.3335", True), ("0.333", "0.3335", False), ("0.334", "0.3345", True), ("0.335", "0.3345", True),
     ("-0.334", "-0.3335", True), ("6.02e23", "6.025e23", True), ("6.03e23", "6.025e23", True),
     ("6.01e23", "6.015e23", False), ("12.5\\%", "0.125", True), ("12.5\\%", "0.15", False),
     ("\\frac23", "0.666667", True), ("\\frac23", "0.666666", True), ("\\frac23", "0.666668", False),
     ("\\frac12", "0.5000001", False)],
)  # fmt: skip
def test_halves_go_away_from_zero_or_to_an_even_digit(gold: str, found: str, right: bool) -> None:
    assert decided(gold, found) is right


@FEW
@given(st.permutations(LETTERS), st.integers(1, 99), st.integers(1, 99))
def test_an_answer_that_names_two_letters_is_wrong_for_both(letters: list[str], one: int, two: int) -> None:
    a, b = letters[:2]
    for text in (
        f"({a}) {b}", f"{a}. {b}", f"({a}) or ({b})", f"{a}. {one} or {b}. {two}", f"{a} or {b}", f"{a}, {b}",
        f"{a}/{b}", f"{a} {b}", f"{a}{b}", f"({a})({b})", f"\\text{{{a} or {b}}}", f"{a} \\text{{ or }} {b}",
        f"({a}) {one} ({b}) {two}", f"not {a}", f"({a}) is wrong", f"either {a} or {b}", f"({a}) or {b.lower()}",
        f"{a} \\vee {b}", f"{a} and {b}", f"({a}), ({b})", f"{a}: {b}", f"answer: {a}, or {b}",
    ):  # fmt: skip
        assert decided(a, text) is False, text
        assert decided(b, text) is False, text


@FEW
@given(st.permutations(LETTERS), st.integers(1, 99))
def test_a_letter_alone_or_before_its_value_is_right(letters: list[str], value: int) -> None:
    a, b = letters[:2]
    for gold in (a, f"({a})", f"\\text{{{a}}}"):
        for text in (
            a,
            f"({a})",
            f"({a.lower()})",
            f"{a}.",
            f"{a}. {value}",
            f"({a}) {value}",
            f"\\textbf{{({a})}} {value}",
        ):
            assert decided(gold, text) is True, (gold, text)
    for gold in (f"{a}. {value}", f"({a}) {value}"):
        for text in (a, f"({a})", str(value), f"({a}) {value}", f"{a}. {value}"):
            assert decided(gold, text) is True, (gold, text)
        for text in (b, f"{b}. {value}", f"({a}) {value + 1}", str(value + 1), f"{value} or {value + 1}"):
            assert decided(gold, text) is False, (gold, text)


@FEW
@given(
    st.integers(2, 9), st.integers(10, 99), st.sampled_from(["or", "and", "not", "is wrong, it is", "; maybe", "but"])
)
def test_words_behind_a_number_that_name_another_make_it_wrong(one: int, two: int, word: str) -> None:
    for text in (f"{one} \\text{{ {word} {two}}}", f"{one} {word} {two}", f"{one} \\text{{ {word} }} {two}",
                 f"{one} \\text{{ {word} twelve}}", f"{one}={two}"):  # fmt: skip
        assert decided(str(one), text) is False, text
        assert decided(str(two), text) is False, text
    assert decided(str(one), f"{one} \\text{{ different ways}}") is True


LONG = {
    "spaces": "12" + " " * 900 + "x",
    "texts and spaces": "12\\text{a}" + "  \\text{a}" * 60 + "x",
    "thin spaces": "12\\," * 200 + "x",
    "digits": "1" * 900 + "...",
    "a period": "0." + "12" * 400 + "...",
    "a line": "0.\\overline{" + "3" * 900 + "}",
    "units": "5 " + "m " * 300 + "x",
    "quotients": "5m" + "/m" * 300 + "!",
    "letters": "B. " + "A " * 300,
    "equations": "=5" * 300,
    "parentheses": "(" * 900,
    "an exponent": "1e" + "9" * 900,
    "a foreign text": "1" + "\u4e00" * 990,
    "foreign texts": "1\u4e00\u3000" * 300,
    "separators": "(1,234]" * 140,
    "separators in braces": "1{,}234" * 140,
    "multipliers": "5 million " * 100,
    "multipliers in texts": "5\\text{ million" * 60,
}


@pytest.mark.parametrize("name", LONG)
def test_no_response_takes_long(name: str) -> None:
    began = time.process_time()
    for gold in ("5", "B", "5 \\text{ cm}", "\\frac13"):
        assert decided(gold, LONG[name]) is not True
        spelled(LONG[name], gold)
    assert time.process_time() - began < 1.0
