"""How long re-evaluation rounds take, as the scheduler sees it: it looks about once a second."""

from __future__ import annotations

from collections.abc import Callable

from bapo.clients import BufferStatus
from bapo.telemetry import Telemetry


class RoundClock:
    """Times the rounds that this process issued; how far they lag is known of all."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float]) -> None:
        self._issued = telemetry.counter("bapo_reevaluation_rounds_total")
        self._seconds = telemetry.histogram("bapo_reevaluation_duration_seconds")
        self._lag = telemetry.gauge("bapo_reevaluation_lag_steps")
        self._now = now
        self._began: dict[int, float] = {}

    def issued(self, step: int, num_requests: int) -> None:
        """The round of this step was given to the buffer."""
        self._issued.labels(outcome="asked" if num_requests else "empty").inc()
        if num_requests:
            self._began[step] = self._now()

    def look(self, status: BufferStatus) -> None:
        """A round that the buffer lists no more was assembled: all of its requests are settled."""
        is_open = [step for step, left in status.reevaluation_rounds.items() if left]
        for step in [step for step in self._began if step not in is_open]:
            self._seconds.observe(self._now() - self._began.pop(step))
        self._lag.set(max(0, status.step - min(is_open)) if is_open else 0)
