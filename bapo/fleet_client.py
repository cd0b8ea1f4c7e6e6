"""Talk to the rollout server: give its workers new weights, count them, change their number.

    GET  /workers            {"workers": [WorkerStatus...], "num_wanted": N}
    PUT  /workers            {"num": N}
    GET  /weights            {"version": newest version that was published, or null}
    POST /weights            WeightUpdate -> {"seconds": {worker_id: seconds}}; `?rollback=true` accepts an older version
    GET  /readyz             200 when at least one worker samples

An error travels as {"error": class name in `bapo.errors`, "message": text} and is raised again as the same class.
Every call is idempotent, so every call is repeated while the server is away, until a deadline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import urllib3

from bapo.errors import BY_NAME, BapoError, ContractError, DeadlineError, UnavailableError
from bapo.types import Canary, WeightUpdate

RETRY_PAUSE_S = 0.2
CONNECT_TIMEOUT_S = 5.0


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

    def __init__(self, url: str, *, timeout_s: float = 10.0, retry_s: float = 30.0) -> None:
        """`timeout_s`: of one answer; `retry_s`: how long to try again while the server does not answer."""
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._pool = urllib3.PoolManager(retries=False)

    def update_weights(self, update: WeightUpdate, *, timeout_s: float, rollback: bool = False) -> dict[str, float]:
        """Give all workers new weights; returns when each of them samples with them, or is being replaced.

        Args:
            rollback: accept a version older than the newest one: a learner that resumed from a checkpoint.
        Returns: worker id -> seconds that it took. A worker that is missing here is replaced by the fleet, and its
            replacement loads this update before it samples.
        Raises: StaleWeightsError for an older version; WeightMismatchError when the file is not what the update
            says; DeadlineError, UnavailableError.
        """
        path = "/weights?rollback=true" if rollback else "/weights"
        answer = self._call("POST", path, weight_update_map(update), timeout_s=timeout_s, retry_s=timeout_s)
        return {str(worker): float(seconds) for worker, seconds in answer["seconds"].items()}

    def published_version(self) -> int | None:
        """Newest version that was given to the workers; None before the first update."""
        version = self._call("GET", "/weights")["version"]
        return None if version is None else int(version)

    def workers(self) -> list[WorkerStatus]:
        """All workers, also those that start or have just died."""
        return [worker_status_from_map(fields) for fields in self._call("GET", "/workers")["workers"]]

    def scale(self, num: int) -> None:
        """Ask for `num` workers; returns at once. Raises: ConfigError beyond `rollout.max_workers`."""
        self._call("PUT", "/workers", {"num": num})

    def wait_ready(self, timeout_s: float) -> None:
        """Return when at least one worker samples. Raises: DeadlineError with the server's reason."""
        deadline = time.monotonic() + timeout_s
        reason = "no answer yet"
        while time.monotonic() < deadline:
            try:
                self._call("GET", "/readyz", retry_s=0.0)
            except UnavailableError as error:
                reason = str(error)
            else:
                return
            time.sleep(RETRY_PAUSE_S)
        raise DeadlineError(f"no rollout worker was ready after {timeout_s:.0f} s: {reason}")

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        retry_s: float | None = None,
    ) -> dict[str, Any]:
        """One request, repeated while the server is unavailable. Raises: the error that the server named."""
        deadline = time.monotonic() + (self._retry_s if retry_s is None else retry_s)
        while True:
            try:
                return self._once(method, path, body, self._timeout_s if timeout_s is None else timeout_s)
            except UnavailableError:
                if time.monotonic() + RETRY_PAUSE_S >= deadline:
                    raise
                time.sleep(RETRY_PAUSE_S)

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        where = f"{method} {self._url}{path}"
        timeout = urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s)
        try:
            answer = self._pool.request(method, self._url + path, json=body, timeout=timeout)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise DeadlineError(f"{where}: the rollout server did not answer within {timeout_s:.0f} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{where}: the rollout server cannot be reached: {error}") from error
        fields = _json_map(where, answer.data)
        if answer.status < 400:
            return fields
        raise BY_NAME.get(fields.get("error", ""), BapoError)(fields.get("message", f"{where}: HTTP {answer.status}"))


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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"weight update is malformed: {error!r}") from error


def worker_status_from_map(fields: Mapping[str, Any]) -> WorkerStatus:
    """A status from its JSON map. Raises: ContractError."""
    try:
        return WorkerStatus(**fields)
    except TypeError as error:
        raise ContractError(f"worker status is malformed: {error}") from error


def _json_map(where: str, data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise UnavailableError(f"{where}: the answer is no JSON, so it is not the rollout server's: {error}") from error
    if not isinstance(fields, dict):
        raise ContractError(f"{where}: the answer is a {type(fields).__name__}, not a map")
    return fields
