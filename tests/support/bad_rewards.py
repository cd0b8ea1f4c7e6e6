"""Verifiers that a user might bring."""

from __future__ import annotations

import zlib

from bapo.core.types import Prompt
from rollout_server.engines.scripted import WRONG_TEXT


def raises(prompt: Prompt, text: str) -> float:
    """Always falls over."""
    raise RuntimeError("the verifier fell over")


def raises_for_some_prompts(prompt: Prompt, text: str) -> float:
    """Falls over for one prompt in 16; accepts everything that the scripted engine does not call wrong."""
    if zlib.crc32(prompt.prompt_id.encode()) % 16 == 0:
        raise RuntimeError("the verifier fell over")
    return float(text != WRONG_TEXT)
