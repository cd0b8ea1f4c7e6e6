"""What a running Redis would keep of a power failure, for `bapo doctor`: the launcher has no Redis client."""

from __future__ import annotations

import re
import socket
from urllib.parse import unquote, urlsplit

from bapo.config.tree import Config
from bapo.errors import ConfigError
from bapo.redis_secrets import with_password
from services.launcher.checks import Check, connected

NAME = "redis persistence"
MAX_ANSWER_BYTES = 1 << 16


def persistence(config: Config) -> Check | None:
    """Whether it writes an append-only file; None when there is none to ask, or when it is reached by TLS."""
    url = config.buffer.redis_url
    if url is None or config.buffer.url or urlsplit(url).scheme not in ("redis", "unix"):
        return None
    try:
        answer = _info(with_password(url))
    except (OSError, ValueError, ConfigError) as error:
        return Check(
            name=NAME, status="warn", detail=f"could not be asked: {getattr(error, 'strerror', None) or error}"
        )
    found = re.search(r"aof_enabled:(\d)", answer)
    if found is None:
        return Check(name=NAME, status="warn", detail=f"could not be asked: it answered {answer.strip()[:80]!r}")
    if found[1] == "1":
        return Check(name=NAME, status="ok", detail="append-only file")
    detail = "no append-only file: when this Redis dies, acknowledged groups are lost. Set `appendonly yes` there"
    return Check(name=NAME, status="warn", detail=detail)


def _info(url: str) -> str:
    """Its answer to INFO persistence, or its refusal."""
    parts = urlsplit(url)
    with connected(parts.scheme, parts.path, parts.hostname, parts.port) as connection:
        if parts.password:
            user = [unquote(parts.username)] if parts.username else []
            connection.sendall(_command("AUTH", *user, unquote(parts.password)))
            refusal = connection.recv(MAX_ANSWER_BYTES).decode(errors="replace")
            if not refusal.startswith("+OK"):
                return refusal
        connection.sendall(_command("INFO", "persistence"))
        return _bulk(connection)


def _bulk(connection: socket.socket) -> str:
    """One bulk string, `$LENGTH CRLF bytes CRLF`, or whatever line comes in its place."""
    data = b""
    while True:
        head, found, body = data.partition(b"\r\n")
        if found and (not head.startswith(b"$") or len(body) >= int(head[1:])):
            return (body if head.startswith(b"$") else head).decode(errors="replace")
        part = connection.recv(MAX_ANSWER_BYTES)
        if not part or len(data) > MAX_ANSWER_BYTES:
            return data.decode(errors="replace")
        data += part


def _command(*words: str) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    parts += [b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words]
    return b"".join(parts)
