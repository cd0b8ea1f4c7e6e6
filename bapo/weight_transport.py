"""Weight files between hosts that share no folder: in pieces over HTTP, to the rollout server and from it.

    learner --PUT /weights/files/{digest}?offset=O--> rollout server --GET ...?offset=O&length=L--> each worker's host

Every piece may be sent or asked for again, so a connection that breaks costs one piece; what had arrived stays, and
whoever asks again goes on behind it. It is believed when its sha256 is the one that the learner announced.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import BinaryIO, Protocol

from bapo.errors import WeightMismatchError
from bapo.peer import Answer, Body

PIECE_BYTES = 32 << 20
"""Both sides hold one piece in memory."""
PIECE_S = 60.0
"""Longest silence while one piece is on its way: half a megabyte per second."""


class Server(Protocol):
    """What is used of `bapo.peer.Peer`."""

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Answer: ...


def send_file(server: Server, path: Path, digest: str) -> None:
    """Give the rollout server a file that it cannot read itself. Raises: what the server answers; OSError."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        offset = 0
        while offset < size:
            with memoryview(whole) as view, view[offset : offset + PIECE_BYTES] as piece:
                query = {"offset": str(offset), "size": str(size)}
                answer = server.call("PUT", f"/weights/files/{digest}", body=piece, query=query, wait_s=PIECE_S)
            # The server says what it has: more than was sent now, if an earlier attempt came further.
            offset = int(answer.json()["num_bytes"])


def fetch_file(server: Server, digest: str, num_bytes: int, target: Path) -> None:
    """Put the file with this digest at `target`, whole or not at all. One caller at a time.

    What an earlier attempt left in `part_of(target)` is not fetched again, and what this one leaves is for the next.

    Raises: WeightMismatchError when what came is another file; what the server answers; OSError.
    """
    part = part_of(target)
    with part.open("a+b") as file:
        summed, had = _sum_of(file, num_bytes)
        for offset in range(had, num_bytes, PIECE_BYTES):
            query = {"offset": str(offset), "length": str(min(PIECE_BYTES, num_bytes - offset))}
            piece = server.call("GET", f"/weights/files/{digest}", query=query, wait_s=PIECE_S).body
            summed.update(piece)
            file.write(piece)
    if summed.hexdigest() != digest or part.stat().st_size != num_bytes:
        part.unlink()
        raise WeightMismatchError(f"what the rollout server sent is not the file with sha256 {digest[:16]}...")
    os.replace(part, target)


def part_of(target: Path) -> Path:
    """Where a file is while it arrives."""
    return target.with_name(f".{target.name}.part")


def _sum_of(file: BinaryIO, num_bytes: int) -> tuple[hashlib._Hash, int]:
    """sha256 and length of what is there; more than the whole file would be is thrown away."""
    if file.seek(0, os.SEEK_END) > num_bytes:
        file.truncate(0)
    file.seek(0)
    summed, had = hashlib.sha256(), 0
    while piece := file.read(PIECE_BYTES):
        summed.update(piece)
        had += len(piece)
    return summed, had
