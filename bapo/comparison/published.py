"""The paper's own numbers (published.toml), for a column beside ours."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("published.toml")
TASK_OF = {"countdown": "planning"}
"""Our task -> the paper's that is nearest: Countdown with a model of 1.5 B parameters."""


@cache
def published() -> dict[str, Any]:
    """The whole file."""
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def published_of(task: str, method: str) -> dict[str, Any]:
    """What the paper says of a method (named as its preset) on its task nearest to ours; may be empty."""
    section: dict[str, Any] = published().get(TASK_OF.get(task, ""), {})
    return dict(section.get(method.replace("-", "_"), {}))


def rollouts_of(method: str) -> float | None:
    """Thousands of responses that the paper counts on mathematics, the only task that it counts them for."""
    found = published()["math"].get(method.replace("-", "_"), {}).get("rollouts")
    return None if found is None else float(found)


def rescued_of(method: str) -> float | None:
    """Share of prompts at 0/8 that improved, in [0, 1]."""
    found = published()["rescued"].get(method.replace("-", "_"))
    return None if found is None else found / 100
