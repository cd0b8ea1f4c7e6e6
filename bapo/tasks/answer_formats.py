"""Extract the answer from a response in a given format. Pure, linear in the length of the text.

    format "<answer>{answer}</answer>"    text between the last closing tag and the nearest opening tag before it
    format "#### {answer}"                text after the last marker, up to the end of its line
    format "\\boxed{{answer}}"             content of the last such braces, which may be nested (not \\{)

User-supplied regular expressions are not supported: a backtracking one would block every thread of the process.
"""

from __future__ import annotations

ANSWER = "{answer}"
OPEN, CLOSE, ESCAPE = "{", "}", "\\"


def marks_of(form: str) -> tuple[str, str] | None:
    """Text directly before and after the answer on its line; None for a format without a prefix."""
    before, found, behind = form.partition(ANSWER)
    before = before.rpartition("\n")[2].strip()
    behind = behind.partition("\n")[0].strip()
    return (before, behind) if found and before and ANSWER not in behind else None


def written_answer(form: str, text: str) -> str | None:
    """The last answer in `text` in this format, stripped; None if there is none."""
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
    """Text between the last `before` and its closing brace; if that one is unclosed, the previous one."""
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
