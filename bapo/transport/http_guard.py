"""What stands before an HTTP API: who may call what, and how much may be sent. Nothing of a body is read before it.

    request -> open path? -> token? -> right? -> declared length? -> the API reads the body, counted and with a deadline
                               401     403, 404     411, 413                              413, 408

Default: what no rule names is for the operator alone, so that a new route without a rule is closed and not open.
Without tokens (a service on the loopback that was given none) only the bounds on bodies are left.

Plain ASGI, so that every service can use it. Does not cover: connections that never send a request, and TLS; both
belong to a proxy in front (docs/threat_model.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from bapo.core.errors import BY_NAME, AccessError, BapoError, ContractError, Refusal, UnavailableError
from bapo.core.text import plain
from bapo.runtime.auth.api_tokens import TOKEN_FILE, Keyring, Role
from bapo.runtime.logs import Seldom

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_JSON_BYTES = 32 << 20
"""Of one body of JSON: the requests of a step with long prompts have some megabytes."""
BODY_PAUSE_S = 30.0
"""A body of which nothing comes for so long is given up."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
"""Liveness for probes that can hold no token, and the description of the API, which is no secret."""
ROLE = "bapo.role"
"""Under which a request's scope has the role of its sender: None where nobody needs a token."""
ENDS = "the service is told to end, and what this needs has kept it waiting: ask again"
NO_WEBSOCKETS = 1008
"""Close code of RFC 6455: against the policy of the server."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use one route, besides the operator."""

    method: str
    path: str
    """As in the API's description: `/batches/{step}`."""
    roles: frozenset[Role]
    most_bytes: int = MOST_JSON_BYTES
    """Of the body."""
    needs_length: bool = False
    """Whether the body must declare its length: bodies that are read into one block."""


def allow(method: str, path: str, *roles: Role, most_bytes: int = MOST_JSON_BYTES, needs_length: bool = False) -> Rule:
    """A rule, written as a line of a table."""
    return Rule(method, path, frozenset(roles), most_bytes, needs_length)


class Rules:
    """The table of one API."""

    def __init__(self, rules: Iterable[Rule], *, open_paths: Iterable[str] = ()) -> None:
        """
        Args:
            open_paths: what anybody may GET, besides OPEN_PATHS, where no rule says otherwise.
        """
        self._open = tuple(_pattern(path) for path in open_paths)
        self._plain: dict[tuple[str, str], Rule] = {}
        self._patterns: list[tuple[re.Pattern[str], Rule]] = []
        for rule in rules:
            if "{" in rule.path:
                self._patterns.append((_pattern(rule.path), rule))
            else:
                self._plain[rule.method, rule.path] = rule

    def find(self, method: str, path: str) -> Rule | None:
        """The rule of a route; None when there is none."""
        if rule := self._plain.get((method, path)):
            return rule
        return next(
            (rule for pattern, rule in self._patterns if rule.method == method and pattern.fullmatch(path)), None
        )

    def has_path(self, path: str) -> bool:
        """Whether a route has this path, for whatever method."""
        return any(plain == path for _, plain in self._plain) or any(
            pattern.fullmatch(path) for pattern, _ in self._patterns
        )

    def is_open(self, method: str, path: str) -> bool:
        """Whether anybody may ask for a path that no rule names."""
        return path in OPEN_PATHS or (method == "GET" and any(pattern.fullmatch(path) for pattern in self._open))


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", path))


