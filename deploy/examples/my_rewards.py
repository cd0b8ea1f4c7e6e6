"""A reward of your own: a function of a prompt and the text of a response that returns a number."""

from __future__ import annotations

from typing import Any

from bapo.tasks.answer_formats import written_answer


def short_and_correct(prompt: Any, text: str) -> float:
    """1 for a correct result of a chain in at most 80 characters, 0.5 in more, 0 for an incorrect one."""
    if written_answer("<answer>{answer}</answer>", text) != str(prompt.answer["value"]):
        return 0.0
    return 1.0 if len(text) <= 80 else 0.5
