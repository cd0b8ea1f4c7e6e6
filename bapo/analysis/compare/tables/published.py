"""The paper's own numbers (published.toml), for a column beside ours."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from bapo.config.tree import Config

PATH = Path(__file__).with_name("published.toml")
SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)[Bb](?![a-zA-Z])")
"""Of a model, as its name has it: Qwen2.5-Math-7B."""
LARGE = 4.0
"""Billion parameters from which a model is nearer to the paper's 7 B than to its 1.5 B."""


@cache
def published() -> dict[str, Any]:
    """The whole file."""
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def section_of(config: Config) -> str:
    """The paper's task and model that are nearest to a run's: a section of the file, or "" where there is none."""
    if config.task.name == "countdown":
        size = SIZE.search(Path(config.model.path).name)
        return "planning_7b" if size and float(size[1]) > LARGE else "planning"
    return "math" if str(config.task.reward).startswith("bapo.tasks.mathematics:") else ""


def published_of(config: Config, method: str) -> dict[str, Any]:
    """What the paper says of a method (named as its preset) where it is nearest to this run; may be empty."""
    section: dict[str, Any] = published().get(section_of(config), {})
    return dict(section.get(_key(method), {}))


def rollouts_of(method: str) -> float | None:
    """Thousands of responses that the paper counts on mathematics, the only task that it counts them for."""
    found = published()["math"].get(_key(method), {}).get("rollouts")
    return None if found is None else float(found)


def type_of(method: str) -> str | None:
    """ "on" or "off": what the paper calls a method's policy (its table 1a)."""
    found: str | None = published()["math"].get(_key(method), {}).get("type")
    return found


def rescued_of(method: str) -> float | None:
    """Share of prompts at 0/8 that improved, in [0, 1]."""
    found = published()["rescued"].get(_key(method))
    return None if found is None else found / 100


def _key(method: str) -> str:
    return method.replace("-", "_")
