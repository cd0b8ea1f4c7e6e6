"""A set of tokens on disk: one folder that only its owner can open, one folder inside it for each holder.

    FOLDER/<role>/token        what a process of the role sends
           accepted/tokens     "role digest" lines: what services accept; holds no token

Each part is a folder of its own, so that a container can be given one of them and nothing else. A run that the
launcher starts has its set in RUN/tokens.

Rotation: `rotate` writes a new token of a role and keeps the digest of the one before, so that both are active while
processes change over (they read their file again by themselves); `retire` forgets the older one.
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
"""Of a run."""
SET = "BAPO_TOKEN_SET"
"""Variable that names a set which exists already, for a launcher that joins services started by others."""
ROLES = {
    "rollout_server": Role.WORKER,
    "learner": Role.LEARNER,
    "scheduler": Role.SCHEDULER,
    "evaluator": Role.EVALUATOR,
    "dashboard": Role.VIEWER,
}
"""Whose token a process gets, by the last part of its module's name. The buffer service calls no other service."""
TOKEN_BYTES = 32
ACTIVE = 2
"""Tokens of one role that may be valid at the same time."""


class TokenSet:
    """One folder of tokens."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def accepted_path(self) -> Path:
        return self.folder / "accepted" / "tokens"

    def path_of(self, role: Role) -> Path:
        return self.folder / role.value / "token"

    def variables_of(self, process: str) -> dict[str, str]:
        """What a process accepts, and its own token alone: by file, so that no listing of processes shows it."""
        variables = {ACCEPTED_FILE: str(self.accepted_path.resolve())}
        role = ROLES.get(process.rpartition(".")[2])
        return variables if role is None else variables | {TOKEN_FILE: str(self.path_of(role).resolve())}

    def create(self) -> None:
        """Make what is not there yet; tokens that exist stay. Raises: StorageError."""
        with storing(self.folder):
            for role in Role:
                if not self.path_of(role).exists():
                    write_private(self.path_of(role), secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            lines = self._lines()
            known = {line.partition(" ")[2] for line in lines}
            current = [f"{role} {digest(self._token(role))}" for role in Role]
            self._write([*lines, *(line for line in current if line.partition(" ")[2] not in known)])

    def rotate(self, role: Role) -> None:
        """Give a role a new token; the one before stays valid until `retire`. Raises: StorageError, ConfigError."""
        lines = self._lines()
        if not lines:
            raise ConfigError(f"{self.folder} holds no set of tokens; make one with `bapo tokens create {self.folder}`")
        fresh = secrets.token_urlsafe(TOKEN_BYTES)
        mine = [line for line in lines if line.startswith(f"{role} ")][1 - ACTIVE :]
        with storing(self.folder):
            # The services first: no caller may hold a token that is not accepted yet.
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
    """Replace a file that only its owner may read, in a folder that only its owner may open. Raises: OSError."""
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    path.parent.mkdir(exist_ok=True, mode=stat.S_IRWXU)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, stat.S_IRUSR | stat.S_IWUSR)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)  # after a power failure an empty file would be no token
    os.replace(temporary, path)


def find_tokens(run: Path, process: str) -> None:
    """Let a process of a run that is started by hand have what the launcher would have given it."""
    given = {TOKEN, TOKEN_FILE, ACCEPTED, ACCEPTED_FILE} & os.environ.keys()
    tokens = TokenSet(run / FOLDER)
    if not given and os.access(tokens.accepted_path, os.R_OK):
        os.environ.update(tokens.variables_of(process))


def token_for_run(run: Path) -> Token | None:
    """What a command sends to the services of a run: its environment's token, else the operator's of the run.

    Returns: None for a run without tokens. Raises: AccessError when the run's token belongs to another user.
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
            f"{path} can only be read by the owner of the run; ask for a viewer's token and name it in {TOKEN_FILE}"
        ) from error
    return token
