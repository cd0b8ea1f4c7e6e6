"""Your own task: prompts that are in no file, and their reward."""

from __future__ import annotations

from collections.abc import Sequence

from bapo.core.types import Prompt
from bapo.tasks.base import Task, make_prompt
from bapo.tasks.countdown import is_right


class TwoNumbers(Task):
    """Countdown with two numbers whose sum or difference is the target."""

    name = "two-numbers"
    held_out_splits = ("test",)

    def prompts(self, split: str) -> Sequence[Prompt]:
        first = range(20, 30) if split == "test" else range(30, 60)
        rows = [(a, b, target) for a in first for b in range(2, 10) for target in (a + b, a - b)]
        return [make_prompt(self.name, f"{a},{b}->{t}:", {"numbers": [a, b], "target": t}) for a, b, t in rows]

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(is_right(text, prompt.answer["numbers"], prompt.answer["target"]))

    def gold(self, prompt: Prompt) -> str | None:
        (a, b), target = prompt.answer["numbers"], prompt.answer["target"]
        return f"<answer>{a}{'+' if target > a else '-'}{b}</answer>"
