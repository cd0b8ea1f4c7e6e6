r"""Numbers as answers write them, and when two of them are the same.

    number_of("1 1/2"), ("4.5e33"), ("50\\%")          a decimal, fraction, mixed number, power of ten, percentage
    as_fractions("0.1\\overline{6}x")                  "\\frac{1}{6}x": also \bar, \dot, (6), and 0.1666... that repeats

Exact arithmetic. What is rounded: a gold answer that is a decimal of at least three digits may be the rounding of the
response, unless its only decimal is 0 (142.0: an integer of a column of floats); a response of at least six digits may
round the gold answer, or cut it off. A half goes away from zero or to an even digit, the two usual ways. A neighbor of
the rounding is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 400
"""Powers of ten beyond it are left to the verifier."""
MAX_DIGITS = 200
"""Characters of a number."""
ROUNDED_DIGITS = 3
"""Digits from which a decimal may be a rounded one."""
EXACT_DIGITS = 6
"""Digits from which a decimal is as good as the exact number that it rounds or cuts off."""

SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\\(?:displaystyle|left|right|limits)(?![a-zA-Z])")
_COMMAS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_SEPARATORS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!|\\[,;! ])(?:\\!)?\d{3})+(?!\d)")
_OPENS = re.compile(r"[(\[]|\\(?:\{|lbrace|langle)")
_CLOSES = re.compile(r"[)\]]|\\(?:\}|rbrace|rangle)")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?|\.\d+)\s?[eE]([+-]?\d+)(?![\dA-Za-z.])")
_MIXED = re.compile(r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_DECIMAL = re.compile(
    r"([+-]?)(?:(\d+\.?\d*|\.\d+)(?:(?:\\times|\\cdot|\*|×)10\^\{?([+-]?\d+)\}?)?|(\d+)/(\d+)|10\^\{?([+-]?\d+)\}?)"
    r"(\\?%)?"
)
_DOTS = r"(?:\s*(?:\.\.\.|…|\\[lc]?dots(?![a-zA-Z])))"
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d*)\s*\.\s*(?P<once>\d*)\s*(?:"
    r"\\(?:overline|bar)\s*(?:\{\s*(?P<over>\d+)\s*\}|(?P<digit>\d)(?!\d))"
    r"|\\dot\s*(?:\{(?P<first>\d)\}|(?P<first_>\d))(?:(?P<between>\d*)\\dot\s*(?:\{(?P<last>\d)\}|(?P<last_>\d)))?"
    r"|\((?P<inside>\d+)\))(?!\d)" + _DOTS + "?"
)
_GOES_ON = re.compile(r"(?<![\d.])(\d*)\.(\d+)" + _DOTS)
_AGAIN = re.compile(r"(\d)\1\1$|(\d{2,}?)\2$")
_IN_BRACES = re.compile(r"(?<=[\d.])\{\s*(\\(?:overline|bar)\s*(?:\{\d+\}|\d)|\\dot\s*(?:\{\d\}|\d))\s*\}")
_OVERLINED = re.compile("(?:\\d[\u0304\u0305])+")
_DOT_ABOVE = re.compile("(\\d)\u0307")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number as it is written."""

    value: Fraction
    unit: Fraction
    """Of the last digit, of a decimal; 0: exact."""
    digits: int
    """Significant ones of a decimal."""
    is_percent: bool

    def without_sign(self) -> Number:
        """As a value: 50 % is 0.5."""
        if not self.is_percent:
            return self
        return Number(value=self.value / 100, unit=self.unit / 100, digits=self.digits, is_percent=False)

    def may_round(self, exact: Fraction) -> bool:
        """Whether this, as an answer of the data set, may be the rounding of `exact`."""
        is_integer = self.unit == Fraction(1, 10) and self.value.denominator == 1  # 142.0, as columns of floats have it
        return self.digits >= ROUNDED_DIGITS and not is_integer and _rounds(exact, self)

    def stands_for(self, exact: Fraction) -> bool:
        """Whether this, as a response, is as good as `exact`: its rounding, or its first digits."""
        return self.digits >= EXACT_DIGITS and (_rounds(exact, self) or _cuts_off(exact, self))


def number_of(text: str) -> Number | None:
    """A decimal, fraction, mixed number, power of ten or percentage; None for anything else."""
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", one_number(as_fractions(text)))
    text = re.sub(r"\s|\$", "", SPACES.sub("", text)).removesuffix(".")
    if len(text) > MAX_DIGITS:
        return None
    match = _FRACTION.search(text)
    return _decimal(text) if match is None else _mixed(text[: match.start()], match, text[match.end() :])


