"""Errors of the tree as answers, with a body that `bapo.peer` turns into the same class again."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from bapo.answers import name_of
from bapo.errors import AccessError, BapoError, ContractError, Refusal, UnavailableError
from bapo.gate import BodyError
from buffer_service.metrics import BufferMetrics
from buffer_service.service import TooManyFailuresError

RETRY_AFTER_S = 1
MOST_MESSAGE_CHARS = 1000


def error_response(error: BapoError, metrics: BufferMetrics) -> JSONResponse:
    """The answer to a request that ended so; what the sender did wrong is counted."""
    retry = isinstance(error, UnavailableError) and not isinstance(error, TooManyFailuresError)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
    if isinstance(error, BodyError):
        headers["Connection"] = "close"
    if isinstance(error, ContractError):
        metrics.refused(error.reason)
    if isinstance(error, AccessError):
        metrics.refused(Refusal.NO_RIGHT)
    body = {"error": name_of(error), "message": _shortened(str(error)), "retry": retry}
    return JSONResponse(body, status_code=error.http_status, headers=headers)


def _shortened(message: str) -> str:
    """Whoever sends a megabyte of nonsense does not get it back."""
    return message if len(message) <= MOST_MESSAGE_CHARS else f"{message[:MOST_MESSAGE_CHARS]}..."
