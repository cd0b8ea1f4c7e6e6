r"""Answers of mathematics as they are written: what can be decided without algebra, and one spelling for the rest.

    decided("50\\%", "0.5")                  True        numbers, percent, mixed numbers, powers of ten
    decided("5 \\text{ cm}", "5 \\text{ m}")   False       known units that differ
    decided("x^2-1", "(x-1)(x+1)")           None        a computer algebra system has to say
    spelled("4.5e33")                        "4.5\\times 10^{33}"

Pure functions of short texts. Decimals: the response may differ by half a unit of the last place of a gold answer of at
least three digits, since such an answer may be rounded; an exact gold answer is never rounded.

Does not cover: conversion of units, answers whose meaning the problem decides (docs/mathematics.md names them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\\(?:displaystyle|left|right|limits)(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|\\[,;! ])(?:\\!)?\d{3})+(?![\d,])")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?|\.\d+)\s?[eE]([+-]?\d+)(?![\dA-Za-z.])")
_MIXED = re.compile(r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_DECIMAL = re.compile(
    r"([+-]?)(?:(\d+\.?\d*|\.\d+)(?:(?:\\times|\\cdot|\*|×)10\^\{?([+-]?\d+)\}?)?|(\d+)/(\d+)|10\^\{?([+-]?\d+)\}?)"
    r"(\\?%)?"
)
_NAMES = (
    ("mm", "millimeter millimetre"), ("cm", "centimeter centimetre"), ("dm", "decimeter"), ("m", "meter metre"),
    ("km", "kilometer kilometre"), ("in", "inch inche"), ("ft", "foot feet"), ("yd", "yard"), ("mi", "mile"),
    ("s", "second sec"), ("min", "minute"), ("h", "hour hr"), ("day", "day"), ("year", "year yr"),
    ("g", "gram gm"), ("kg", "kilogram"), ("mg", "milligram"), ("lb", "pound"), ("oz", "ounce"),
    ("l", "liter litre"), ("ml", "milliliter"), ("dollar", "dollar usd"), ("cent", "cent"), ("euro", "euro eur"),
    ("degree", "degree deg"), ("rad", "radian"), ("mph", "mph"), ("J", "joule"), ("N", "newton"), ("W", "watt"),
    ("Hz", "hertz"), ("K", "kelvin"), ("V", "volt"), ("A", "ampere amp"), ("mol", "mole"), ("Pa", "pascal"),
    ("eV", "ev"), ("kJ", "kj"), ("nm", "nm"), ("erg", "erg"), ("T", "tesla"), ("C", "coulomb"),
)  # fmt: skip
_UNITS = {word: short for short, names in _NAMES for word in (short, *names.split())}
_UNIT_WORD = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_BARE_UNIT = re.compile(
    rf"(?<=[\d}})])(?P<gap>\s*)(?P<unit>(?:{_UNIT_WORD})s?(?:\^\{{?-?\d\}}?)?"
    rf"(?:\s*(?:/|\\cdot|\*|\s|per)\s*(?:{_UNIT_WORD})s?(?:\^\{{?-?\d\}}?)?)*)$"
)
_TEXT_UNIT = re.compile(r"(?<=[\d})])[\s~]*(?P<unit>(?:\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}\s*(?:\^\{?-?\d\}?)?"
                        r"\s*(?:/|\\cdot)?\s*)+)$")  # fmt: skip
_CURRENCY = {"\\$": "dollar", "€": "euro", "\\euro": "euro", "£": "gbp", "\\pounds": "gbp"}
_CHOICE = re.compile(r"\(?([A-J])\)?")
_LED_BY_CHOICE = re.compile(r"\(([A-J])\)[\s.:]*(.*)|([A-J])[).:]\s*(.*)", re.DOTALL)
_CHOICE_BEFORE = re.compile(
    r"\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\([A-J]\)\s*\}?(?:\\[ ,;:]|~|\s|\\q?quad)*(?=\S)"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .\-]*")
_NOTHING = frozenset({"nosolution", "nosolutions", "norealsolution", "norealsolutions", "none", "emptyset",
                      "\\emptyset", "\\varnothing", "\\{\\}", "theemptyset"})  # fmt: skip
_SIGNS = {"\\leq": "<=", "\\leqslant": "<=", "\\le": "<=", "≤": "<=", "\\lt": "<", "\\geq": ">=", "\\geqslant": ">=",
          "\\ge": ">=", "≥": ">=", "\\gt": ">"}  # fmt: skip
_BETWEEN = re.compile(r"([^<>=]+)(<=?)([a-zA-Z])(<=?)([^<>=]+)")
_ONE_SIDED = re.compile(r"([a-zA-Z])([<>]=?)([^<>=]+)|([^<>=]+)([<>]=?)([a-zA-Z])")
_FRENCH = re.compile(r"([\[\]])([^\[\],]+,[^\[\],]+)([\[\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number as it is written."""

    value: Fraction
    unit: Fraction
    """Of the last digit, of a decimal; 0: exact."""
    digits: int
    """Significant ones of a decimal."""
    is_percent: bool


