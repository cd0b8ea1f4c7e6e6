r"""Answers of mathematics as they are written: what can be decided without algebra, and one spelling for the rest.

    decided("50\\%", "0.5")                  True        numbers, percent, mixed numbers, powers of ten
    decided("5 \\text{ cm}", "5 \\text{ m}")   False       known units that differ
    decided("5 \\text{ million}", "5000000")  True        a power of ten in words
    decided("x^2-1", "(x-1)(x+1)")           None        a computer algebra system has to say
    spelled("4.5e33")                        "4.5\\times 10^{33}"

Pure functions of short texts. Numbers are `math_numbers`; letters of a choice, and two
answers in one, `math_choices`.

Does not cover: conversion of units, answers whose meaning the problem decides (docs/mathematics.md names them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bapo.tasks.math_choices import choice_of, named_choice, names_another
from bapo.tasks.math_numbers import (
    SPACES,
    as_fractions,
    latex_numbers,
    number_of,
    same_number,
    without_separators,
)

_FONT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname|unit|si)\s*"
_WRAPPER = re.compile(_FONT + r"\{([^{}]*)\}")
_COMMAND = re.compile(rf"{_FONT}\{{[^{{}}]*\}}|\\[A-Za-z]+")
_OLD_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf)\s+([^{}]*)\}")
# Possessive: what could be split in several ways would take exponential time on a response that does not match.
_GAP = (
    r"(?:\s|~|\{\}|\\[,;:! ]|\{\\[,;:! ]\}|\\q?quad(?![a-zA-Z])|\\hs(?:pace|kip)\*?\{[^{}]*\}"
    r"|\\(?:thin|med|thick|en)space(?![a-zA-Z]))*+"
)
_NAMES = (
    ("mm", "millimeter millimetre"), ("cm", "centimeter centimetre"), ("dm", "decimeter"), ("m", "meter metre"),
    ("km", "kilometer kilometre"), ("in", "inch inche"), ("ft", "foot feet"), ("yd", "yard"), ("mi", "mile"),
    ("nm", "nanometer nanometre"), ("nauticalmile", ""), ("lightyear", ""),
    ("s", "second sec"), ("min", "minute"), ("h", "hour hr"), ("day", "day"), ("week", ""), ("month", ""),
    ("year", "year yr"), ("decade", ""), ("century", "centurie"),
    ("g", "gram gm"), ("kg", "kilogram kilo"), ("mg", "milligram"), ("lb", "pound"), ("oz", "ounce"), ("ton", ""),
    ("tonne", ""), ("l", "liter litre"), ("ml", "milliliter millilitre"), ("gallon", ""), ("acre", ""),
    ("hectare", ""), ("bit", ""), ("byte", ""), ("kilobyte", ""), ("megabyte", ""), ("gigabyte", ""), ("terabyte", ""),
    ("dollar", "dollar usd buck"), ("cent", "cent"), ("euro", "euro eur"), ("yen", "jpy"), ("yuan", "rmb"),
    ("rupee", ""), ("percent", ""), ("permille", ""), ("celsius", ""), ("fahrenheit", ""),
    ("degree", "degree deg"), ("rad", "radian"), ("mph", "mph"), ("J", "joule"), ("N", "newton"), ("W", "watt"),
    ("Hz", "hertz"), ("K", "kelvin"), ("V", "volt"), ("A", "ampere amp"), ("mol", "mole"), ("Pa", "pascal"),
    ("eV", "ev"), ("kJ", "kj"), ("erg", "erg"), ("T", "tesla"), ("C", "coulomb"),
)  # fmt: skip
_UNITS = {word: short for short, names in _NAMES for word in (short, *names.split())}
_IN_TEXT = {"pm": "picometer", "picometre": "picometer", "picometer": "picometer", "ha": "hectare", "ly": "lightyear",
            "nmi": "nauticalmile", "t": "tonne", "wk": "week", "gal": "gallon", "kB": "kilobyte",
            "KB": "kilobyte", "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte"}  # fmt: skip
"""Units in a text only: elsewhere `5pm` is a product."""
_DEGREES = ({"degree^1", "celsius^1"}, {"degree^1", "fahrenheit^1"})
_NOUN = re.compile(_FONT + r"\{\s*+([A-Za-z]{2,})\s*+\}$")
_NO_NOUNS = frozenset((
    "unit", "units", "total", "each", "exactly", "approximately", "about", "altogether", "long", "tall", "wide", "high",
    "deep", "away", "apart", "more", "less", "cc",
))  # fmt: skip
_COMPOUND = re.compile(r"\b(nautical|light|per)[\s-]+(?=mile|year|mille|cent\b)", re.IGNORECASE)
_TEMPERATURE = re.compile(
    r"(?<=[\d}])\s*(?:\\text\s*\{\s*\})?\s*\^\s*\{?\s*\\circ\s*\}?(?:\s|\\[ ,;:])*+(?:\\[a-z]+\s*\{\s*)?([CF])\s*\}?$"
)
_POWERS = {"dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}",
           "trillion": "10^{12}"}  # fmt: skip
_MULTIPLIER = re.compile(
    rf"(?<=[\d}}]){_GAP}(?P<font>{_FONT}\{{\s*+)?(?P<word>{'|'.join(_POWERS)})s?(?![a-z])(?(font)(?P<end>\s*+\}})?)",
    re.IGNORECASE,
)
_LETTERS_AT_END = re.compile(r"(?<![A-Za-z\\])(?!(?<=\d )[ap]m$|(?<=\d)th$)[A-Za-z]{1,2}$")
_TWO_VALUES = re.compile(r"\d,\s*\d{3}(?!\d)")
_UNIT_WORD = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_UNIT_POWER = rf"(?:{_UNIT_WORD})s?(?:\^\{{?-?\d\}}?)?"
_BARE_UNIT = re.compile(
    rf"(?:(?<=[\d}})])|(?<=\\pi))(?P<gap>{_GAP})(?P<unit>{_UNIT_POWER}"
    rf"(?:(?:\s*+(?:/|\\cdot(?![a-z])|\*|per\b)|(?=\s)){_GAP}{_UNIT_POWER})*){_GAP}$"
)
_TEXT_UNIT = re.compile(
    rf"(?<=[\w}})])(?P<gap>{_GAP})(?P<unit>(?:{_FONT}\{{[^{{}}]*\}}{_GAP}(?:\^\{{?-?\d\}}?)?+"
    rf"{_GAP}(?:/|\\cdot(?![a-z]))?+{_GAP})+)$"
)
_MEASURE = re.compile(rf"(?<![\d.])(\d++(?:\.\d++)?)\s*+({_UNIT_WORD})s?(?![A-Za-z])(?:\s*(?:,|and)?\s*)")
# "Pounds" are of money or of mass.
_CURRENCY = {"\\$": "dollar", "€": "euro", "\\euro": "euro", "£": "lb", "\\pounds": "lb", "¥": "yen", "₹": "rupee",
             "‰": "permille"}  # fmt: skip
_CHOICE_BEFORE = re.compile(
    r"\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\([A-J]\)\s*\}?(?:\\[ ,;:]|~|\s|\\q?quad)*(?=\S)"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9' .,\-]*")
_FUNCTIONS = (
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp",
    "sqrt", "pi",
)  # fmt: skip
_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({'|'.join(name for name in _FUNCTIONS if name != 'sqrt')})(?![A-Za-z])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_RATIO = re.compile(r"(\d+)\s*(?:\\text\s*\{\s*to\s*\}|(?<=\s)to(?=\s))\s*(\d+)")
_NOTHING = frozenset({"nosolution", "nosolutions", "norealsolution", "norealsolutions", "none", "emptyset",
                      "\\emptyset", "\\varnothing", "\\{\\}", "theemptyset"})  # fmt: skip
_SIGNS = {"\\leq": "<=", "\\leqslant": "<=", "\\le": "<=", "≤": "<=", "\\lt": "<", "\\geq": ">=", "\\geqslant": ">=",
          "\\ge": ">=", "≥": ">=", "\\gt": ">", "\\neq": "!=", "\\ne": "!=", "≠": "!="}  # fmt: skip
_BETWEEN = re.compile(r"([^<>=]+)(<=?)([a-zA-Z])(<=?)([^<>=]+)")
_ONE_SIDED = re.compile(r"([a-zA-Z])([<>]=?)([^<>=]+)|([^<>=]+)([<>]=?)([a-zA-Z])")
_EXCEPT = re.compile(r"[a-zA-Z]!=([^<>=!,]+)|\\mathbb\{?R\}?(?:\\setminus|\\backslash|-)\\\{([^<>=!,]+)\\\}")
_OPEN_INFINITY = re.compile(r"\(\s*-\s*\\infty|\\infty\s*(?:\\right)?\s*\)")
_CLOSED_INFINITY = re.compile(r"\[\s*-\s*(?:\\infty|∞)|(?:\\infty|∞)\s*\]")
_FRENCH = re.compile(r"([\[\]])([^\[\],]+,[^\[\],]+)([\[\]])")


def decided(gold: str, found: str) -> bool | None:
    """Whether two answers are the same, where their texts say it; None where only algebra can."""
    gold, found = gold.strip(), found.strip()
    if _closed_up(gold) == _closed_up(found):
        return True
    if (by_words := _by_words(gold, found)) is not None:
        return by_words
    if (behind := (_without_choice(gold), _without_choice(found))) != (gold, found):
        return decided(*behind)
    gold, found = _in_digits(gold), _in_digits(found)
    if (by_measures := _by_measures(gold, found)) is not None:
        return by_measures
    if names_another(without_separators(gold), without_separators(found)) or _equates(found):
        return False
    if _OPEN_INFINITY.search(gold) and _CLOSED_INFINITY.search(SPACES.sub("", found)):
        return False
    return _by_numbers(gold, found)


def _by_numbers(gold: str, found: str) -> bool | None:
    """Units that differ, numbers, and a set other than an interval."""
    as_written = gold, found
    (gold_unit, gold), (unit, found) = _units_of(gold, found)
    gold_unit, unit = _or_percent(gold_unit, gold), _or_percent(unit, found)
    if gold_unit and unit:
        if gold_unit != unit and {gold_unit, unit} not in _DEGREES:
            return False
    elif _is_other(as_written[0], unit) or _is_other(as_written[1], gold_unit):
        return False
    ours, theirs = number_of(gold), number_of(found)
    if ours is not None and theirs is not None:
        return same_number(ours, theirs)
    brackets = {_brackets(gold), _brackets(found)}
    return False if "set" in brackets and brackets & {"open", "closed"} else None


def _or_percent(unit: str, text: str) -> str:
    return unit or ("percent^1" if text.endswith("%") else "")


def _is_other(answer: str, unit: str) -> bool:
    """Whether an answer ends with one noun, as "apples", which is not the name of a known unit."""
    noun = _NOUN.search(answer) if unit else None
    return noun is not None and noun[1].casefold() not in _NO_NOUNS and _known(noun[1]) is None


def bare(answer: str, other: str) -> str:
    """An answer without the letter of a choice and without its unit."""
    return _unit_of(_in_digits(_without_choice(answer.strip())), other)[1]


def spelled(answer: str, other: str) -> str:
    r"""`answer` as the verifier reads it: without unit, in LaTeX; as an interval or in radians where `other` is.

    spelled("1 \\le x < 2", "[1,2)") == "[1,2)"        spelled("90^\\circ", "\\frac{\\pi}{2}") == "90\\frac{\\pi}{180}"
    """
    text = bare(answer, other)
    if _brackets(other) and _TWO_VALUES.search(other):
        text = re.sub(r"(?<=\d),(?=\d)", ", ", text)  # no separator: "1,234" next to "(1,234)"
    text = re.sub(r"\\text\s*\{\s*infinity\s*\}|(?<![\\a-zA-Z])infinity|∞", r"\\infty", text)
    text = _RATIO.sub(r"\1:\2", latex_numbers(text))
    text = _ROOT.sub(r"\\sqrt{\1}", _FUNCTION.sub(r"\\\1 ", text))
    if "\\pi" in other and "\\pi" not in text:
        text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\frac{\\pi}{180}", text)
    interval = _as_interval(text) if _brackets(other) in ("open", "closed", "mixed") or "\\cup" in other else None
    # The verifier takes letters at the end for units, as the h of `\pi r^2 h` and the ab of `2ab`; not before a space.
    return interval or (f"{text}\\," if _ends_with_variables(text, other) else text)


def _ends_with_variables(text: str, other: str) -> bool:
    """Whether the last letters are a factor; the unit of `5m` next to `5` may be glued to its number."""
    return _LETTERS_AT_END.search(text) is not None and not _unit_of(text, other, glued=True)[0]


def _equates(found: str) -> bool:
    """Whether an answer writes two different numbers with an equals sign between them: `5=6`."""
    parts = re.split(r"=|\\equiv(?![a-z])|≡", found)
    sides = [(unit, number_of(text)) for unit, text in map(_unit_of, parts)] if len(parts) > 1 else []
    values = {(unit, number.without_sign().value) for unit, number in sides if number is not None}
    return len({value for _, value in values}) > 1 and len({unit for unit, _ in values}) == 1


def _units_of(gold: str, found: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """As `_unit_of`; "5m" is five meters next to an answer that has a unit, and may be five times m otherwise."""
    ours, theirs = _unit_of(gold, found), _unit_of(found, gold)
    return (ours if ours[0] or not theirs[0] else _unit_of(gold, found, glued=True)), (
        theirs if theirs[0] or not ours[0] else _unit_of(found, gold, glued=True)
    )


def _closed_up(text: str) -> str:
    """Without spaces, except those between digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _by_words(gold: str, found: str) -> bool | None:
    """Letters of a choice, words, and that there is no solution."""
    ours, theirs = _plain(gold), _plain(found)
    squeezed, other = (re.sub(r"(?<!\d)[\s.]|[\s.](?!\d)", "", text.casefold()) for text in (ours, theirs))
    if squeezed in _NOTHING and other in _NOTHING:
        return True
    choice = choice_of(ours)
    if choice is not None and not choice[1]:
        return named_choice(choice[0], theirs)
    if choice is not None:
        # A letter alone is right; with another text behind it, or without a letter, the text decides.
        named = choice_of(theirs)
        return (
            None
            if named is None
            else named_choice(choice[0], theirs)
            if not named[1] or not named_choice(choice[0], theirs)
            else None
        )
    words = [word for word in re.findall("[A-Za-z]+", ours) if word not in _FUNCTIONS]
    is_text = bool(words) and (gold != ours or any(len(word) > 3 for word in words))
    if not is_text or not _WORDS.fullmatch(ours) or "\\" in ours:
        return None
    if re.search(r"\d", ours) and not any(len(word) > 2 for word in words):
        return None
    return squeezed == other if _WORDS.fullmatch(theirs) else None


