"""The web page over HTTP: its files for everybody, its numbers for viewers. What they are is in `bapo.web`."""

from __future__ import annotations

import gzip
import html
import inspect
import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from bapo.errors import ContractError
from bapo.web.asking import Endpoint, all_endpoints, ask
from bapo.web.assets import all_assets, served_document
from bapo.web.view import RunView

PAGE = "/web/"
API = "/web/api/v1"
SMALL_BYTES = 4096
"""Answers up to here are not compressed."""
COMMON = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def web_router(view: RunView, *, needs_token: bool) -> APIRouter:
    """The page of one run."""
    router = APIRouter(tags=["web page"])
    document = served_document(html.escape(f"{view.config.run.name} - BAPO"), needs_token=needs_token)

    @router.get("/", include_in_schema=False)
    async def top() -> Response:
        return RedirectResponse("web/", headers=COMMON)

    @router.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        headers = COMMON | {"Content-Security-Policy": document.policy}
        return Response(document.html, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/web/{folder}/{file}", include_in_schema=False)
    async def asset(folder: str, file: str, request: Request) -> Response:
        found = all_assets().get(f"{folder}/{file}")
        if found is None:
            raise ContractError(f"the page has no file {folder}/{file}")
        headers = COMMON | {"ETag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return _packed(request, found.content, found.media_type, headers)

    for endpoint in all_endpoints().values():
        router.add_api_route(f"{API}/{endpoint.name}", _route(view, endpoint), methods=["GET"], name=endpoint.name)
    return router


def _route(view: RunView, endpoint: Endpoint) -> Callable[..., Response]:
    """A route whose query is the keyword arguments of the endpoint: FastAPI checks their types. It runs in a thread."""

    def route(request: Request, **query: Any) -> Response:
        content = json.dumps(ask(view, endpoint, **query), separators=(",", ":"), allow_nan=False).encode()
        headers = COMMON | {"Cache-Control": "no-store"}
        return _packed(request, content, "application/json", headers)

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
