"""Weight files on the rollout server: read from the learner's path or received in chunks, and served to workers.

    path readable here    used directly, and served to hosts that cannot read it
    not readable          WeightsAbsentError; the learner uploads the file in chunks, and announces it again

Only announced or complete files are served, by digest: workers send no paths. A file must start with a safetensors
header, so that the learner's token does not give access to other files of this host.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bapo.core.errors import ContractError, WeightMismatchError, WeightsAbsentError
from bapo.core.types import WeightUpdate
from bapo.runtime.file_digest import digest_of
from bapo.runtime.run_directory.files import storing
from bapo.transport.rollout_client import PIECE_BYTES
from rollout_server.weights.receive import can_be_read, check_size

log = logging.getLogger(__name__)

NUM_KNOWN = 2
"""The newest file, and the one that a worker may still be reading."""
MAX_BYTES = 1 << 62
"""Offsets of files have 63 bits."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class WeightRelay:
    """Thread-safe."""

    def __init__(self, folder: Path, url: Callable[[], str]) -> None:
        """
        Args:
            folder: directory of received files.
            url: this rollout server, as workers on other hosts reach it.
        """
        self._folder = folder
        self._url = url
        self._lock = threading.Lock()
        self._known: dict[str, Path] = {}

    def locate(self, update: WeightUpdate) -> WeightUpdate:
        """The update with a path that is readable here, and the URL of this server.

        Raises: WeightsAbsentError: the file must be uploaded; WeightMismatchError if it is not the announced file.
        """
        sent = self._path(update.digest)
        if not can_be_read(update.path) and sent.is_file():
            update = replace(update, path=str(sent))
        check_size(update)
        _require_safetensors(Path(update.path))
        with self._lock:
            self._known.pop(update.digest, None)
            self._known[update.digest] = Path(update.path)
            while len(self._known) > NUM_KNOWN:
                old = self._known.pop(next(iter(self._known)))
                if old.parent == self._folder and old.name.startswith("sent-"):
                    old.unlink(missing_ok=True)
        return replace(update, url=self._url())

    def receive(self, digest: str, offset: int, size: int, data: bytes) -> int:
        """Append a chunk. Returns: bytes received so far, i.e. the offset of the next chunk.

        Raises: ContractError for an invalid chunk, or if the digest of the file differs; StorageError.
        """
        path = self._path(digest)
        if not (0 <= offset <= size < MAX_BYTES and data):
            raise ContractError(f"{len(data)} bytes at offset {offset} are not a chunk of a file of {size} bytes")
        if path.is_file():
            return size
        part = path.with_suffix(".part")
        with self._lock, storing(part):
            self._folder.mkdir(parents=True, exist_ok=True)
            have = part.stat().st_size if part.exists() else 0
            if offset != have:
                return have
            with part.open("ab") as file:
                file.write(data)
            have += len(data)
            if have < size:
                return have
            found = digest_of(part)
            if found != digest or have != size:
                part.unlink()
                raise ContractError(f"the chunks of {digest[:16]}... have {have} bytes and the digest {found[:16]}...")
            os.replace(part, path)
        log.info("received weights digest=%s... bytes=%d", digest[:16], size)
        return size

    def read(self, digest: str, offset: int, length: int) -> bytes:
        """Read a chunk of a file. Raises: WeightsAbsentError; ContractError for an invalid range."""
        if not (0 < length <= PIECE_BYTES and 0 <= offset < MAX_BYTES):
            raise ContractError(f"chunk length must be 1 to {PIECE_BYTES} bytes, got {length} at offset {offset}")
        with self._lock:
            path = self._known.get(digest)
        try:
            with (path or self._path(digest)).open("rb") as file:
                return os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise WeightsAbsentError(f"weights {digest[:16]}... are not on this host: {error.strerror}") from error

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ContractError(f"not a digest: {digest[:80]!r}")
        return self._folder / f"sent-{digest}.safetensors"


def _require_safetensors(path: Path) -> None:
    """Check the start of the file: 8 bytes, the length of a JSON header.

    Raises: WeightMismatchError; WeightsAbsentError.
    """
    try:
        with path.open("rb") as file:
            length, start = int.from_bytes(file.read(8), "little"), file.read(1)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise WeightsAbsentError(f"{path} is not readable on this host: {error.strerror}") from error
    if start != b"{" or length > size - 8:
        raise WeightMismatchError(f"{path} is not a safetensors file")
