"""A token set on disk: a private folder with one subfolder per holder.

    FOLDER/<role>/token        sent by processes of the role
           accepted/tokens     "role digest" lines, accepted by services; contains no token

Each part is a separate folder, so that a container can mount only what it needs. A run started by the launcher has its
set in RUN/tokens.

Rotation: `rotate` writes a new token of a role and keeps the previous digest, so that both are active until processes
have reloaded their file; `retire` revokes the older one.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from bapo.core.errors import AccessError, ConfigError
from bapo.runtime.auth.api_tokens import (
    ACCEPTED,
    ACCEPTED_FILE,
    TOKEN,
    TOKEN_FILE,
    FileToken,
    Role,
    Token,
    digest,
    own_token,
)
from bapo.runtime.run_directory.files import storing

FOLDER = "tokens"
"""Folder in a run directory."""
SET = "BAPO_TOKEN_SET"
"""Variable with an existing token set, for a launcher that joins separately started services."""
ROLES = {
    "rollout_server": Role.WORKER,
    "learner": Role.LEARNER,
    "scheduler": Role.SCHEDULER,
    "evaluator": Role.EVALUATOR,
    "dashboard": Role.VIEWER,
    "agents": Role.AGENT,
}
"""Role of a process, by the last part of its module name. The buffer service calls no other service."""
TOKEN_BYTES = 32
ACTIVE = 2
"""Maximum number of valid tokens per role."""


class TokenSet:
    """A token set."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def accepted_path(self) -> Path:
        return self.folder / "accepted" / "tokens"

    def path_of(self, role: Role) -> Path:
        return self.folder / role.value / "token"

    def variables_of(self, process: str) -> dict[str, str]:
        """Environment of a process: accepted tokens and its own token, as files, so that process listings do not show
        them."""
        variables = {ACCEPTED_FILE: str(self.accepted_path.resolve())}
        role = ROLES.get(process.rpartition(".")[2])
        return variables if role is None else variables | {TOKEN_FILE: str(self.path_of(role).resolve())}

    def create(self) -> None:
        """Create missing tokens; existing ones are kept. Raises: StorageError."""
        with storing(self.folder):
            for role in Role:
                if not self.path_of(role).exists():
                    write_private(self.path_of(role), secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            lines = self._lines()
            known = {line.partition(" ")[2] for line in lines}
            current = [f"{role} {digest(self._token(role))}" for role in Role]
            self._write([*lines, *(line for line in current if line.partition(" ")[2] not in known)])

    def rotate(self, role: Role) -> None:
        """Create a new token; the previous one stays valid until `retire`. Raises: StorageError, ConfigError."""
        lines = self._lines()
        if not lines:
            raise ConfigError(f"{self.folder} has no tokens; create them with `bapo tokens create {self.folder}`")
        fresh = secrets.token_urlsafe(TOKEN_BYTES)
        mine = [line for line in lines if line.startswith(f"{role} ")][1 - ACTIVE :]
        with storing(self.folder):
            # Services first: no caller may have a token that is not accepted yet.
            self._write(
                [*(line for line in lines if not line.startswith(f"{role} ")), *mine, f"{role} {digest(fresh)}"]
            )
            write_private(self.path_of(role), fresh + "\n")

    def retire(self, role: Role) -> None:
        """Accept only the current token of a role. Raises: StorageError, AccessError."""
        current = f"{role} {digest(self._token(role))}"
        with storing(self.folder):
            self._write([*(line for line in self._lines() if not line.startswith(f"{role} ")), current])

    def _token(self, role: Role) -> str:
        return FileToken(self.path_of(role))()

    def _lines(self) -> list[str]:
        return self.accepted_path.read_text().splitlines() if self.accepted_path.exists() else []

    def _write(self, lines: Iterable[str]) -> None:
        write_private(self.accepted_path, "".join(f"{line}\n" for line in lines))


def set_of_run(run: Path) -> TokenSet:
    """The tokens of a run's services: its own, or the set that BAPO_TOKEN_SET names."""
    return TokenSet(os.environ.get(SET) or run / FOLDER)


def write_private(path: Path, text: str) -> None:
    """Replace a private file in a private folder. Raises: OSError."""
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    path.parent.mkdir(exist_ok=True, mode=stat.S_IRWXU)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, stat.S_IRUSR | stat.S_IWUSR)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)  # otherwise the file may be empty after a power failure
    os.replace(temporary, path)


def find_tokens(run: Path, process: str) -> None:
    """Set the token environment for a manually started process of a run, as the launcher does."""
    given = {TOKEN, TOKEN_FILE, ACCEPTED, ACCEPTED_FILE} & os.environ.keys()
    tokens = TokenSet(run / FOLDER)
    if not given and os.access(tokens.accepted_path, os.R_OK):
        os.environ.update(tokens.variables_of(process))


def token_for_run(run: Path) -> Token | None:
    """Token of a command for the services of a run: from the environment, else the run's operator token.

    Returns: None for a run without tokens. Raises: AccessError if the run belongs to another user.
    """
    if os.environ.get(TOKEN_FILE) or os.environ.get(TOKEN):
        return own_token()
    path = TokenSet(run / FOLDER).path_of(Role.OPERATOR)
    try:
        if not path.exists():
            return None
        token = FileToken(path)
        token()
    except PermissionError as error:
        raise AccessError(
            f"{path} can only be read by the owner of the run; get a viewer token and set {TOKEN_FILE} to its file"
        ) from error
    return token
