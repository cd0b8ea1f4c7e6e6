"""What the buffer service knows of itself; nothing where only a run directory is served."""

from __future__ import annotations

from typing import Any

from bapo.web.view import RunView

NEEDS_RECORDS = False


def answer(view: RunView) -> dict[str, Any]:
    """`live`: status, ages and compositions as `buffer_service/live.py` has them, or null."""
    return {"live": None if view.live is None else dict(view.live())}
