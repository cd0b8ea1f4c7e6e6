"""A reward of your own: a function of a prompt and the text of a response that returns a number."""

from __future__ import annotations

from typing import Any

from bapo.tasks.countdown import is_right


def short_and_correct(prompt: Any, text: str) -> float:
    """1 for a correct Countdown answer of at most 40 characters, 0.5 for a longer one, 0 for an incorrect one."""
    if not is_right(text, prompt.answer["numbers"], prompt.answer["target"]):
        return 0.0
    return 1.0 if len(text) <= 40 else 0.5
