"""Authentication, permissions and size limits of every HTTP API. Nothing of a body is read before they are checked.

    request -> open path? -> token? -> permission? -> declared length? -> API reads the body, counted, with a deadline
                               401      403, 404       411, 413                                413       408

A route without a rule is for the operator only, so that a new route is closed by default. Without a keyring (a service
on the loopback) only the limits on bodies apply.

uvicorn's own setting limits the headers (`SERVER_SETTINGS`). Out of scope: TLS, and connections that never complete a
request; both belong to a proxy in front (docs/threat_model.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bapo.core.errors import (
    BY_NAME,
    AccessError,
    BapoError,
    ContractError,
    NotRetriedError,
    Refusal,
    UnavailableError,
)
from bapo.core.text import plain
from bapo.runtime.auth.api_tokens import TOKEN_FILE, Keyring, Role
from bapo.runtime.logs import RateLimitedFilter

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

MAX_JSON_BYTES = 32 << 20
"""One JSON body: the requests of a step with long prompts have some megabytes."""
BODY_PAUSE_S = 30.0
"""Maximum pause between two chunks of a body."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
"""Probes, which have no token, and the API docs: routes without a rule that are open."""
ROLE = "bapo.role"
"""Key of the scope that holds the role of the caller; None without a keyring."""
ENDS = "the service is stopping, and what this request needs did not answer in time: retry"
ALTERNATIVES = ("str", "int", "float", "bool", "list", "dict", "none", "nullable")
MAX_PROBLEMS = 3
"""Validation errors named in one answer."""
MAX_MESSAGE_CHARS = 1000
RETRY_AFTER_S = 1
SERVER_SETTINGS: dict[str, Any] = {
    "http": "h11",  # httptools has no limit on headers
    "h11_max_incomplete_event_size": 64 << 10,
    "ws": "none",
    "proxy_headers": False,
    "log_config": None,
    "log_level": logging.WARNING,
    "access_log": False,
}
"""Of `uvicorn.Config`: path and headers above 64 KiB, and whatever is not HTTP, are answered 400 before the API."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call one route, besides the operator, and with how much."""

    roles: frozenset[Role] = frozenset()
    most_bytes: int | None = None
    """Longest body; None: `MAX_JSON_BYTES`."""
    needs_length: bool = False
    """Whether Content-Length is required: for bodies that are read into one block."""
    is_open: bool = False
    """Needs no token."""

    @property
    def limit(self) -> int:
        """Longest body in bytes."""
        return MAX_JSON_BYTES if self.most_bytes is None else self.most_bytes


OPERATOR_ONLY = Rule()


def allow(
    *roles: Role, most_bytes: int | None = None, needs_length: bool = False, is_open: bool = False
) -> Callable[[Endpoint], Endpoint]:
    """A decorator of a route's function, below that of the router."""

    def noted(endpoint: Endpoint) -> Endpoint:
        endpoint.rule = Rule(frozenset(roles), most_bytes, needs_length, is_open)  # type: ignore[attr-defined]
        return endpoint

    return noted


def rule_of(routes: Iterable[Any], scope: Scope) -> tuple[Rule, bool]:
    """The rule of a request, and whether a route has its path.

    Args:
        routes: of Starlette, in the order in which the API tries them.
    """
    is_open = scope["path"] in OPEN_PATHS
    is_path = is_open
    for route in routes:
        match, _ = route.matches(scope)
        if match.name == "FULL":
            return getattr(route.endpoint, "rule", Rule(is_open=is_open)), True
        is_path = is_path or match.name == "PARTIAL"  # another method
    return OPERATOR_ONLY, is_path


