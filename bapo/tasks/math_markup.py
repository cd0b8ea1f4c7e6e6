r"""Markup that means nothing, and one spelling of what is written in several ways, in an answer of either side.

    "\\boldsymbol{5}", "\\textcolor{red}{5}", "\\[5\\]", "= 5", "5,", "**5**", "5\\tag{1}"    "5"
    "1½", "\\nicefrac{1}{2}", "–3", "[1;2)", "\\mathbb{R}_{\\ge 0}", "\\{(1,2),(3,4)\\}"
                                "1\\frac{1}{2}", "\\frac{1}{2}", "-3", "[1,2)", "[0,\\infty)", "(1,2),(3,4)"

Does not cover: a dash between two numbers, which may be a range; a set of one point.
"""

from __future__ import annotations

import re
import unicodedata

# Possessive: linear on a response that does not match.
_BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+)\}"
_EMPHASIS = re.compile(rf"\\(?:boldsymbol|bm|pmb|underline|textcolor\s*+\{{[^{{}}]*+\}})\s*+{_BRACED}")
_NOTHING = re.compile(
    r"\\(?:color|tag\*?)\s*+\{[^{}]*+\}"
    r"|\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
)
_WHOLE = re.compile(rf"\\\[(.*)\\\]|\\\((.*)\\\)|\*\*([^*]+)\*\*|{_BRACED}", re.DOTALL)
_ENDS = re.compile(r"^\s*+=(?!=)|(?<![\\,;])[,;]\s*+$")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_OTHER_FRACTION = re.compile(r"\\(?:nicefrac|sfrac)(?![a-z])")
_MINUS = re.compile(r"(?:^|(?<=[(\[{,;=<>]))\s*+[\u2012\u2013]\s*+(?=[\d\\.a-zA-Z])")
_SEMICOLON = re.compile(r"([\[(\]])([^;,\[\]()]*+);([^;,\[\]()]*+)([\])\[])")
_HALF_LINE = re.compile(r"\\mathbb\s*+\{?R\}?\s*+_\s*+\{?\s*+(\\[gl]eq?(?:slant)?|[≥≤<>])\s*+0\s*+\}?")
_HALF_LINES = {"g": "[0,\\infty)", "≥": "[0,\\infty)", ">": "(0,\\infty)",
               "l": "(-\\infty,0]", "≤": "(-\\infty,0]", "<": "(-\\infty,0)"}  # fmt: skip
_TUPLE = r"(?:\\left\s*+)?\([^()]*+\)"
_SET_OF_TUPLES = re.compile(rf"(?:\\left\s*+)?\\\{{\s*+({_TUPLE}(?:\s*+,\s*+{_TUPLE})++)\s*+(?:\\right\s*+)?\\\}}")


def without_markup(answer: str) -> str:
    """The answer in one spelling, without what changes only its looks."""
    text = _NOTHING.sub("", answer)
    while (inner := _EMPHASIS.sub(r"\1", text)) != text:
        text = inner
    text = _ENDS.sub("", text).strip()
    if (whole := _WHOLE.fullmatch(text)) is not None:
        text = _ENDS.sub("", whole[whole.lastindex or 0]).strip()
    text = _OTHER_FRACTION.sub(r"\\frac", _VULGAR.sub(_fraction, text))
    text = _SEMICOLON.sub(r"\1\2,\3\4", _MINUS.sub("-", text))
    text = _HALF_LINE.sub(lambda match: _HALF_LINES[match[1].lstrip("\\")[0]], text)
    points = _SET_OF_TUPLES.fullmatch(text)
    return text if points is None else points[1]


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"
