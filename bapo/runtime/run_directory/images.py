"""RUN/images/<sha256>: images of prompts, one file per image, named by the digest of its content.

Scheduler and evaluator write an image before they request a group with it; readers check its digest.
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
"""First bytes of a file -> media type."""


class ImageFiles:
    """The images of one run. Any process may write an image: all write the same bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, prompts: Iterable[Prompt], image: Callable[[str], bytes]) -> int:
        """Write the missing images of these prompts; returns their number. Raises: StorageError."""
        missing = {digest for prompt in prompts for digest in prompt.images if not self.path(digest).is_file()}
        for digest in missing:
            self.write(digest, image(digest))
        return len(missing)

    def write(self, digest: str, data: bytes) -> None:
        """Raises: ContractError if the bytes do not have this digest; StorageError."""
        path = self.path(digest)
        _require(digest, data)
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)

    def read(self, digest: str) -> bytes:
        """Raises: StorageError if the file cannot be read; ContractError if it was changed."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StorageError(f"the image {path} cannot be read: {error.strerror}") from error
        _require(digest, data)
        return data

    def path(self, digest: str) -> Path:
        """Raises: ContractError if it is not a digest: it could be another path."""
        if not re.fullmatch(IMAGE_DIGEST, digest) or len(digest) > 64:
            raise ContractError(f"not a sha256 digest: {digest[:80]!r}")
        return self._folder / digest


def _require(digest: str, data: bytes) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ContractError(f"the image {digest[:16]}... has the digest {found[:16]}... instead")


def media_type(data: bytes) -> str:
    """Media type for a browser; empty if it is neither PNG nor JPEG."""
    return next((kind for start, kind in TYPES.items() if data.startswith(start)), "")
