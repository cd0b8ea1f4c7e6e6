r"""Reward of mathematics: is the last \boxed{...} of a response the answer? `reward = "bapo.tasks.mathematics:boxed"`.

    "... so \boxed{\frac12}"  against the row's answer "0.5"  ->  1.0

math-verify reads both as expressions and compares them. Its own timeouts use signals, which fail outside of the main
thread and were then taken for wrong answers by other frameworks; they are off here, because a grader is a process that
is killed when it takes too long (`task.grading_timeout_s`), and its group is sampled again.

Does not cover: answers outside of a box, proofs, units that have to be converted, several answers in several boxes.
"""

from __future__ import annotations

import logging
from typing import Any

from bapo.core.types import Prompt
from bapo.tasks.answer_formats import ANSWER, written_answer

BOXED = "\\boxed{{answer}}"
MAX_CHARS = 1_000
"""Of a response's answer: sympy may take minutes for what is longer, and no answer of the usual sets is."""


def boxed(prompt: Prompt, text: str) -> float:
    """1.0 if the last box of the response holds the answer, else 0.0; a response without a box is wrong.

    Raises: ValueError for an answer of the data set that cannot be read: the row is at fault, not the response.
    """
    gold = str(prompt.answer["answer"]).strip()
    gold = last_box(gold) or gold.strip("$ ")
    found = last_box(text)
    if not gold:  # an empty box would be right
        raise _unreadable(gold)
    if found is None or len(found) > MAX_CHARS:
        return 0.0
    if found == gold:
        return 1.0
    right = _expressions(gold)
    if not right:
        raise _unreadable(gold)
    return float(_equal(right, _expressions(found)))


def _unreadable(gold: str) -> ValueError:
    return ValueError(f"cannot parse the answer {gold!r:.200} of the data set as mathematics")


def last_box(text: str) -> str | None:
    """What stands in the last box that is closed; None without one."""
    return written_answer(BOXED, text)


def _expressions(latex: str) -> list[Any]:
    """Readings of an expression, [] if there is none."""
    from math_verify import LatexExtractionConfig, parse  # sympy takes a second to import, and only graders need it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    found: list[Any] = parse(
        BOXED.replace(ANSWER, latex),
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found


def _equal(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    return bool(found) and bool(verify(gold, found, timeout_seconds=None))
