"""Crash-safe files: JSON lines that are appended, small files that are replaced atomically.

A torn last line (its writer was killed) is dropped by readers and by the next writer. Files are replaced by a rename,
so that no reader sees a partial file. Disk errors become a StorageError with the path.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from bapo.core.errors import ConfigError, StorageError
from bapo.runtime.run_directory.rows import object_of

FREE_SPACE = "free space or choose another run.root, then `bapo train --resume`"
ELSEWHERE = "free space, or use a file on another disk"
_ADVICE: dict[int | None, str] = {
    errno.ENOENT: "create its folder first, or use an existing folder",
    errno.ENOTDIR: "a part of that path is a file",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a location that this user may write to"),
}


@contextmanager
def storing(path: Path, *refusals: type[Exception], when_full: str = FREE_SPACE) -> Iterator[None]:
    """Convert disk errors to a StorageError with the path.

    Args:
        refusals: error classes other than OSError that a library uses for disk errors.
        when_full: remedy for a full or broken disk; the default is for files of a run.
    """
    caught: tuple[type[Exception], ...] = (OSError, *refusals)
    try:
        yield
    except caught as error:
        reason = getattr(error, "strerror", None) or error
        advice = _ADVICE.get(getattr(error, "errno", None), when_full)
        raise StorageError(f"cannot write {path}: {reason}; {advice}") from error


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold an exclusive lock in this block; released by the kernel on exit.

    Args:
        path: of the lock file, in an existing folder; refusal: message if another process holds the lock.
    Raises: ConfigError with the message, StorageError.
    """
    try:
        file = path.open("a")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(refusal) from error
        yield


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Replace a small file atomically. Raises: OSError (use `storing`)."""
    # Containers that share a volume may have the same process ids.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """fsync a file or folder. Raises: OSError (use `storing`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append an object as a line. Raises: StorageError."""
    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
    with storing(path), path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        end = _whole_lines_end(size, file)
        if end < size:
            file.truncate(end)
        file.write(line)


def _whole_lines_end(size: int, file: IO[bytes]) -> int:
    """Offset after the last newline; what follows is a torn line."""
    if size == 0:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def read_content(path: Path) -> bytes:
    """Read a whole file. Raises: StorageError if it is unreadable, or not a regular file."""
    try:
        if path.exists() and not path.is_file():
            raise StorageError(f"cannot read {path}: it is not a file")
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def read_lines(path: Path, kind: type[msgspec.Struct] | None = None) -> list[dict[str, Any]]:
    """All complete lines; empty if there is no file.

    Args:
        kind: type of the lines (`bapo.runtime.run_directory.rows`).
    Raises: RecordError for a damaged line other than the last; StorageError.
    """
    if not os.path.lexists(path):
        return []
    content = read_content(path)
    whole = content[: content.rfind(b"\n") + 1]
    return [object_of(line, f"{path} line {number}", kind) for number, line in enumerate(whole.splitlines(), start=1)]


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only the lines for which `keep` is true. Raises: StorageError."""
    if not path.exists():
        return
    rows = [row for row in read_lines(path) if keep(row)]
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
    with storing(path):
        replace_file(path, "".join(lines).encode())


class Lines:
    """Follows a JSONL file."""

    def __init__(self, path: Path, kind: type[msgspec.Struct]) -> None:
        """
        Args:
            path: the file need not exist yet.
            kind: type of the lines (`bapo.runtime.run_directory.rows`).
        """
        self._path = path
        self._kind = kind
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._number = 0

    def is_another_file(self) -> bool:
        """Whether the file was replaced, truncated or deleted since it was last read."""
        if self._identity is None:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset

    def read(self) -> Iterator[dict[str, Any]]:
        """New complete lines; a partial one is left for later.

        The caller may stop between two lines and continue later.
        Raises: ContractError for a damaged line, StorageError.
        """
        try:
            if self._path.exists() and not self._path.is_file():
                raise StorageError(f"cannot read {self._path}: it is not a file")
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror}") from error
        with file:
            found = os.fstat(file.fileno())
            self._identity = (found.st_dev, found.st_ino)
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._number += 1
                yield object_of(line, f"{self._path} line {self._number}", self._kind)
