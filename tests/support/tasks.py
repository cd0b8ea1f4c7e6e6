"""Tasks of keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bapo.tasks.registry import load_task


def maker(name: str) -> Callable[..., Any]:
    """A function that makes the task of that name of its keywords, as a run does of `[task.options]`."""
    return lambda **options: load_task(name, options)