class HttpGuard:
    """ASGI middleware; added last, so that it runs first."""

    def __init__(
        self, app: App, *, routes: Sequence[Any], keyring: Keyring | None, refused: Callable[[Refusal], None]
    ) -> None:
        """
        Args:
            routes: of the app; later ones count too.
            keyring: None: no token is needed.
            refused: called with the reason of each refused request (a metric).
        """
        self._app, self._routes, self._keyring, self._refused = app, routes, keyring, refused
        self._limiter = RateLimitedFilter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the app, or refuse it."""
        if scope["type"] != "http":  # the server's own start and stop
            await self._app(scope, receive, send)
            return
        rule, is_path = rule_of(self._routes, scope)
        try:
            if not rule.is_open:
                scope[ROLE] = check_right(scope, rule, self._keyring, is_path=is_path)
            size = declared_length(scope, rule)
        except RefusedError as refusal:
            self._refused(refusal.reason)
            self._warn(scope, refusal)
            await _refuse(send, refusal)
            return
        await self._answered(scope, Body(receive, size, rule.limit), send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503, which clients retry, to a request that a stopping server cancels; uvicorn would answer 500."""
        has_begun = False

        async def noticing(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noticing)
        except asyncio.CancelledError:
            if has_begun:
                raise
            await _answer(send, 503, UnavailableError, f"{scope['method']} {scope['path']}: {ENDS}", retry=True)

    def _warn(self, scope: Scope, refusal: RefusedError) -> None:
        # Not one line per refusal, which would let any caller fill the disk.
        if self._limiter.is_due("refused"):
            client = (scope.get("client") or ("?",))[0]
            what = plain(str(refusal)[:300])  # a path may contain line breaks
            log.warning("refused client=%s status=%d reason=%s: %s", client, refusal.status, refusal.reason, what)


def check_right(scope: Scope, rule: Rule, keyring: Keyring | None, *, is_path: bool = True) -> Role | None:
    """The role of a caller that may use this route; None without a keyring.

    Args:
        is_path: False: no route has this path, which is answered 404 to any accepted token.
    Raises: RefusedError.
    """
    if keyring is None:
        return None
    what = f"{scope['method']} {scope['path']}"
    token = _bearer(scope)
    if not token:
        raise RefusedError(
            401,
            Refusal.NO_TOKEN,
            f"{what} requires a token: set {TOKEN_FILE} to its file (the tokens of a run are in "
            "RUN/tokens/<role>/token), or send the header Authorization: Bearer TOKEN",
        )
    role = keyring.role_of(token)
    if role is None:
        raise RefusedError(
            401,
            Refusal.WRONG_TOKEN,
            f"{what}: invalid token; is it of another run, or was it replaced? See {TOKEN_FILE}",
        )
    if not is_path and role is not Role.OPERATOR:  # the API itself answers the operator
        raise RefusedError(404, Refusal.CONTRACT, f"{what}: unknown path; see /docs")
    if role is not Role.OPERATOR and role not in rule.roles:
        able = ", ".join(sorted(rule.roles)) + " or operator" if rule.roles else "operator"
        raise RefusedError(403, Refusal.NO_RIGHT, f"{what}: role {role} has no permission; use a token of {able}")
    return role