class Gate:
    """ASGI middleware, to be added last so that it comes first."""

    def __init__(self, app: App, *, rules: Rules, keyring: Keyring | None, refused: Callable[[Refusal], None]) -> None:
        """
        Args:
            keyring: None: everybody may do everything.
            refused: is told why, once per refused request (a metric).
        """
        self._app, self._rules, self._keyring, self._refused = app, rules, keyring, refused
        self._seldom = Seldom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # none of our services has websockets: the server answers this with a 403
            self._refused(Refusal.CONTRACT)
            await send({"type": "websocket.close", "code": NO_WEBSOCKETS})
            return
        rule = self._rules.find(scope["method"], scope["path"])
        try:
            if rule is not None or not self._rules.is_open(scope["method"], scope["path"]):
                is_path = rule is not None or self._rules.has_path(scope["path"])
                scope[ROLE] = check_right(scope, rule, self._keyring, is_path=is_path)
            size = declared_length(scope, rule)
        except RefusedError as refusal:
            self._refused(refusal.reason)
            self._warn(scope, refusal)
            await _refuse(send, refusal)
            return
        await self._answered(scope, Body(receive, size, rule.most_bytes if rule else MOST_JSON_BYTES), send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A server that ends cancels what it has waited for long enough, and would answer 500, which no caller
        repeats: as if what it asks for could not be done."""
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
        # Not one line per refusal: whoever can be refused could fill the disk.
        if self._seldom.is_due("refused"):
            client = (scope.get("client") or ("?",))[0]
            what = plain(str(refusal)[:300])  # a path is whatever somebody has sent, line breaks and all
            log.warning("refused client=%s status=%d reason=%s: %s", client, refusal.status, refusal.reason, what)


def check_right(scope: Scope, rule: Rule | None, keyring: Keyring | None, *, is_path: bool = True) -> Role | None:
    """The role of a sender that may call this route; None without a keyring.

    Args:
        is_path: False: no route has this path, which is answered 404 to whoever has a token.
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
            f"{what} needs a token: name its file in {TOKEN_FILE} (the launcher keeps those of a run in "
            "RUN/tokens/<role>/token), or send the header Authorization: Bearer TOKEN",
        )
    role = keyring.role_of(token)
    if role is None:
        raise RefusedError(
            401,
            Refusal.WRONG_TOKEN,
            f"{what}: this token is not accepted here; is it of another run, or was it replaced? See {TOKEN_FILE}",
        )
    if not is_path and role is not Role.OPERATOR:  # the API itself answers the operator
        raise RefusedError(404, Refusal.CONTRACT, f"{what}: there is no such path; GET /docs lists them")
    if role is not Role.OPERATOR and (rule is None or role not in rule.roles):
        able = ", ".join(sorted(rule.roles)) + " or operator" if rule and rule.roles else "operator"
        raise RefusedError(403, Refusal.NO_RIGHT, f"{what}: {role} may not do this; use the token of {able}")
    return role


