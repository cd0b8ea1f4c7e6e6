r"""Answers that name more than one answer, and letters of a choice: what a policy would write to be right either way.

    named_choice("B", "(B) 12")        True        a letter, alone or before its value
    named_choice("B", "(A) B")         False       as are "B or C", "A. B", "(B) or (C)"
    names_another("5", "5 \\text{ is wrong, it is 6}")   True: a second answer, which the gold answer does not have
    names_another("5 \\text{ am}", "5 \\text{ pm}")      True: the opposite

A letter whose text names another letter is wrong even where the text of the choice has it ("(B) angle C").
"""

from __future__ import annotations

import re

_CHOICE = re.compile(r"\(?([A-J])[).]?|\(([a-j])\)")
_LED = re.compile(r"(?:\(([A-J])\)[\s.:]*|([A-J])(?:[):]\s*|\.\s+|\.(?=\d)))(\S.*)", re.DOTALL)
_SAID = re.compile(r"(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s*(?:is)?\s*:?\s*(?=\(?[A-J]\b)", re.IGNORECASE)
_GOES_ON = re.compile(
    r"\s*(?:(?:or|and|nor|but|vs|is|isn't|isnt|are|was|maybe|perhaps|not\s+(?:correct|right|true|the))\b"
    r"|not\W*$|[/,;?&|+=-]|\\(?:lor|vee|land|wedge|neq?|to|mid|approx)\b)",
    re.IGNORECASE,
)
_OTHER_LETTER = re.compile(
    r"\(\s*([A-Ja-j])\s*\)|(?<![A-Za-z\\'])([A-J])(?![A-Za-z'])|\b(?:or|and|nor)\s+([a-j])(?=\W*$)|[/,]\s*([a-j])(?=\W*$)"
)
_DOUBT = re.compile(r"\b(?:alternatively|unsure|or\s+(?:maybe|perhaps|possibly))\b", re.IGNORECASE)
_ARTICLE = re.compile(r"\s+(?!(?:or|and|nor|is|but|vs)\b)[a-z]")

_SECOND = frozenset((
    "not", "isn", "isnt", "wrong", "incorrect", "wait", "maybe", "perhaps", "possibly", "probably", "but", "instead",
    "rather", "otherwise", "except", "unless", "actually", "never", "either", "neither", "nor", "could", "might",
    "alternatively", "versus", "vs", "no", "else",
))  # fmt: skip
_JOINS = frozenset(("or", "and"))
_NUMBERS = frozenset((
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty",
    "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "hundreds", "thousand", "thousands", "million",
    "millions", "billion", "billions", "trillion", "dozen", "dozens", "half", "halves", "third", "thirds", "fourth",
    "fourths", "quarter", "quarters", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths", "eighth",
    "eighths", "ninth", "ninths", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "twice",
    "double", "triple",
))  # fmt: skip
_OPPOSITES = (
    ("am", "pm"), ("bc", "ad"), ("bce", "ce"), ("increase", "decrease"), ("increased", "decreased"), ("gain", "loss"),
    ("profit", "loss"), ("more", "less"), ("left", "right"), ("east", "west"), ("north", "south"), ("up", "down"),
    ("above", "below"), ("before", "after"), ("clockwise", "counterclockwise"),
)  # fmt: skip
_SPOKEN = re.compile(r"[\w\s.:']*")
_DOTTED = re.compile(r"(?<![A-Za-z])([A-Za-z])\.\s?([A-Za-z])(?![A-Za-z])")
_SEVERAL = re.compile(
    r"[,;<>≤≥≠∪±]|\\(?:cup|pm|mp|in|leq?|geq?|lt|gt|neq?|lor|vee|leqslant|geqslant)(?![a-z])|\\\{|\b(?:or|and)\b"
)
_SIGNS = re.compile(r"\\(?:lor|vee|neq?|to|rightarrow|mid|land|wedge|neg|approx|sim)(?![a-z])|[|;?≠∨→]|\\\\|!=|=.*=")
_NO_SIGNS = re.compile(r"(?<!\\)\\[,;:! ]|\{,\}")
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")
_NUMBER_IN_TEXT = re.compile(r"(?<![A-Za-z^_{\d.])\d|\b[IVX]{2,}\b")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# Possessive, and the first part without the letters of the second: else cubic in the length of a foreign text.
_FOREIGN = re.compile(r"\d[^\dA-Za-z\\\u0400-\u2000\u2E80-\uFFFF]*+[\u0400-\u2000\u2E80-\uFFFF][^\dA-Za-z\\]*+\d")


def choice_of(plain: str) -> tuple[str, str] | None:
    """(letter, text after it or "") of an answer without LaTeX wrappers; None if it is not a choice."""
    plain = _SAID.sub("", plain, count=1) if _SAID.match(plain) else plain
    if (match := _CHOICE.fullmatch(plain)) is not None:
        return (match[1] or match[2].upper()), ""
    match = _LED.fullmatch(plain)
    return None if match is None else (match[1] or match[2], match[3].strip())


def named_choice(letter: str, plain: str) -> bool:
    """Whether an answer names this letter and no other."""
    found = choice_of(plain)
    if found is None or found[0] != letter:
        return False
    return not found[1] or not (
        _GOES_ON.match(found[1]) or _DOUBT.search(found[1]) or _names_other_letter(letter, found[1])
    )


def names_another(gold: str, found: str) -> bool:
    """Whether `found` has words or signs of a second answer, of a doubt or of another number that `gold` has not.

    Both are without thousands separators: a comma stands between two answers.
    """
    gold, found = _NO_SIGNS.sub(" ", gold), _NO_SIGNS.sub(" ", found)
    ours, theirs = _words(gold), _words(found)
    new = theirs - ours
    if new & _SECOND or new & _NUMBERS or _says_opposite(gold, found):
        return True
    if _SEVERAL.search(gold):
        return False
    if new & _JOINS or (_SIGNS.search(found) and not _SIGNS.search(gold)) or _FOREIGN.search(found):
        return True
    said = [text for text in _TEXT.findall(found) if _NUMBER_IN_TEXT.search(text)]
    return bool(said) and bool(re.search(r"\d", _TEXT.sub("", found))) and not _TEXT.search(gold)


def _says_opposite(gold: str, found: str) -> bool:
    """Whether `found` has the opposite of a word of `gold`, in a text or in an answer without formulas: bc is a product
    elsewhere."""
    ours, theirs = (
        _words(_DOTTED.sub(r"\1\2", text if _SPOKEN.fullmatch(text) else " ".join(_TEXT.findall(text))))
        for text in (gold, found)
    )
    return any(one in ours and other in theirs - ours for pair in _OPPOSITES for one, other in (pair, pair[::-1]))


def _words(text: str) -> frozenset[str]:
    while (inner := _TEXT.sub(lambda match: f" {match[1]} ", text)) != text:
        text = inner
    return frozenset(word.casefold() for word in _WORD.findall(text))


def _names_other_letter(letter: str, text: str) -> bool:
    for match in _OTHER_LETTER.finditer(text):
        other = next(group for group in match.groups() if group).upper()
        is_article = match[2] == "A" and _ARTICLE.match(text, match.end()) is not None
        is_roman = match[2] == "I" and "II" in text
        if other != letter and not is_article and not is_roman:
            return True
    return False