def decided(gold: str, found: str) -> bool | None:
    """Whether two answers are the same, where their texts say it; None where only algebra can."""
    gold, found = gold.strip(), found.strip()
    if "".join(gold.split()) == "".join(found.split()):
        return True
    if (by_words := _by_words(gold, found)) is not None:
        return by_words
    found = _without_choice(found)
    (gold_unit, gold), (unit, found) = _unit_of(gold), _unit_of(found)
    if gold_unit and unit and gold_unit != unit:
        return False
    ours, theirs = number_of(gold), number_of(found)
    if ours is not None and theirs is not None:
        return _same(ours, theirs)
    brackets = {_brackets(gold), _brackets(found)}
    return False if "set" in brackets and brackets & {"open", "closed"} else None


def rounding_of(gold: str) -> tuple[Fraction, Fraction] | None:
    """(value, half a unit of its last place) of a gold answer that may be rounded; None for any other."""
    number = number_of(_unit_of(gold.strip())[1])
    return None if number is None or not _rounding(number) else (number.value, _rounding(number))


def spelled(answer: str, other: str) -> str:
    r"""`answer` as the verifier reads it: without unit, in LaTeX; as an interval or in radians where `other` is.

    spelled("1 \\le x < 2", "[1,2)") == "[1,2)"        spelled("90^\\circ", "\\frac{\\pi}{2}") == "90\\frac{\\pi}{180}"
    """
    text = _unit_of(_without_choice(answer.strip()))[1]
    text = re.sub(r"\\text\s*\{\s*infinity\s*\}|(?<![\\a-zA-Z])infinity|∞", r"\\infty", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _one_number(text))
    if "\\pi" in other and "\\pi" not in text:
        text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\frac{\\pi}{180}", text)
    interval = _as_interval(text) if _brackets(other) in ("open", "closed", "mixed") or "\\cup" in other else None
    return interval or text


def number_of(text: str) -> Number | None:
    """A decimal, fraction, mixed number, power of ten or percentage; None for anything else."""
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _one_number(text))
    text = re.sub(r"\s|\$", "", _SPACES.sub("", text)).removesuffix(".")
    if len(text) > MAX_DIGITS:
        return None
    match = _FRACTION.search(text)
    return _decimal(text) if match is None else _mixed(text[: match.start()], match, text[match.end() :])


def _one_number(text: str) -> str:
    """Without thousands separators, and with powers of ten in LaTeX."""
    return _SCIENTIFIC.sub(r"\1\\times 10^{\2}", _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text))


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
    if max(abs(int(exponent or 0)), abs(int(power or 0))) > MAX_EXPONENT or (bottom and not int(bottom)):
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


def _rounding(gold: Number) -> Fraction:
    """By how much a response may differ from the answer of the data set."""
    return gold.unit / 2 if gold.digits >= ROUNDED_DIGITS else Fraction(0)


def _same(gold: Number, found: Number) -> bool:
    """As values, and as they stand where one of them is a percentage: "50" and "0.5" are both right for "50 %"."""
    pairs = [(_value(gold), _value(found))]
    if gold.is_percent or (found.is_percent and found.value.denominator == 1 == gold.value.denominator):
        pairs.append((gold.value, found.value))
    slack = max(_rounding(gold), found.unit if found.digits >= EXACT_DIGITS else Fraction(0))
    return any(abs(a - b) <= slack for a, b in pairs)


def _value(number: Number) -> Fraction:
    return number.value / 100 if number.is_percent else number.value


def _by_words(gold: str, found: str) -> bool | None:
    """Letters of a choice, words, and that there is no solution."""
    ours, theirs = _plain(gold), _plain(found)
    squeezed, other = (re.sub(r"[\s.]", "", text) for text in (ours.casefold(), theirs.casefold()))
    if squeezed in _NOTHING and other in _NOTHING:
        return True
    choice = _CHOICE.fullmatch(ours)
    if choice is not None:
        led = _CHOICE.fullmatch(theirs) or _LED_BY_CHOICE.fullmatch(theirs)
        return None if led is None else choice[1] in led.groups()
    is_text = gold != ours or any(len(word) > 3 for word in re.findall("[A-Za-z]+", ours))
    if not is_text or not _WORDS.fullmatch(ours) or "\\" in ours:
        return None
    if _WORDS.fullmatch(theirs):
        return squeezed == other
    return None