def _plain(text: str) -> str:
    """Without wrappers such as \\text, dollar signs, quotation marks and a full stop at the end."""
    text = SPACES.sub(" ", text)
    while (inner := _WRAPPER.sub(lambda match: match[1], text)) != text:
        text = inner
    return text.replace("$", "").strip(" \"'`").removesuffix(".").strip()


def _without_choice(text: str) -> str:
    """`\\textbf{(B)}\\ 12` or `B. 12` -> `12`: the value behind the letter of a choice."""
    led = _CHOICE_BEFORE.match(text)
    if led is not None and "," not in text[: led.end()]:
        return text[led.end() :]
    choice = choice_of(_plain(text)) if re.match(r"[A-J][.:)]", text) else None
    return text[2:].strip() if choice is not None and choice[1] else text


def _by_measures(gold: str, found: str) -> bool | None:
    """`2 hours 30 minutes` and `2 hours and 30 minutes`; None unless both are sums of several measures."""
    ours, theirs = _measures(gold), _measures(found)
    if not ours or not theirs or max(len(ours), len(theirs)) < 2:
        return None
    return ours == theirs


def _measures(text: str) -> list[tuple[str, str]]:
    """Numbers and units of an answer that consists of nothing else; else []."""
    plain = _plain(text)
    found = [(match[1], str(_known(match[2]))) for match in _MEASURE.finditer(plain)]
    return found if not _MEASURE.sub("", plain).strip() else []


