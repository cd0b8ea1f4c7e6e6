"""The buffer's HTTP API: routes, errors as JSON, health. No use case is implemented here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import bapo
from bapo.core.errors import AccessError, BapoError, ContractError, Refusal, UnavailableError
from bapo.runtime.auth.api_tokens import Keyring
from bapo.transport.http_guard import BodyError, HttpGuard, name_of, no_route, wrong_fields
from buffer_service.http.context import Context, Here
from buffer_service.http.long_poll import aside
from buffer_service.http.permissions import PERMISSIONS
from buffer_service.http.routes import batches, frames, inspection, maintenance, selectors, work
from buffer_service.http.schemas import ErrorAnswer
from buffer_service.metrics import BufferMetrics
from buffer_service.service import TooManyFailuresError

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "The body is not JSON."),
        (401, "Missing or invalid token."),
        (403, "The role of this token has no permission for this."),
        (404, "Unknown path."),
        (405, "Method not allowed for this path."),
        (408, "The body was not received in time."),
        (411, "Content-Length is missing."),
        (413, "The body is too large."),
        (422, "The message is invalid; do not retry."),
        (429, "The buffer is full; retry after `Retry-After` seconds."),
        (503, "Redis is unavailable (`retry` is true), or too many groups failed (`retry` is false)."),
        (507, "Redis cannot write to its disk."),
    )
}
health = APIRouter(tags=["health"])


def create_app(context: Context, metrics: BufferMetrics, keyring: Keyring | None = None) -> FastAPI:
    """Create the app of one run. Without a keyring there is no authentication."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.close()

    app = FastAPI(
        title="BAPO buffer",
        version=bapo.__version__,
        description="Turns groups into batches: B_bad, B_high and the batch X1 + X2 + X3 of every step.",
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.state.context, app.state.metrics = context, metrics
    app.state.refused = metrics.refused
    for router in (
        work.router,
        frames.router,
        batches.router,
        inspection.router,
        selectors.router,
        maintenance.router,
        health,
    ):
        app.include_router(router)
    app.add_exception_handler(BapoError, _named_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Timed, metrics=metrics)
    app.add_middleware(HttpGuard, permissions=PERMISSIONS, keyring=keyring, refused=app.state.refused)
    return app


@health.get("/healthz", response_class=Response)
async def healthz() -> Response:
    """Liveness probe."""
    return Response("ok\n", media_type="text/plain")


@health.get("/readyz")
async def readyz(here: Here) -> dict[str, Any]:
    """Readiness probe: Redis responds. Returns how Redis persists acknowledged writes."""
    found = await here.service.inspection.health()
    return {
        "ready": True,
        "run": here.config.run.name,
        "store": found.where,
        "persistent": found.persistent,
        "persistence": found.detail,
    }


@health.get("/metrics", response_class=Response)
async def metrics_text(here: Here) -> Response:
    """Metrics in the Prometheus text format."""
    scrape = await here.service.inspection.scrape()
    text = await aside(here.service.exposition, scrape)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class Timed:
    """Records the latency of each request by route."""

    def __init__(self, app: ASGIApp, metrics: BufferMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record the latency, except of long polls, whose duration depends on others."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def noticing(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self._app(scope, receive, noticing)
        route = scope.get("route")
        if route is not None and status == 200 and not _may_wait(scope):
            self._metrics.took(route.name, time.perf_counter() - started)


def _may_wait(scope: Scope) -> bool:
    return scope["path"] == "/requests/claim" or b"wait_s" in scope["query_string"]


async def _named_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BapoError)
    return error_response(error, request.app.state.metrics)


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _named_error(request, ContractError(wrong_fields(request.method, request.url.path, error.errors())))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, BodyError):  # FastAPI has translated what reading the body raised
        return await _named_error(request, error.__cause__)
    if isinstance(error.__cause__, ClientDisconnect):
        return await _named_error(request, BodyError("the body is truncated", Refusal.LENGTH))
    request.app.state.metrics.refused(Refusal.CONTRACT)
    message = no_route(request.method, request.url.path, error.detail)
    return JSONResponse(
        {"error": ContractError.__name__, "message": message, "retry": False}, status_code=error.status_code
    )


# Errors as HTTP responses; `bapo.transport.service_client` raises the same class from the body.

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000


def error_response(error: BapoError, metrics: BufferMetrics) -> JSONResponse:
    """The HTTP response for an error; client errors are counted."""
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
    """Truncate the message, so that a large invalid body is not echoed."""
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
