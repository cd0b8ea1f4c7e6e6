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
from bapo.runtime.auth.api_tokens import Keyring
from bapo.transport.http_guard import BodyError, HttpGuard, error_answer, named_error
from buffer_service.http.context import Context, Here
from buffer_service.http.long_poll import aside
from buffer_service.http.permissions import PERMISSIONS
from buffer_service.http.routes import batches, frames, inspection, maintenance, selectors, work
from buffer_service.http.schemas import ErrorAnswer
from buffer_service.metrics import BufferMetrics

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "The body is not JSON."),
        (401, "No token, or one that is not accepted."),
        (403, "The role of this token may not do this."),
        (404, "There is no such path."),
        (405, "The path has no such method."),
        (408, "The body stopped."),
        (411, "The length of the body is not declared."),
        (413, "The body is larger than what is taken."),
        (422, "The message breaks the contract: never retried."),
        (429, "The buffer is full: try again after `Retry-After` seconds."),
        (503, "Redis is away, or too many groups failed: `retry` says which."),
        (507, "Redis cannot write to its disk."),
    )
}
health = APIRouter(tags=["health"])


def create_app(context: Context, metrics: BufferMetrics, keyring: Keyring | None = None) -> FastAPI:
    """The app of one run. Without a keyring everybody may do everything."""

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
    app.add_middleware(HttpGuard, permissions=PERMISSIONS, keyring=keyring, refused=app.state.refused)
    return app


@health.get("/healthz", response_class=Response)
async def healthz() -> Response:
    """The process is alive."""
    return Response("ok\n", media_type="text/plain")


@health.get("/readyz")
async def readyz(here: Here) -> dict[str, Any]:
    """Redis answers; how it persists what was acknowledged."""
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
    """Prometheus text format."""
    scrape = await here.service.inspection.scrape()
    text = await aside(here.service.exposition, scrape)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class Timed:
    """Measures every request under the name of its route."""

    def __init__(self, app: ASGIApp, metrics: BufferMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Long polls are left out: their time says how long others took."""
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
