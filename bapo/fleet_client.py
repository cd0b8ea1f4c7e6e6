"""Talk to the rollout server: give its workers new weights, count them, change their number.

    GET  /workers            {"workers": [WorkerStatus...], "num_wanted": N}
    PUT  /workers            {"num": N}
    GET  /weights            {"version": newest version that was published, or null}
    PUT  /weights/files/..   a piece of a file that the server cannot read itself (`bapo.weight_transport`)
    POST /weights            WeightUpdate -> {"seconds": {worker_id: s}}; with ?rollback=true also an older version
    GET  /readyz             200 when at least one worker samples

Every call may be repeated without harm, so every call is, until a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bapo.errors import ContractError, WeightsAbsentError
from bapo.peer import Answer, Peer
from bapo.tokens import Token
from bapo.types import Canary, WeightUpdate
from bapo.weight_transport import send_file


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


class FleetClient:
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