def _plain(text: str) -> str:
    """Without wrappers such as \\text, dollar signs, quotation marks and a full stop at the end."""
    text = _SPACES.sub(" ", text)
    while (inner := _WRAPPER.sub(lambda match: match[1], text)) != text:
        text = inner
    return text.replace("$", "").strip(" \"'`").removesuffix(".").strip()


def _without_choice(text: str) -> str:
    """`\\textbf{(B)}\\ 12` -> `12`: the value behind the letter of a choice."""
    led = _CHOICE_BEFORE.match(text)
    return text if led is None or "," in text[: led.end()] else text[led.end() :]


def _unit_of(text: str) -> tuple[str, str]:
    """(known unit in one spelling or "", the text without it)."""
    text = re.sub(r"^\$(.*)\$$", r"\1", text.replace("°", "^\\circ").strip()).strip().removesuffix(".").strip()
    for sign, unit in _CURRENCY.items():
        if text.startswith(sign) or text.endswith(sign):
            return unit, text.removeprefix(sign).removesuffix(sign).strip()
    match = _TEXT_UNIT.search(text)
    if match is None:
        match = _BARE_UNIT.search(text)
        # "5m" is 5 times m as well; "5 m" and "5cm" are not.
        if match is not None and len(match["unit"]) == 1 and not match["gap"]:
            match = None
    if match is None:
        return ("degree", text) if re.search(r"\^\s*\{?\\circ\}?$", text) else ("", text)
    return _unit(match["unit"]), _SPACES.sub(" ", text[: match.start()]).strip()


def _unit(written: str) -> str:
    """`\\text{ square centimeters}` -> "cm^2"; "" for what is not a known unit."""
    text = _plain(written.replace("\\cdot", "*")).replace("{", "").replace("}", "").replace(" per ", "/")
    text = re.sub(r"\s*([/*])\s*", r"\1", text)
    text = re.sub(r"(?:square|sq\.?)\s+([A-Za-z]+)", r"\1^2", text)
    text = re.sub(r"cubic\s+([A-Za-z]+)", r"\1^3", text)
    parts = [_known(part) for part in re.findall(r"[A-Za-z]+|\^-?\d|[/*\s]", text)]
    return "" if None in parts else "".join(str(part) for part in parts).replace("mi/h", "mph")


def _known(part: str) -> str | None:
    """A word of a unit in its one spelling, a sign as it is; None for any other word."""
    if not part.isalpha():
        return part.strip() or "*"
    small = part.casefold()
    return _UNITS.get(part) or _UNITS.get(small) or _UNITS.get(small.removesuffix("s"))


def _brackets(text: str) -> str:
    text = _SPACES.sub("", text).strip()
    if re.fullmatch(r"\\\{.*\\\}", text, re.DOTALL):
        return "set"
    pair = text[:1] + text[-1:]
    return {"()": "open", "[]": "closed", "[)": "mixed", "(]": "mixed", "][": "open"}.get(pair, "")


def _as_interval(text: str) -> str | None:
    """Inequalities of one variable as intervals; None for anything else."""
    text = _SPACES.sub("", text)
    for sign, plain in _SIGNS.items():
        text = re.sub(rf"{re.escape(sign)}(?![a-zA-Z])", plain, text)
    text = re.sub(r"\s", "", re.sub(r"^\s*[a-zA-Z]\s*\\in\s*", "", text))
    parts = list(_intervals(re.split(r"\\text\{or\}|or|\\lor|,(?=[a-z][<>])|\\cup", text)))
    return None if None in parts else "\\cup ".join(str(part) for part in parts)


def _intervals(parts: list[str]) -> Iterator[str | None]:
    for part in parts:
        if (match := _BETWEEN.fullmatch(part)) is not None:
            low, first, _, second, high = match.groups()
            yield f"{'[' if first == '<=' else '('}{low},{high}{']' if second == '<=' else ')'}"
        elif (match := _ONE_SIDED.fullmatch(part)) is not None:
            sign, bound = (match[2], match[3]) if match[1] else (match[5].translate(_TURNED), match[4])
            closed = sign.endswith("=")
            low = f"{'[' if closed else '('}{bound},\\infty)"
            yield low if sign.startswith(">") else f"(-\\infty,{bound}{']' if closed else ')'}"
        elif (match := _FRENCH.fullmatch(part)) is not None:
            yield f"{'[' if match[1] == '[' else '('}{match[2]}{']' if match[3] == ']' else ')'}"
        elif _brackets(part):
            yield part
        else:
            yield None


_TURNED = str.maketrans("<>", "><")
