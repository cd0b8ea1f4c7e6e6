"""Verifiers that a user might bring."""

from __future__ import annotations

import time

from bapo.types import Prompt


def raises(prompt: Prompt, text: str) -> float:
    """Always falls over."""
    raise RuntimeError("the verifier fell over")


def hangs(prompt: Prompt, text: str) -> float:
    """Never answers."""
    time.sleep(3600)
    return 0.0