def _unit_of(text: str, other: str = "", *, glued: bool = False) -> tuple[str, str]:
    """(known unit in one spelling or "", the text without it)."""
    text = re.sub(r"^\$(.*)\$$", r"\1", text.replace("°", "^\\circ").strip()).strip().removesuffix(".").strip()
    text = _OLD_FONT.sub(r"\\mathrm{\1}", text)
    text = _unwrapped(text)
    if (match := _TEMPERATURE.search(text)) is not None:
        return f"{'celsius' if match[1] == 'C' else 'fahrenheit'}^1", text[: match.start()].strip()
    for sign, unit in _CURRENCY.items():
        if text.startswith(sign) or text.endswith(sign):
            return f"{unit}^1", text.removeprefix(sign).removesuffix(sign).strip()
    match = _TEXT_UNIT.search(text)
    if match is None:
        match = _BARE_UNIT.search(text)
        # "5m" is 5 times m as well; "5 m" and "5cm" are not.
        is_glued = match is not None and len(match["unit"]) == 1 and not match["gap"]
        if match is not None and ((is_glued and not glued) or _is_product(text[: match.start()], match["unit"], other)):
            match = None
    if match is None:
        return ("degree^1", text) if re.search(r"\^\s*\{?\\circ\}?$", text) else ("", text)
    return _unit(match["unit"]), SPACES.sub(" ", text[: match.start()]).strip()


