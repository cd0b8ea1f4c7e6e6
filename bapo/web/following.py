"""What a run directory has written since the last look, without reading anything twice.

A run that resumes drops the records behind its checkpoint and writes them again. metrics.jsonl is then another file
(it is replaced by a rename), which is how a follower notices that what it has read no longer holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bapo.errors import StorageError
from bapo.record_rows import object_of


class Lines:
    """The lines of one JSONL file as they are appended."""

    def __init__(self, path: Path, kind: type[msgspec.Struct] | None) -> None:
        """
        Args:
            path: the file need not exist yet.
            kind: what every line is (`bapo.record_rows`); None: any object.
        """
        self._path = path
        self._kind = kind
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._number = 0

    def is_another_file(self) -> bool:
        """Whether what was read so far is not what the file holds now: it was replaced, cut or removed."""
        if self._identity is None:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset

    def read(self) -> Iterator[dict[str, Any]]:
        """The whole lines behind those that were taken; one that is being written is left for later.

        A caller may stop between two lines and go on later. Raises: ContractError for a damaged line, StorageError.
        """
        try:
            if self._path.exists() and not self._path.is_file():
                raise StorageError(f"cannot read {self._path}: it is no file")
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
