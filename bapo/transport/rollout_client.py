"""Client of the rollout server: publish weights to its workers, list the workers, scale them.

    GET  /workers            {"workers": [WorkerStatus...], "num_wanted": N, "agents": AgentsStatus or null}
    PUT  /workers            {"num": N}
    GET  /weights            {"version": newest version that was published, or null}
    PUT  /weights/files/..   a piece of a file that the server cannot read itself
    GET  /images/{digest}    an image of a prompt
    POST /weights/transfer   WeightTransfer -> as POST /weights, while the learner sends to the workers' engines
    POST /weights            WeightUpdate -> {"seconds": {worker_id: s}}; with ?rollback=true also an older version
    GET  /readyz             200 when at least one worker samples

Weight files between hosts without a shared directory travel in pieces, which are idempotent; an interrupted transfer
continues where it ended, and a file is used when its digest is the announced one:

    learner --PUT /weights/files/{digest}?offset=O--> rollout server --GET ...?offset=O&length=L--> host of a worker
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bapo.core.errors import WeightMismatchError, WeightsAbsentError
from bapo.core.json_values import from_map, to_map
from bapo.core.types import WeightTransfer, WeightUpdate
from bapo.runtime.auth.api_tokens import Token
from bapo.runtime.file_digest import digest_of
from bapo.transport.service_client import Answer, ServiceClient


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker, as the fleet sees it."""

    worker_id: str
    state: str
    """starting -> ready -> draining -> dead; dead until its replacement starts."""
    policy_version: int
    """Version of its weights; 0 while it starts."""
    tokens_per_s: float
    """Sampled tokens per second, over the last 10 s."""
    inflight: int
    """Groups claimed and not yet acknowledged by the buffer."""
    restarts: int
    """Workers that died in its slot before it."""
    pid: int
    rss_bytes: int
    num_groups: int = 0
    """Groups that the buffer has acknowledged."""
    num_tokens: int = 0
    """Sampled tokens."""
    num_failed: int = 0
    """Groups reported as failed."""
    waiting_for: str = ""
    """What its groups wait for outside of the run, such as a teacher that is away; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsStatus:
    """The episodes of agents at one rollout server."""

    base_url: str
    """That agents call."""
    num_open: int
    """Episodes that agents have."""
    num_waiting: int
    """Episodes that wait for an agent."""
    failed: Mapping[str, int]
    """Reason -> failed attempts since this server started."""
    last_failure: str = ""
    """Reason and words of the newest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Who samples."""

    workers: list[WorkerStatus]
    """Including starting and dead ones."""
    agents: AgentsStatus | None = None
    """None for a run without, and before their address is served."""


class RolloutClient:
    """One rollout server. Thread-safe."""

    def __init__(
        self, url: str, *, timeout_s: float = 10.0, retry_s: float = 30.0, token: str | Token | None = None
    ) -> None:
        """
        Args:
            timeout_s: longest silence of a call.
            retry_s: how long calls are repeated while the server is down.
            token: API token; None: from BAPO_TOKEN_FILE or BAPO_TOKEN, if set.
        """
        self._service = ServiceClient("the rollout server", url, timeout_s=timeout_s, retry_s=retry_s, token=token)
        self.url = self._service.url

    def update_weights(self, update: WeightUpdate, *, timeout_s: float, rollback: bool = False) -> dict[str, float]:
        """Publish weights; returns when every worker samples with them or is being replaced.

        The file is sent first to a rollout server that cannot read it.

        Args:
            rollback: accept an older version: the learner has resumed from a checkpoint.
        Returns: worker id -> seconds. A worker that is missing is being replaced; its replacement loads this update.
        Raises: StaleWeightsError for an older version; WeightMismatchError when the file is not the announced one;
            UnavailableError.
        """
        query = {"rollback": "true"} if rollback else None

        def announce() -> Answer:
            return self._service.call(
                "POST", "/weights", body=to_map(update), query=query, wait_s=timeout_s, retry_s=timeout_s
            )

        try:
            answer = announce()
        except WeightsAbsentError:
            send_file(self._service, Path(update.path), update.digest)
            answer = announce()
        return {str(worker): float(seconds) for worker, seconds in answer.json()["seconds"].items()}

    def transfer_weights(self, transfer: WeightTransfer, *, timeout_s: float) -> dict[str, float]:
        """Have these workers' engines receive weights that this process sends; called while it sends.

        Returns: worker id -> seconds, of the workers that have verified them.
        Raises: ContractError if other workers are ready than these, so that none receives; UnavailableError.
        """
        answer = self._service.call("POST", "/weights/transfer", body=to_map(transfer), wait_s=timeout_s, retry_s=0.0)
        return {str(worker): float(seconds) for worker, seconds in answer.json()["seconds"].items()}

    def status(self) -> FleetStatus:
        """Its workers and agents."""
        found = self._service.call("GET", "/workers").json()
        return from_map({name: found.get(name) for name in ("workers", "agents")}, FleetStatus, "workers")

    def workers(self) -> list[WorkerStatus]:
        """All workers, including starting and dead ones."""
        return self.status().workers

    def scale(self, num: int) -> None:
        """Set the number of workers; returns immediately. Raises: ConfigError beyond `rollout.max_workers`."""
        self._service.call("PUT", "/workers", body={"num": num})

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until at least one worker samples. Raises: DeadlineError with the reason."""
        self._service.wait_ready(timeout_s, "no rollout worker was ready")


PIECE_BYTES = 32 << 20
"""Chunk size; each side keeps one chunk in memory."""
PIECE_S = 60.0
"""Longest silence during one piece: half a megabyte per second."""


def send_file(server: ServiceClient, path: Path, digest: str) -> None:
    """Send a file that the rollout server cannot read. Raises: the error of the server; OSError."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        offset = 0
        while offset < size:
            with memoryview(whole) as view, view[offset : offset + PIECE_BYTES] as piece:
                query = {"offset": str(offset), "size": str(size)}
                answer = server.call("PUT", f"/weights/files/{digest}", body=piece, query=query, wait_s=PIECE_S)
            # What the server has: more than this piece, if an earlier attempt got further.
            offset = int(answer.json()["num_bytes"])


def fetch_file(server: ServiceClient, digest: str, num_bytes: int, target: Path) -> None:
    """Download the file with this digest to `target`, atomically; continues an earlier attempt. One caller at a time.

    Raises: WeightMismatchError when the digest or size differs; the error of the server; OSError.
    """
    part = part_of(target)
    with part.open("ab") as file:
        if file.tell() > num_bytes:
            file.truncate(0)
        for offset in range(file.seek(0, os.SEEK_END), num_bytes, PIECE_BYTES):
            query = {"offset": str(offset), "length": str(min(PIECE_BYTES, num_bytes - offset))}
            file.write(server.call("GET", f"/weights/files/{digest}", query=query, wait_s=PIECE_S).body)
    if part.stat().st_size != num_bytes or digest_of(part) != digest:
        part.unlink()
        raise WeightMismatchError(f"the file sent by the rollout server does not have the digest {digest[:16]}...")
    os.replace(part, target)


def part_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")
