"""The password of a Redis that is shared: kept next to a set of tokens, used by the buffer service alone.

    FOLDER/redis/password     for the buffer service: BAPO_REDIS_PASSWORD_FILE
           acl/users.acl      for the Redis server: --aclfile; holds a digest, no password

The user may touch the keys of runs and nothing else, and has no administrative command: who has stolen it can neither
make the server write files nor read another application's data.

No client can be the default user, which is off. It has all rights nevertheless: a Redis that starts again replays its
append-only file as that user, and without them it drops every transaction in the file.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from bapo.core.errors import ConfigError
from bapo.runtime.auth.api_tokens import digest, is_loopback
from bapo.runtime.auth.token_store import TOKEN_BYTES, write_private
from bapo.runtime.run_directory.files import storing

URL = "BAPO_REDIS_URL"
PASSWORD = "BAPO_REDIS_PASSWORD"  # noqa: S105 - names of variables
PASSWORD_FILE = "BAPO_REDIS_PASSWORD_FILE"  # noqa: S105
VARIABLES = (URL, PASSWORD, PASSWORD_FILE)
SCHEMES = ("redis", "rediss", "unix")
ONE_PRIMARY = "name one primary itself, no Sentinel and no Cluster"


PUBLIC_FOLDER, PUBLIC_FILE = 0o755, 0o644


USER = "bapo"
USERS = """\
user default off resetpass ~* &* +@all
user {user} on #{digest} ~bapo:* resetchannels -@all +@all -@admin -@dangerous +info +config|get +acl|setuser
"""


class RedisSecrets:
    """One folder of them."""

    def __init__(self, folder: Path) -> None:
        self.password_path = folder / "redis" / "password"
        self.users_path = folder / "acl" / "users.acl"

    def create(self) -> None:
        """Make what is not there yet. Raises: StorageError."""
        with storing(self.password_path):
            if not self.password_path.exists():
                write_private(self.password_path, secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            password = self.password_path.read_text().strip()
            write_private(self.users_path, USERS.format(user=USER, digest=digest(password)))
            # The server has a user of its own, and nothing here is secret.
            self.users_path.parent.chmod(PUBLIC_FOLDER)
            self.users_path.chmod(PUBLIC_FILE)


def with_password(url: str) -> str:
    """The URL with the password of the environment, unless it has one. Raises: ConfigError for an unreadable file."""
    parts = urlsplit(url)
    password = _password()
    if password is None or parts.password:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return _with_authority(url, f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}")


def password_file(url: str) -> Path | None:
    """Where the password comes from that `with_password` adds to this URL; None when it is not from a file."""
    path = os.environ.get(PASSWORD_FILE)
    return Path(path) if path and not urlsplit(url).password else None


def problem_of_url(url: str) -> str:
    """Why a URL cannot be a run's Redis, as the end of a message; '' when it can."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in SCHEMES:
        return f"has the scheme {parts.scheme!r}, which is not redis, rediss or unix; {ONE_PRIMARY}"
    if re.search("[,;]", parts.netloc.rpartition("@")[2]):
        return f"names several servers; {ONE_PRIMARY}"
    if parts.scheme == "unix":
        return "" if parts.path and not parts.hostname else "names no socket: write unix:///path/to/redis.sock"
    try:
        parts.port  # noqa: B018 - parses it
    except ValueError as error:
        return f"has no port: {error}"
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        return f"names the database {parts.path.strip('/')!r}: databases of Redis are numbers"
    return ""


def without_password(url: str) -> tuple[str, str | None]:
    """The URL without its password, and the password."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    bare = _with_authority(url, f"{name}@{host}" if name else host)
    return bare, unquote(parts.password) if parts.password else None


def refuse_open(url: str, *, allowed: bool) -> None:
    """Raises: ConfigError for a Redis on another host that asks for no password."""
    parts = urlsplit(url)
    is_here = parts.scheme == "unix" or is_loopback(parts.hostname or "localhost")
    if is_here or allowed or parts.password or "password=" in parts.query:
        return
    raise ConfigError(
        f"the Redis at {parts.hostname} is on the network and has no password, so anyone who reaches it can read and "
        f"change every group: set one there and name its file in {PASSWORD_FILE}, or write security.open_redis = true"
    )


def _with_authority(url: str, authority: str) -> str:
    # Not urlunsplit, which drops the slashes of unix:///path.
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{authority}{rest[len(urlsplit(url).netloc) :]}"


def _password() -> str | None:
    path = os.environ.get(PASSWORD_FILE)
    return read_password(Path(path)) if path else os.environ.get(PASSWORD) or None


def read_password(path: Path) -> str | None:
    """What the file holds, if anything. Raises: ConfigError when it cannot be read."""
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{PASSWORD_FILE}: {path} cannot be read: {getattr(error, 'strerror', error)}") from error
