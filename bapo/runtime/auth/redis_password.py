"""The password of an external Redis: stored with a token set, used only by the buffer service.

    FOLDER/redis/password     for the buffer service: BAPO_REDIS_PASSWORD_FILE
           acl/users.acl      for the Redis server: --aclfile; contains a digest, not the password

The user may access only the keys of runs, and has no administrative commands: with a stolen password one can neither
make the server write files nor read another application's data.

The default user is disabled for clients but has all permissions: a restarted Redis replays its append-only file as that
user, and would otherwise drop every transaction in the file.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from bapo.core.addresses import IN_BRACKETS, is_loopback
from bapo.core.errors import ConfigError
from bapo.runtime.auth.api_tokens import digest
from bapo.runtime.auth.token_store import TOKEN_BYTES, write_private
from bapo.runtime.run_directory.files import storing

URL = "BAPO_REDIS_URL"
PASSWORD = "BAPO_REDIS_PASSWORD"  # noqa: S105 - names of variables
PASSWORD_FILE = "BAPO_REDIS_PASSWORD_FILE"  # noqa: S105
VARIABLES = (URL, PASSWORD, PASSWORD_FILE)
SCHEMES = ("redis", "rediss", "unix")
ONE_PRIMARY = "use a single primary, not a Sentinel or Cluster"


PUBLIC_FOLDER, PUBLIC_FILE = 0o755, 0o644


USER = "bapo"
USERS = """\
user default off resetpass ~* &* +@all
user {user} on #{digest} ~bapo:* resetchannels -@all +@all -@admin -@dangerous +info +config|get +acl|setuser
"""


class RedisSecrets:
    """A folder with the password and ACL file of Redis."""

    def __init__(self, folder: Path) -> None:
        self.password_path = folder / "redis" / "password"
        self.users_path = folder / "acl" / "users.acl"

    def create(self) -> None:
        """Create missing files. Raises: StorageError."""
        with storing(self.password_path):
            if not self.password_path.exists():
                write_private(self.password_path, secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            password = self.password_path.read_text().strip()
            write_private(self.users_path, USERS.format(user=USER, digest=digest(password)))
            # The server runs as another user, and nothing here is secret.
            self.users_path.parent.chmod(PUBLIC_FOLDER)
            self.users_path.chmod(PUBLIC_FILE)


def with_password(url: str) -> str:
    """Add the password of the environment to a URL without one. Raises: ConfigError for an unreadable file."""
    parts = urlsplit(url)
    password = _password()
    if password is None or parts.password:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return _with_authority(url, f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}")


def password_file(url: str) -> Path | None:
    """The file of the password that `with_password` adds to this URL; None if it is not from a file."""
    path = os.environ.get(PASSWORD_FILE)
    return Path(path) if path and not urlsplit(url).password else None


def problem_of_url(url: str) -> str:
    """Why a URL cannot be used as a run's Redis, as the end of a message; '' if it can."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in SCHEMES:
        return f"has the scheme {parts.scheme!r}, which is not redis, rediss or unix; {ONE_PRIMARY}"
    if re.search("[,;]", parts.netloc.rpartition("@")[2]):
        return f"lists several servers; {ONE_PRIMARY}"
    if parts.scheme == "unix":
        return "" if parts.path and not parts.hostname else "has no socket path: use unix:///path/to/redis.sock"
    try:
        parts.port  # noqa: B018 - parses it
    except ValueError as error:
        return f"has no port that can be read: {error}{IN_BRACKETS if parts.netloc.count(':') > 2 else ''}"
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        return f"has database {parts.path.strip('/')!r}: Redis databases are numbers"
    return ""


def without_password(url: str) -> tuple[str, str | None]:
    """The URL without its password, and the password."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    bare = _with_authority(url, f"{name}@{host}" if name else host)
    return bare, unquote(parts.password) if parts.password else None


def refuse_open(url: str, *, allowed: bool) -> None:
    """Raises: ConfigError for a Redis without a password on another host."""
    parts = urlsplit(url)
    is_here = parts.scheme == "unix" or is_loopback(parts.hostname or "localhost")
    if is_here or allowed or parts.password or "password=" in parts.query:
        return
    raise ConfigError(
        f"the Redis at {parts.hostname} has no password, so anyone with network access can read and "
        f"change every group: set a password and {PASSWORD_FILE}, or set security.open_redis = true"
    )


def _with_authority(url: str, authority: str) -> str:
    # Not urlunsplit, which drops the slashes of unix:///path.
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{authority}{rest[len(urlsplit(url).netloc) :]}"


def _password() -> str | None:
    path = os.environ.get(PASSWORD_FILE)
    return read_password(Path(path)) if path else os.environ.get(PASSWORD) or None


def read_password(path: Path) -> str | None:
    """The password in the file, if any. Raises: ConfigError if it is unreadable."""
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{PASSWORD_FILE}: cannot read {path}: {getattr(error, 'strerror', error)}") from error