def same_number(gold: Number, found: Number) -> bool:
    """As values, and as they stand where one of them is a percentage: "50" and "0.5" are both right for "50 %"."""
    pairs = [(gold.without_sign(), found.without_sign())]
    if gold.is_percent or (found.is_percent and found.value.denominator == 1 == gold.value.denominator):
        pairs.append((gold, found))
    return any(a.value == b.value or a.may_round(b.value) or b.stands_for(a.value) for a, b in pairs)


def latex_numbers(text: str) -> str:
    """Without thousands separators; powers of ten, mixed numbers and repeating decimals in LaTeX."""
    return _MIXED.sub(r"\1\\frac{\2}{\3}", one_number(as_fractions(text)))


def one_number(text: str) -> str:
    """Without thousands separators, and with powers of ten in LaTeX."""
    return _SCIENTIFIC.sub(r"\1\\times 10^{\2}", without_separators(text))


def without_separators(text: str) -> str:
    """Without thousands separators; inside of brackets, a comma alone stands between two values."""
    text = _SEPARATORS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    return _COMMAS.sub(lambda at: at[0] if _is_inside(text[: at.start()]) else at[0].replace(",", ""), text)


def as_fractions(text: str) -> str:
    """Repeating decimals as fractions, wherever they stand in an expression."""
    text = _OVERLINED.sub(lambda match: f"\\overline{{{re.sub('[^0-9]', '', match[0])}}}", text)
    text = _IN_BRACES.sub(r"\1", _DOT_ABOVE.sub(r"\\dot{\1}", text))
    return _GOES_ON.sub(_goes_on, _REPEATING.sub(_repeating, text))


def _is_inside(before: str) -> bool:
    """Whether brackets are open behind a text; or closed that were not open, as in `]0,100[`."""
    return len(_OPENS.findall(before)) != len(_CLOSES.findall(before))


def _repeating(match: re.Match[str]) -> str:
    parts = ("over", "digit", "inside", "first", "first_", "between", "last", "last_")
    return _as_fraction(match["whole"], match["once"], "".join(match[part] or "" for part in parts))


def _goes_on(match: re.Match[str]) -> str:
    """`0.1666...`; what shows no repetition stays as it is."""
    again = _AGAIN.search(match[2]) if len(match[2]) <= MAX_DIGITS else None
    if again is None:
        return match[0]
    return _as_fraction(match[1], match[2][: again.start()], again[1] or again[2])


def _as_fraction(whole: str, once: str, again: str) -> str:
    if len(whole) + len(once) + len(again) > MAX_DIGITS:
        return f"{whole}.{once}{again}"
    value = int(whole or 0) + (int(once or 0) + Fraction(int(again), 10 ** len(again) - 1)) / 10 ** len(once)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _rounds(exact: Fraction, to: Number) -> bool:
    twice = 2 * abs(exact - to.value)
    if twice == to.unit:
        return abs(to.value) > abs(exact) or (to.unit > 0 and (to.value / to.unit) % 2 == 0)
    return twice < to.unit


def _cuts_off(exact: Fraction, to: Number) -> bool:
    return exact * to.value > 0 and 0 <= abs(exact) - abs(to.value) < to.unit


def _mixed(before: str, fraction: re.Match[str], after: str) -> Number | None:
    """`-1\\frac12`: sign and whole part, fraction, percent sign."""
    top, bottom = int(fraction[1] or fraction[2]), int(fraction[3] or fraction[4])
    whole = before.lstrip("+-")
    is_number = not whole or (whole.isdecimal() and top >= 0)
    if not is_number or len(before) - len(whole) > 1 or bottom == 0 or after not in ("", "%", "\\%"):
        return None
    value = int(whole or 0) + Fraction(top, bottom)
    return Number(value=-value if before.startswith("-") else value, unit=Fraction(0), digits=0, is_percent=after != "")


def _decimal(text: str) -> Number | None:
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    sign, decimal, exponent, top, bottom, power, percent = match.groups()
    if max(len(exponent or ""), len(power or "")) > len(str(MAX_EXPONENT)) + 1 or (bottom and not int(bottom)):
        return None
    if max(abs(int(exponent or 0)), abs(int(power or 0))) > MAX_EXPONENT:
        return None
    unit, digits = Fraction(0), 0
    if decimal is not None:
        scale = Fraction(10) ** int(exponent or 0)
        value, places = Fraction(decimal) * scale, len(decimal.partition(".")[2])
        if places or exponent:
            unit, digits = scale / Fraction(10) ** places, len(decimal.replace(".", "").lstrip("0"))
    else:
        value = Fraction(10) ** int(power) if power is not None else Fraction(int(top), int(bottom))
    return Number(value=-value if sign == "-" else value, unit=unit, digits=digits, is_percent=bool(percent))
