"""The page over HTTP: static files without authentication, data with a token. Read-only."""

from __future__ import annotations

import gzip
import html
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import bapo
from bapo.core.errors import BapoError, ContractError, Refusal
from bapo.runtime.auth.api_tokens import Keyring, Role
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.http_guard import SERVER_SETTINGS, HttpGuard, allow, error_answer, named_error
from bapo.transport.listen import BACKLOG
from services.dashboard.assets import all_assets, served_document
from services.dashboard.endpoints import ENDPOINTS, Endpoint, ask
from services.dashboard.run_view import RunView

API = "/api/v1"
SMALL_BYTES = 4096
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def create_app(
    view: RunView,
    telemetry: Telemetry,
    keyring: Keyring | None = None,
    *,
    siblings: Callable[[], tuple[str, ...]] = tuple,
) -> FastAPI:
    """The page of one run. Without a keyring there is no authentication.

    Args:
        siblings: other runs served at ../NAME/.
    """
    app = FastAPI(title="BAPO dashboard", version=bapo.__version__, summary="The web page of one run.")
    app.include_router(_page(view, siblings, tokens=None if keyring is None else _tokens_of(view)))
    for endpoint in ENDPOINTS:
        route = allow(*endpoint.roles)(_route(view, endpoint))
        app.add_api_route(f"{API}/{endpoint.name}", route, methods=["GET"], name=endpoint.name)
    app.include_router(_health(telemetry))
    app.state.refused = partial(_count, telemetry)
    for kind in (BapoError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(HttpGuard, routes=app.routes, keyring=keyring, refused=app.state.refused)
    return app


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """Server settings: own log format, bounded shutdown."""
    return uvicorn.Config(app, backlog=BACKLOG, timeout_graceful_shutdown=1, **SERVER_SETTINGS)


def _page(view: RunView, siblings: Callable[[], tuple[str, ...]], *, tokens: str | None) -> APIRouter:
    router = APIRouter(tags=["page"])
    title = html.escape(f"{view.config.run.name} - BAPO")

    @router.get("/", include_in_schema=False)  # a browser cannot send a token when it opens a page
    @allow(is_open=True)
    async def page() -> Response:
        document = served_document(title, tokens=tokens, siblings=siblings())
        headers = HEADERS | {"Content-Security-Policy": document.policy}
        return Response(document.html, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/{folder}/{file}", include_in_schema=False)
    @allow(is_open=True)
    async def asset(folder: str, file: str, request: Request) -> Response:
        found = all_assets().get(f"{folder}/{file}")
        if found is None:
            raise ContractError(f"no such file: {folder}/{file}")
        headers = HEADERS | {"ETag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return _packed(request, found.content, found.media_type, headers)

    return router


def _tokens_of(view: RunView) -> str:
    """Where a person finds the tokens; empty when they are not on this machine."""
    folder = set_of_run(view.run.path).folder
    return str(folder) if folder.is_dir() else ""


def _health(telemetry: Telemetry) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """Liveness probe."""
        return {"alive": True}

    @router.get("/readyz")
    async def readyz() -> dict[str, bool]:
        """Readiness probe. The page itself reports what it cannot read or reach."""
        return {"ready": True}

    @router.get("/metrics", response_class=Response)
    @allow(Role.VIEWER)
    def metrics() -> Response:
        return Response(telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router


def _route(view: RunView, endpoint: Endpoint) -> Callable[..., Response]:
    """A route whose query parameters are the endpoint's keyword arguments. Runs in a thread."""

    def route(request: Request, **query: Any) -> Response:
        content = json.dumps(ask(view, endpoint, **query), separators=(",", ":"), allow_nan=False).encode()
        return _packed(request, content, "application/json", HEADERS | {"Cache-Control": "no-store"})

    signature = inspect.signature(endpoint.answer, eval_str=True)
    request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)
    keywords = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    route.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[request, *keywords], return_annotation=Response
    )
    route.__doc__ = endpoint.answer.__doc__
    return route


def _packed(request: Request, content: bytes, media_type: str, headers: dict[str, str]) -> Response:
    if len(content) > SMALL_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers = gzip.compress(content, compresslevel=3), headers | {"Content-Encoding": "gzip"}
    return Response(content, media_type=media_type, headers=headers | {"Vary": "Accept-Encoding"})


def _count(telemetry: Telemetry, reason: Refusal) -> None:
    telemetry.counter("bapo_refused_requests_total").labels(reason=reason.value).inc()


async def _answer_error(request: Request, error: Exception) -> Response:
    named = named_error(error, request.method, request.url.path)
    return JSONResponse(**error_answer(named, request.app.state.refused))
