"""Who makes a call of the model, from the gate to the engine client: both sides of vLLM's routes."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One call."""

    key: str
    """Of the episode."""
    digest: str
    """Of the request."""
    is_retry: bool


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Of the request that is being answered."""
