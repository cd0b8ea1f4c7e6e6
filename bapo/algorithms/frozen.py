"""The base of every section of settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


MOST_SECONDS = 1e6
"""Of any configured time, eleven days: a pipe can be watched for 2^31 milliseconds at most, and a longer wait fails."""
