"""Claims of requests, and the renewal of their leases, in two threads.

buffer --claim--> Leases, on_request        as many as there is room for, and one more claim when new weights come
Leases --renew--> buffer, on_lost           a lease that was lost: another holder samples the request
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bapo.core.errors import BapoError, UnavailableError
from bapo.core.types import RolloutRequest
from bapo.transport.buffer_client import BufferClient
from rollout_server.delivery import guarded_thread
from rollout_server.engines.base import INITIAL_VERSION
from rollout_server.leases import Leases

log = logging.getLogger(__name__)

CLAIM_WAIT_S = 0.5
"""Long poll of one claim. The holder ends it early when it gets new weights, unless the poll is open at another replica
of the buffer."""
RESERVE_SHARE = 0.25
"""Share of `max_groups_in_flight` that is claimed ahead, so that no engine waits for a claim."""
RENEWALS_PER_LEASE = 3
BUFFER_SILENCE_S = 300.0
"""The holder fails when its buffer is down for longer."""


class Claims:
    """Claims in the name of one holder, from `start` to `stop`."""

    def __init__(
        self,
        holder_id: str,
        buffer: BufferClient,
        leases: Leases,
        *,
        limit: Callable[[], int],
        lease_s: float,
        on_request: Callable[[RolloutRequest], None],
        on_lost: Callable[[str], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            limit: groups that are sampled at a time; asked for every claim.
            on_request: called with each request that is new; must return quickly.
            on_lost: called with the id of a request whose lease was lost and removed.
            on_death: called with an error that ends one of the threads.
        """
        self._holder_id, self._buffer, self._leases = holder_id, buffer, leases
        self._limit, self._lease_s = limit, lease_s
        self._on_request, self._on_lost, self._on_death = on_request, on_lost, on_death
        self._claiming, self._stopping = threading.Event(), threading.Event()
        self._version: int | None = None
        self._has_version = threading.Event()
        self._silent_since: float | None = None
        """Monotonic time of the first failed call since the last success; None if there is none."""
        self._threads: list[threading.Thread] = []

    @property
    def is_claiming(self) -> bool:
        """Whether further requests are claimed."""
        return self._claiming.is_set()

    def start(self, version: int | None = INITIAL_VERSION) -> None:
        """Start the threads. `version`: that claims ask for; None: none are claimed before `claim_for`."""
        if version is not None and self._version is None:
            self._set_version(version)
        self._claiming.set()
        for name, run in (("claim", self._claim_all), ("renew", self._renew_all)):
            thread = guarded_thread(name, run, self._on_death)
            self._threads.append(thread)
            thread.start()

    def claim_for(self, version: int) -> None:
        """Claim what needs this version from now on, without waiting for the open claim."""
        self._set_version(version)
        if not self.is_claiming:
            return
        try:
            self._buffer.end_claim(self._holder_id)
        except UnavailableError as error:
            log.debug("the open claim of %s ends by itself: %s", self._holder_id, error)

    def end(self) -> None:
        """Claim nothing more; leases are renewed until `stop`."""
        self._claiming.clear()

    def abandon(self) -> None:
        """Claim and renew nothing more: leases expire. May be called in one of the threads."""
        self._claiming.clear()
        self._stopping.set()

    def stop(self, timeout_s: float) -> None:
        """End the threads; joins them until the timeout."""
        self.abandon()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Return all leases to the queue."""
        if len(self._leases) == 0:
            return
        try:
            num = self._buffer.release(self._holder_id)
            log.info("%s released %d leases", self._holder_id, num)
        except BapoError as error:
            log.warning("%s: could not release leases, they will expire: %s", self._holder_id, error)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._has_version.set()

    def _claim_all(self) -> None:
        while self._claiming.is_set():
            if not self._has_version.wait(CLAIM_WAIT_S):
                continue
            limit = self._limit()
            reserve = max(1, round(limit * RESERVE_SHARE))
            room = self._leases.wait_for_room(
                max_sampling=limit + reserve, max_held=2 * limit + reserve, min_room=reserve, timeout_s=CLAIM_WAIT_S
            )
            if room > 0:
                # Small claims, so that idle workers share the work.
                self._claim(min(room, reserve))

    def _claim(self, limit: int) -> None:
        assert self._version is not None
        try:
            requests = self._buffer.claim(
                self._holder_id, limit=limit, policy_version=self._version, wait_s=CLAIM_WAIT_S
            )
        except UnavailableError as error:
            self._wait_for_buffer(error)
            return
        self._silent_since = None
        for request in self._leases.add(requests):
            self._on_request(request)

    def _renew_all(self) -> None:
        between_s = pause_s = self._lease_s / RENEWALS_PER_LEASE
        while not self._stopping.wait(pause_s):
            pause_s = between_s
            held = self._leases.held()
            if not held:
                continue
            try:
                kept = set(self._buffer.renew(self._holder_id, list(held)))
            except UnavailableError as error:
                self._wait_for_buffer(error)
                pause_s = 0.0  # retry immediately: after another pause the leases would have expired
                continue
            self._silent_since = None
            for request_id, lease in held.items():
                if request_id not in kept and self._leases.remove(request_id, lease) is not None:
                    log.warning("group %s: lease lost, another worker samples it", request_id)
                    self._on_lost(request_id)

    def _wait_for_buffer(self, error: UnavailableError) -> None:
        """Pause while the buffer restarts. Raises: UnavailableError after `BUFFER_SILENCE_S`."""
        # Since the first failure, not the last success: a holder without room rarely calls.
        since = self._silent_since = self._silent_since or time.monotonic()
        silent_s = time.monotonic() - since
        if silent_s > BUFFER_SILENCE_S:
            raise UnavailableError(f"the buffer service has not responded for {silent_s:.0f} s: {error}") from error
        log.warning("the buffer service has not responded for %.0f s: %s", silent_s, error)
        self._stopping.wait(1.0)
