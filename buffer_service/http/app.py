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
from bapo.core.errors import BapoError, Refusal
from bapo.runtime.auth.api_tokens import Keyring, Role
from bapo.transport.http_guard import BodyError, HttpGuard, allow, error_answer, named_error
from buffer_service.http.context import Context, Here
from buffer_service.http.long_poll import aside
from buffer_service.http.routes import batches, frames, inspection, maintenance, selectors, work
from buffer_service.http.schemas import ErrorAnswer
from buffer_service.metrics import BufferMetrics

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
    for kind in (BapoError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Timed, metrics=metrics)
    app.add_middleware(HttpGuard, routes=app.routes, keyring=keyring, refused=app.state.refused)
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
@allow(Role.VIEWER)
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


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error.__cause__, ClientDisconnect):
        error = BodyError("the body is cut off", Refusal.LENGTH)
    return JSONResponse(
        **error_answer(named_error(error, request.method, request.url.path), request.app.state.metrics.refused)
    )
