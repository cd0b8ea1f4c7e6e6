"""On-policy distillation: the teacher, and how it is asked (docs/methods.md#distillation)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.core.addresses import http_address


class DistillationConfig(Frozen):
    """A teacher scores every sampled token; `loss.advantage = "distillation"` learns from it (docs/methods.md)."""

    teacher: Annotated[str, AfterValidator(http_address)] = "http://127.0.0.1:8000/v1"
    """Address of a vLLM server, with `/v1`, whose model has the tokenizer of `model.path`."""
    model: str | None = None
    """Name of the teacher's model there; null: the first that the server lists."""
    api_key_env: str | None = None
    """Environment variable with the server's key; null: it asks for none."""
    concurrency: int = Field(8, ge=1)
    """Groups of one worker that the teacher scores at a time."""
    timeout_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """Of one call, which scores one group. A call that fails is repeated after growing pauses until the teacher
    answers; the group waits."""
