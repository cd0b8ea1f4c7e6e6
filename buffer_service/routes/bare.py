"""A route that is part of the API's description and costs nothing else of it.

Solving dependencies and validating parameters takes FastAPI as long as storing a small group takes Redis. The endpoint
of a bare route gets the request and nothing else; the gate before the app and its error handlers apply to it as to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from bapo.errors import ContractError
from bapo.gate import MOST_JSON_BYTES
from buffer_service.bodies import read_body
from buffer_service.context import context_of

TRUE, FALSE = ("true", "1"), ("false", "0")


class BareRoute(APIRoute):
    """Calls `endpoint(request)` and sends the response that it returns."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class BodyRoute(APIRoute):
    """Calls `endpoint(body, here, request)`, with a body of JSON, and sends the response that it returns.

    Described as every route is, by the endpoint's signature; what is no JSON goes FastAPI's way.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._ordinary, self.app = self.app, self._answer
        self._model: type[BaseModel] = get_type_hints(self.endpoint)["body"]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        if request.headers.get("content-type") != "application/json":
            await self._ordinary(scope, receive, send)
            return
        try:
            body = self._model.model_validate_json(await read_body(request, MOST_JSON_BYTES))
        except ValidationError as error:
            raise RequestValidationError(
                [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]
            ) from error
        response = await self.endpoint(body, await context_of(request), request)
        await response(scope, receive, send)


def route_by(read: Callable[[Scope], Mapping[str, Any] | None]) -> type[APIRoute]:
    """A route that calls `endpoint(here=..., request=..., **fields)` with the fields that `read` finds in the URL,
    and sends the response that it returns.

    Described as every route is, by the endpoint's signature; where `read` finds None, FastAPI reads, and refuses.
    """

    class ReadRoute(APIRoute):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self._ordinary, self.app = self.app, self._answer

        async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
            fields = read(scope)
            if fields is None:
                await self._ordinary(scope, receive, send)
                return
            request = Request(scope, receive, send)
            response = await self.endpoint(here=await context_of(request), request=request, **fields)
            await response(scope, receive, send)

    return ReadRoute


def is_true(request: Request, name: str, *, default: bool) -> bool:
    """A flag of the query. Raises: ContractError for anything but true and false."""
    value = request.query_params.get(name) if request.scope["query_string"] else None
    if value is None:
        return default
    if value not in TRUE + FALSE:
        raise ContractError(f"query.{name}: {value[:20]!r} is neither true nor false")
    return value in TRUE
