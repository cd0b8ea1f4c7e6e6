"""Where a response that is written in a given form has its answer. Pure, and linear in the length of the text.

    form "<answer>{answer}</answer>"    what stands between the last end and the nearest beginning before it
    form "#### {answer}"                what follows the last mark, up to the end of its line
    form "\\boxed{{answer}}"             what stands in the last such braces, which may hold others (not \\{)

Never a regular expression of a user's: one that backtracks would hold up every thread of the process.
"""

from __future__ import annotations

ANSWER = "{answer}"
OPEN, CLOSE, ESCAPE = "{", "}", "\\"


def marks_of(form: str) -> tuple[str, str] | None:
    """What stands right before and right after the answer on its line; None for a form with nothing before it."""
    before, found, behind = form.partition(ANSWER)
    before = before.rpartition("\n")[2].strip()
    behind = behind.partition("\n")[0].strip()
    return (before, behind) if found and before and ANSWER not in behind else None


def written_answer(form: str, text: str) -> str | None:
    """The answer in the last place of `text` that is written in this form, stripped; None where there is none."""
    marks = marks_of(form)
    if marks is None:
        return None
    before, behind = marks
    if before.endswith(OPEN) and behind.startswith(CLOSE):
        return _in_braces(text, before)
    if not behind:
        _, found, after = text.rpartition(before)
        return after.strip().partition("\n")[0].strip() if found else None
    end = text.rfind(behind)
    start = text.rfind(before, 0, max(end, 0))
    return None if start < 0 else text[start + len(before) : end].strip()


def _in_braces(text: str, before: str) -> str | None:
    """From after the last `before` to the brace that closes it; the one before the last when it is never closed."""
    end = len(text)
    while (start := text.rfind(before, 0, end)) >= 0:
        depth = 1
        for place in range(start + len(before), end):
            if text[place - 1] != ESCAPE:
                depth += (text[place] == OPEN) - (text[place] == CLOSE)
            if depth == 0:
                return text[start + len(before) : place].strip()
        end = start
    return None
