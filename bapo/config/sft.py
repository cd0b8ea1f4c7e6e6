"""Supervised fine-tuning before reinforcement learning (`bapo sft`)."""

from __future__ import annotations

from pydantic import Field

from bapo.algorithms.settings import Frozen


class SftConfig(Frozen):
    """Supervised fine-tuning: set by `bapo sft`, not by hand."""

    data: str = ""
    """JSONL file of conversations: `messages`, or `prompt` and `completion`."""
    epochs: int = Field(1, ge=1)
    """Passes over the data, each in an order of its own."""
