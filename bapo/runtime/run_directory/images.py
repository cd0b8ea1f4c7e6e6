"""RUN/images/<sha256>: the images of prompts, each file once, named by its content.

Scheduler and evaluator write an image before they ask for a group that shows it; whoever reads one checks its digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from bapo.core.errors import ContractError, StorageError
from bapo.core.types import IMAGE_DIGEST, Prompt
from bapo.runtime.run_directory.files import replace_file, storing

FOLDER = "images"
TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg"}
"""By the beginning of a file."""


class ImageFiles:
    """The images of one run. Any process may write one: all write the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, prompts: Iterable[Prompt], image: Callable[[str], bytes]) -> int:
        """Write the images of these prompts that are not there; returns their number. Raises: StorageError."""
        missing = {digest for prompt in prompts for digest in prompt.images if not self.path(digest).is_file()}
        for digest in missing:
            self.write(digest, image(digest))
        return len(missing)

    def write(self, digest: str, data: bytes) -> None:
        """Raises: ContractError for the bytes of another image; StorageError."""
        path = self.path(digest)
        _require(digest, data)
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)

    def read(self, digest: str) -> bytes:
        """Raises: StorageError when it is not there; ContractError when it was changed."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StorageError(f"the image {path} cannot be read: {error.strerror}") from error
        _require(digest, data)
        return data

    def path(self, digest: str) -> Path:
        """Raises: ContractError for anything but a digest: it could be another path."""
        if not re.fullmatch(IMAGE_DIGEST, digest) or len(digest) > 64:
            raise ContractError(f"no sha256: {digest[:80]!r}")
        return self._folder / digest


def _require(digest: str, data: bytes) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ContractError(f"the image {digest[:16]}... has the content of {found[:16]}...")


def media_type(data: bytes) -> str:
    """For a browser; empty for neither PNG nor JPEG."""
    return next((kind for start, kind in TYPES.items() if data.startswith(start)), "")
