"""The right answers that a row's answer stands for, as texts: one rule for every grader that compares texts.

    "12", 12, 12.0       one right answer: 12; for the float 12.0, too (a column of integers with a null has floats)
    1e-05                one: 1e-05; 0.00001, too
    ["a", "b"], [1, 2]   several: any one of them is right
    [["1", "2"], "3"]    several, the first of which has two values: "1, 2"
    '["a", "b"]'         one: a text is never parsed

Functions of a user get the answer as the row has it.
"""

from __future__ import annotations

import json
import unicodedata
from decimal import Decimal
from typing import Any

BETWEEN_VALUES = ", "
_LIST_STARTS = ('["', "['")


def right_answers(answer: Any) -> list[str]:
    """One text for each right answer, stripped.

    Raises: ValueError for an answer that is empty, or a list without answers, or with an empty one or a null.
    """
    found = [_text(one).strip() for one in _each(answer)]
    if not found:
        raise ValueError("the answer is an empty list, so nothing would be right")
    if not all(found):
        raise ValueError(f"the answer {answer!r:.80} is empty or has an empty one, so an empty response would be right")
    return found


def exact_texts(answer: Any) -> set[str]:
    """All texts, `folded`, that an exact comparison calls right. Raises: as `right_answers`."""
    return {folded(text) for text in (*right_answers(answer), *right_answers(_without_exponents(answer)))}


def folded(text: str) -> str:
    """A text as it is compared: stripped, in Unicode's normal form C, with plain spaces and ends of lines."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\u00a0", " ")).strip()


def gold_text(answer: Any) -> str:
    """An answer as a response has it that a user's function calls right: the first text of a list, JSON otherwise.

    A list of several numbers may well be one answer to such a function, so it stays a list.
    """
    if isinstance(answer, list) and answer and (isinstance(answer[0], str) or len(answer) == 1):
        return as_text(answer[0])
    return as_text(answer)


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def is_list_in_text(answer: Any) -> bool:
    """Whether a text looks like a list of texts written into a column of texts."""
    return isinstance(answer, str) and answer.lstrip().startswith(_LIST_STARTS) and answer.rstrip().endswith("]")


def _each(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _without_exponents(answer: Any) -> Any:
    """Floats as texts: 2.0 is "2", 1e-05 is "0.00001"."""
    if isinstance(answer, list):
        return [_without_exponents(one) for one in answer]
    if not isinstance(answer, float):
        return answer
    return format(Decimal(repr(answer + 0.0)), "f").removesuffix(".0")  # -0.0 + 0.0 is 0.0


def _text(one: Any) -> str:
    if one is None:
        raise ValueError("the answer has a null among its right answers")
    return BETWEEN_VALUES.join(_text(value) for value in one) if isinstance(one, list) else as_text(one)