def _is_product(rest: str, unit: str, other: str) -> bool:
    """Whether what looks like a unit may be variables: single letters behind more than a number, as in `\\pi r^2 h`, or
    letters that the other answer has elsewhere."""
    words = re.findall("[A-Za-z]+", unit)
    if all(len(word) == 1 for word in words) and number_of(_last_side(rest)) is None:
        return True
    elsewhere = _COMMAND.sub(" ", _last_side(_unit_of(other, glued=True)[1])) if other else ""
    return any(word in elsewhere for word in words)


def _last_side(text: str) -> str:
    return re.split(r"[=<>≈]|\\(?:approx|[lg]eq?)(?![a-z])", text)[-1]


def _in_digits(text: str) -> str:
    """Repeating decimals as fractions, and `5 \\text{ million}` as a power of ten."""
    return _MULTIPLIER.sub(_multiplied, as_fractions(_unwrapped(text)))


def _multiplied(match: re.Match[str]) -> str:
    """Other words of its text stay: `5 \\text{ million dollars}`."""
    text = match["font"] if match["font"] and match["end"] is None else ""
    return f"\\times {_POWERS[match['word'].casefold()]}{text}"


def _unwrapped(text: str) -> str:
    """`\\text{12 cm}` -> `12 cm`."""
    whole = _WRAPPER.fullmatch(text)
    return whole[1].strip() if whole is not None and re.match(r"\s*[\d.+-]", whole[1]) else text


