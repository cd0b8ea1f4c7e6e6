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


class OwnRoute(APIRoute):
    """Calls `endpoint(here=..., request=..., **fields)` with fields that it reads itself, and sends the response that
    the endpoint returns.

    Described as every route is, by the endpoint's signature; where there is nothing for it to read, FastAPI reads,
    and refuses.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._ordinary, self.app = self.app, self._answer

    async def own_fields(self, request: Request) -> Mapping[str, Any] | None:
        """Arguments of the endpoint; None: FastAPI's business. Raises: RequestValidationError."""
        raise NotImplementedError

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        fields = await self.own_fields(request)
        if fields is None:
            await self._ordinary(scope, receive, send)
            return
        response = await self.endpoint(here=await context_of(request), request=request, **fields)
        await response(scope, receive, send)


class BodyRoute(OwnRoute):
    """Reads `body`, when it is JSON."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._model: type[BaseModel] = get_type_hints(self.endpoint)["body"]

    async def own_fields(self, request: Request) -> Mapping[str, Any] | None:
        """The body as the model that the endpoint declares."""
        if request.headers.get("content-type") != "application/json":
            return None
        try:
            return {"body": self._model.model_validate_json(await read_body(request, MOST_JSON_BYTES))}
        except ValidationError as error:
            raise RequestValidationError(
                [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]
            ) from error


def route_by(read: Callable[[Scope], Mapping[str, Any] | None]) -> type[OwnRoute]:
    """A route whose fields `read` finds in the URL."""

    class ReadRoute(OwnRoute):
        async def own_fields(self, request: Request) -> Mapping[str, Any] | None:
            return read(request.scope)

    return ReadRoute


def is_true(request: Request, name: str, *, default: bool) -> bool:
    """A flag of the query. Raises: ContractError for anything but true and false."""
    value = request.query_params.get(name) if request.scope["query_string"] else None
    if value is None:
        return default
    if value not in TRUE + FALSE:
        raise ContractError(f"query.{name}: {value[:20]!r} is neither true nor false")
    return value in TRUE