class RefusedError(Exception):
    """The request is refused before the API sees it."""

    def __init__(self, status: int, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Body:
    """`receive` of a request, with a limit on the body's length and on its pauses."""

    def __init__(self, receive: Receive, declared: int | None, most_bytes: int) -> None:
        self._receive, self._left = receive, most_bytes if declared is None else declared
        self._most = most_bytes
        self._is_whole = False

    async def __call__(self) -> Message:
        """The next piece. Raises: BodyError."""
        if self._is_whole:
            return await self._receive()  # waits for the end of the connection, without a limit
        try:
            async with asyncio.timeout(BODY_PAUSE_S):
                message = await self._receive()
        except TimeoutError as error:
            raise BodyError(f"no data of the body received for {BODY_PAUSE_S:.0f} s", Refusal.TOO_SLOW) from error
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise BodyError(f"the body is longer than declared, or than {self._most} bytes", Refusal.TOO_LARGE)
            self._is_whole = not message.get("more_body", False)
        return message


_BODY_STATUS = {Refusal.TOO_SLOW: 408, Refusal.LENGTH: 411, Refusal.TOO_LARGE: 413}


class BodyError(ContractError):
    """A body was refused before its end. The connection is closed: its next bytes are not a request."""

    def __init__(self, message: str, reason: Refusal) -> None:
        super().__init__(message, reason)
        self.http_status = _BODY_STATUS[reason]


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""
    return ""


def declared_length(scope: Scope, rule: Rule) -> int | None:
    """Content-Length, if there is one. Raises: RefusedError when it is needed and missing, or is too much."""
    headers = dict(scope["headers"])  # h11 has refused what is not one number of at most 20 digits
    declared = headers.get(b"content-length")
    if declared is None:
        if rule.needs_length:
            raise RefusedError(411, Refusal.LENGTH, "Content-Length is required: chunked bodies are not supported")
        return None
    if b"transfer-encoding" in headers:
        raise RefusedError(400, Refusal.CONTRACT, "Content-Length and chunked encoding are mutually exclusive")
    if (size := int(declared)) > rule.limit:
        message = f"the body has {size} bytes, the limit is {rule.limit}: split it into several calls"
        raise RefusedError(413, Refusal.TOO_LARGE, message)
    return size


async def _refuse(send: Send, refusal: RefusedError) -> None:
    cls: type[BapoError] = AccessError if refusal.status in (401, 403) else ContractError
    await _answer(send, refusal.status, cls, str(refusal), retry=False)


async def _answer(send: Send, status: int, cls: type[BapoError], message: str, *, retry: bool) -> None:
    body = json.dumps({"error": cls.__name__, "message": message, "retry": retry}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # the body is not read, so no request can follow it
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RouteError(ContractError):
    """No route has this path, or this method."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.http_status = status


def named_error(error: Any, method: str, path: str) -> BapoError:
    """What a BapoError, a RequestValidationError of FastAPI or an HTTPException is answered as.

    FastAPI is not imported here: `bapo` is light.
    """
    if isinstance(error, BapoError):
        return error
    if isinstance(error.__cause__, BodyError):  # FastAPI has wrapped what reading the body raised
        return error.__cause__
    if hasattr(error, "errors"):
        return ContractError(f"{method} {path}: {problems_of(error.errors())}")
    return RouteError(f"{method} {path}: {error.detail}; the API is described at /docs", error.status_code)


def problems_of(errors: Iterable[Mapping[str, Any]]) -> str:
    """What pydantic found, by place, in one line: `body.role: Input should be 'user' or 'tool'`."""
    by_place: dict[str, dict[str, None]] = {}
    for error in errors:
        place = ".".join(str(part) for part in error["loc"] if not _is_type(part))
        by_place.setdefault(place, {})[error["msg"].removeprefix("Value error, ")] = None
    said = {place: " or ".join(all_of).replace(" or Input should be", " or") for place, all_of in by_place.items()}
    found = [f"{place}: {what}".removeprefix(": ") for place, what in said.items()]
    return "; ".join(found[:MAX_PROBLEMS])


def _is_type(part: str | int) -> bool:
    """Whether a part of a place names an alternative of pydantic, not a field: `str`, `list[int]`, `UserMessage`."""
    return isinstance(part, str) and (part in ALTERNATIVES or not (part.isidentifier() and part[0].islower()))


def error_answer(error: BapoError, refused: Callable[[Refusal], None]) -> dict[str, Any]:
    """Arguments of the JSON response that `bapo.transport.service_client` turns into the same class again.

    Args:
        refused: called with the reason when the sender did wrong (a metric).
    """
    retry = isinstance(error, UnavailableError) and not isinstance(error, NotRetriedError)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
    if isinstance(error, BodyError):
        headers["Connection"] = "close"
    if isinstance(error, ContractError):
        refused(error.reason)
    if isinstance(error, AccessError):
        refused(Refusal.NO_RIGHT)
    # The nearest class that clients know.
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME)
    body = {"error": name, "message": _shortened(str(error)), "retry": retry}
    return {"content": body, "status_code": error.http_status, "headers": headers}


def _shortened(message: str) -> str:
    """A megabyte of nonsense is not echoed to its sender, and half a character cannot be."""
    shown = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
    return shown.encode(errors="backslashreplace").decode()
