"""Talk to the rollout server: give its workers new weights, count them, change their number.

    GET  /workers            {"workers": [WorkerStatus...], "num_wanted": N}
    PUT  /workers            {"num": N}
    GET  /weights            {"version": newest version that was published, or null}
    PUT  /weights/files/..   a piece of a file that the server cannot read itself (`bapo.transport.rollout_client`)
    POST /weights            WeightUpdate -> {"seconds": {worker_id: s}}; with ?rollback=true also an older version
    GET  /readyz             200 when at least one worker samples

Every call may be repeated without harm, so every call is, until a deadline.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from bapo.core.errors import ContractError, WeightMismatchError, WeightsAbsentError
from bapo.core.types import Canary, WeightUpdate
from bapo.runtime.auth.api_tokens import Token
from bapo.transport.service_client import Answer, Body, Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What the fleet knows of one worker."""

    worker_id: str
    state: str
    """starting -> ready -> draining -> dead; a dead worker is listed until its replacement starts."""
    policy_version: int
    """Version that it samples with; 0 while it starts."""
    tokens_per_s: float
    """Sampled tokens per second over the last seconds."""
    inflight: int
    """Groups claimed and not yet acknowledged by the buffer."""
    restarts: int
    """How many workers died in this place before it."""
    pid: int
    rss_bytes: int
    num_groups: int = 0
    """Groups that the buffer has acknowledged to it."""
    num_tokens: int = 0
    """Tokens that it has sampled."""
    num_failed: int = 0
    """Groups that it reported as failed."""


class RolloutClient:
    """One rollout server. Safe to share between threads."""

    def __init__(
        self, url: str, *, timeout_s: float = 10.0, retry_s: float = 30.0, token: str | Token | None = None
    ) -> None:
        """
        Args:
            timeout_s: longest silence of a call.
            retry_s: how long a call goes on against a server that is down.
            token: what to send; None: what BAPO_TOKEN_FILE or BAPO_TOKEN holds, if anything.
        """
        self._peer = Peer("the rollout server", url, timeout_s=timeout_s, retry_s=retry_s, token=token)
        self.url = self._peer.url

    def update_weights(self, update: WeightUpdate, *, timeout_s: float, rollback: bool = False) -> dict[str, float]:
        """Give all workers new weights; returns when each of them samples with them, or is being replaced.

        A rollout server that cannot read the file is sent it first.

        Args:
            rollback: accept a version older than the newest one: a learner that resumed from a checkpoint.
        Returns: worker id -> seconds that it took. A worker that is missing here is replaced by the fleet, and its
            replacement loads this update before it samples.
        Raises: StaleWeightsError for an older version; WeightMismatchError when the file is not what the update
            says; UnavailableError.
        """
        query = {"rollback": "true"} if rollback else None

        def announce() -> Answer:
            return self._peer.call(
                "POST", "/weights", body=weight_update_map(update), query=query, wait_s=timeout_s, retry_s=timeout_s
            )

        try:
            answer = announce()
        except WeightsAbsentError:
            send_file(self._peer, Path(update.path), update.digest)
            answer = announce()
        return {str(worker): float(seconds) for worker, seconds in answer.json()["seconds"].items()}

    def workers(self) -> list[WorkerStatus]:
        """All workers, also those that start or have just died."""
        return [worker_status_from_map(fields) for fields in self._peer.call("GET", "/workers").json()["workers"]]

    def scale(self, num: int) -> None:
        """Ask for `num` workers; returns at once. Raises: ConfigError beyond `rollout.max_workers`."""
        self._peer.call("PUT", "/workers", body={"num": num})

    def wait_ready(self, timeout_s: float) -> None:
        """Return when at least one worker samples. Raises: DeadlineError with the server's reason."""
        self._peer.wait_ready(timeout_s, "no rollout worker was ready")


def weight_update_map(update: WeightUpdate) -> dict[str, Any]:
    """An update as JSON values."""
    return asdict(update)


def weight_update_from_map(fields: Mapping[str, Any]) -> WeightUpdate:
    """Inverse of `weight_update_map`. Raises: ContractError."""
    try:
        canary = fields["canary"]
        return WeightUpdate(
            version=int(fields["version"]),
            path=str(fields["path"]),
            digest=str(fields["digest"]),
            num_bytes=int(fields["num_bytes"]),
            canary=Canary(
                token_ids=tuple(int(token) for token in canary["token_ids"]),
                logprobs=tuple(float(value) for value in canary["logprobs"]),
                tolerance=float(canary["tolerance"]),
            ),
            url=str(fields.get("url", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"weight update is malformed: {error!r}") from error


def worker_status_from_map(fields: Mapping[str, Any]) -> WorkerStatus:
    """A status from its JSON map. Raises: ContractError."""
    try:
        return WorkerStatus(**fields)
    except TypeError as error:
        raise ContractError(f"worker status is malformed: {error}") from error


# Weight files between hosts that share no folder: in pieces over HTTP, to the rollout server and from it.
#
#     learner --PUT /weights/files/{digest}?offset=O--> rollout server --GET ...?offset=O&length=L--> each worker's
# host
#
# Every piece may be sent or asked for again, so a connection that breaks costs one piece; what had arrived stays, and
# whoever asks again goes on behind it. It is believed when its sha256 is the one that the learner announced.

PIECE_BYTES = 32 << 20
"""Both sides hold one piece in memory."""
PIECE_S = 60.0
"""Longest silence while one piece is on its way: half a megabyte per second."""


class Server(Protocol):
    """What is used of `bapo.transport.service_client.Peer`."""

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