class RefusedError(Exception):
    """A request that is answered here."""

    def __init__(self, status: int, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Body:
    """`receive` of a request whose body has a bound and a deadline."""

    def __init__(self, receive: Receive, declared: int | None, most_bytes: int) -> None:
        self._receive, self._left = receive, most_bytes if declared is None else declared
        self._most = most_bytes
        self._is_whole = False

    async def __call__(self) -> Message:
        """The next piece. Raises: BodyError."""
        if self._is_whole:
            return await self._receive()  # what comes now is the end of the connection, whenever that is
        try:
            async with asyncio.timeout(BODY_PAUSE_S):
                message = await self._receive()
        except TimeoutError as error:
            raise BodyError(f"nothing of the body came for {BODY_PAUSE_S:.0f} s", Refusal.TOO_SLOW) from error
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise BodyError(f"the body is longer than declared, or than {self._most} bytes", Refusal.TOO_LARGE)
            self._is_whole = not message.get("more_body", False)
        return message


_BODY_STATUS = {Refusal.TOO_SLOW: 408, Refusal.LENGTH: 411, Refusal.TOO_LARGE: 413}


class BodyError(ContractError):
    """A body was refused before its end: what follows on the connection is no request, so it is closed."""

    def __init__(self, message: str, reason: Refusal) -> None:
        super().__init__(message, reason)
        self.http_status = _BODY_STATUS[reason]


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""
    return ""


def declared_length(scope: Scope, rule: Rule | None) -> int | None:
    """Content-Length, if there is one. Raises: RefusedError when it is needed and missing, or is too much."""
    most = rule.most_bytes if rule else MOST_JSON_BYTES
    declared = [value for name, value in scope["headers"] if name == b"content-length"]
    if not declared:
        if rule is not None and rule.needs_length:
            raise RefusedError(
                411, Refusal.LENGTH, "the length of the body must be declared: send Content-Length, not chunks"
            )
        return None
    if len(declared) > 1 or not declared[0].isdigit():
        raise RefusedError(411, Refusal.LENGTH, "Content-Length must be one number")
    digits = declared[0].lstrip(b"0") or b"0"
    if len(digits) > 18 or int(digits) > most:  # int() takes 4300 digits at most
        size = digits.decode() if len(digits) < 40 else f"a number of {len(digits)} digits of"
        message = f"a body of {size} bytes is more than the {most} that are taken here: send it in parts"
        raise RefusedError(413, Refusal.TOO_LARGE, message)
    return int(digits)


async def _refuse(send: Send, refusal: RefusedError) -> None:
    cls: type[BapoError] = AccessError if refusal.status in (401, 403) else ContractError
    await _answer(send, refusal.status, cls, str(refusal), retry=False)


async def _answer(send: Send, status: int, cls: type[BapoError], message: str, *, retry: bool) -> None:
    body = json.dumps({"error": cls.__name__, "message": message, "retry": retry}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # the body of the request is not read, so nothing can follow it
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# Bounds on what comes before a request's body: nothing of it is known yet, so nobody may send it for ever.
#
# uvicorn's httptools protocol keeps every header that it is sent and waits for the rest as long as it takes; that is
# memory and connections for whoever reaches the port, before any token is asked for.

MOST_HEADER_BYTES = 64 << 10
"""Path and headers of one request, beyond what one read brought with its first byte: 256 KiB at most."""
HEADERS_S = 30.0
"""From a new connection, or the first byte of a request, to the end of its headers."""
HEAD = """\
HTTP/1.1 {0.value} {0.phrase}\r
content-type: application/json\r
content-length: {1}\r
connection: close\r
\r
"""


class BoundedHeaders:
    """Mixed into uvicorn's httptools protocol, before it: `class Protocol(BoundedHeaders, HttpToolsProtocol)`.

    What it refuses is told to `app.state.refused`, where an app has that (a metric). Headers behind a body of chunks
    are dropped, and more than MOST_HEADER_BYTES of them end the connection.
    """

    _has_headers = False
    _header_bytes = 0
    """That came since the request began, or since the newest bytes of its body."""
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self: Any, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._expect_headers()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self: Any, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)  # type: ignore[misc]
        if self._header_bytes <= MOST_HEADER_BYTES or self.transport.is_closing():
            return
        if self._has_headers:  # an answer may be on its way, or out: nothing else can be said
            self._count(Refusal.TOO_LARGE)
            self.transport.close()
        else:
            message = f"more than {MOST_HEADER_BYTES} bytes of path and headers"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, Refusal.TOO_LARGE, message)

    def send_400_response(self: Any, msg: str) -> None:
        """What is no HTTP is refused as everything else is."""
        self._refuse(HTTPStatus.BAD_REQUEST, Refusal.CONTRACT, msg)

    def _count(self: Any, reason: Refusal) -> None:
        state = getattr(self.config.loaded_app, "state", None)
        if (refused := getattr(state, "refused", None)) is not None:
            refused(reason)

    def _refuse(self: Any, status: HTTPStatus, reason: Refusal, message: str) -> None:
        self._count(reason)
        body = json.dumps({"error": ContractError.__name__, "message": message, "retry": False})
        self.transport.write((HEAD.format(status, len(body)) + body).encode())
        self.transport.close()

    def on_message_begin(self: Any) -> None:
        self._expect_headers()
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self: Any, name: bytes, value: bytes) -> None:
        if not self._has_headers:  # the request was admitted by those that it had, and uvicorn would keep these, too
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self: Any) -> None:
        self._has_headers, self._header_bytes = True, 0
        self._stop_waiting()
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self: Any, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def _expect_headers(self: Any) -> None:
        self._has_headers, self._header_bytes = False, 0
        self._stop_waiting()
        self._headers_due = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


# What HTTP services of ours say of a request that they refuse: the same words, whichever of them it was.

MOST_PROBLEMS = 3


def name_of(error: BapoError) -> str:
    """By which a client knows it: of its class, or of the nearest above it that clients know."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME)


def wrong_fields(method: str, path: str, errors: Sequence[Mapping[str, Any]]) -> str:
    """The first `errors` of pydantic's, with their places."""
    problems = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors[:MOST_PROBLEMS]]
    return f"{method} {path}: {'; '.join(problems)}"


def no_route(method: str, path: str, detail: str) -> str:
    """Neither this path nor this method of it is there."""
    return f"{method} {path}: {detail}; the API is described at /docs"