def _unit(written: str) -> str:
    """`\\text{ square centimeters}` -> "cm^2", "m s^{-1}" -> "m^1 s^-1"; "" for what is not a known unit."""
    text = _plain(written.replace("\\cdot", "*")).replace("{", "").replace("}", "")
    text = _COMPOUND.sub(r"\1", re.sub(r"\bmetric\s+tons?\b", "tonne", text)).replace(" per ", "/")
    text = re.sub(r"\bdeg(?:ree)?s?\s+(?=celsius|fahrenheit)", "", text, flags=re.IGNORECASE)
    text = re.sub(r"\s*([/*])\s*", r"\1", text)
    text = re.sub(r"(?:square|sq\.?)\s+([A-Za-z]+)", r"\1^2", text)
    text = re.sub(r"cubic\s+([A-Za-z]+)", r"\1^3", text).replace("mph", "mi/h")
    powers: dict[str, int] = {}
    side = 1
    for sign, word, power in re.findall(r"([/*\s]*)([A-Za-z]+)(?:\^(-?\d))?", text):
        side = -1 if "/" in sign else side
        if (unit := _known(word)) is None:
            return ""
        powers[unit] = powers.get(unit, 0) + side * int(power or 1)
    return " ".join(f"{unit}^{power}" for unit, power in sorted(powers.items()))


def _known(word: str) -> str | None:
    """A word of a unit in its one spelling; None for any other word."""
    small = word.casefold()
    return _UNITS.get(word) or _IN_TEXT.get(word) or _UNITS.get(small) or _UNITS.get(small.removesuffix("s"))


def _brackets(text: str) -> str:
    text = SPACES.sub("", text).strip()
    if re.fullmatch(r"\\\{.*\\\}", text, re.DOTALL):
        return "set"
    pair = text[:1] + text[-1:]
    return {"()": "open", "[]": "closed", "[)": "mixed", "(]": "mixed", "][": "open"}.get(pair, "")


def _as_interval(text: str) -> str | None:
    """Inequalities of one variable as intervals; None for anything else."""
    text = SPACES.sub("", text)
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
        elif (match := _EXCEPT.fullmatch(part)) is not None:
            yield "(-\\infty,{0})\\cup ({0},\\infty)".format(match[1] or match[2])
        elif (match := _FRENCH.fullmatch(part)) is not None:
            yield f"{'[' if match[1] == '[' else '('}{match[2]}{']' if match[3] == ']' else ')'}"
        elif _brackets(part):
            yield part
        else:
            yield None


_TURNED = str.maketrans("<>", "><")
