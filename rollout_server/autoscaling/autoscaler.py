"""Observe the run, compute the desired number of workers, export it as a metric, and scale if configured to.

    autoscaling.actuator   observes   `bapo_rollout_desired_workers`   number of workers
    off                    no         the target number                set manually
    fleet                  yes        of the rule                      of the rule
    external               yes        of the rule                      room in the Ray cluster, or number of servers

With several rollout servers, each observes its own workers and counts those of the others in the buffer's status: the
desired numbers agree, and the external scaler uses the largest.

There is exactly one actuator. The metrics are exported in every mode from the start: an external scaler without them
does nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from bapo.config.autoscaling import ScalingReason
from bapo.config.tree import Config
from bapo.core.errors import BapoError
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.buffer_client import BufferClient
from bapo.transport.messages import BufferStatus
from rollout_server.autoscaling.rule import INPUTS, Observation, ScalingDecision, State, decide
from rollout_server.autoscaling.window import Moment, Window, trains
from rollout_server.fleet.fleet import Fleet

log = logging.getLogger(__name__)

POLL_S = 1.0
GAUGES = dict(
    zip(
        INPUTS,
        (
            "bapo_rollout_learner_wait_ratio",
            "bapo_rollout_idle_ratio",
            "bapo_rollout_ready_batches",
            "bapo_rollout_consume_rate",
            "bapo_rollout_produce_rate",
            "bapo_rollout_stale_ratio",
            "bapo_rollout_version_lag_steps",
        ),
        strict=True,
    )
)


class Autoscaler:
    """`run` is called by one thread."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        buffer: BufferClient,
        telemetry: Telemetry,
        *,
        room: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            room: workers that fit in the Ray cluster; None: a local node.
        """
        self._config = config
        self._fleet = fleet
        self._buffer = buffer
        self._telemetry = telemetry
        self._room = room
        self._clock = clock
        self._mode = config.autoscaling.actuator
        self._most = config.autoscaling.max_workers or config.rollout.max_workers
        self._state = State()
        self._window: Window | None = None
        self._desired = config.rollout.num_workers
        self._export(
            ScalingDecision(
                desired=self._desired, reason=ScalingReason.OFF if self._mode == "off" else ScalingReason.MEASURING
            )
        )

    @property
    def refusal(self) -> str:
        """Why the number cannot be changed manually; empty if it can."""
        if self._mode == "fleet":
            return "autoscaling.actuator = fleet sets the number of workers; use off to change it manually"
        if self._mode == "external" and self._room is not None:
            return (
                "autoscaling.actuator = external: the number of workers follows the size of the Ray cluster; "
                "add or remove hosts, or use off to change it manually"
            )
        return ""

    def run(self, ended: threading.Event) -> None:
        """Observe once a second until `ended`."""
        while not ended.wait(POLL_S):
            try:
                self.turn()
            except BapoError as error:
                log.warning("autoscaling observation failed, retrying in %.0f s: %s", POLL_S, error)
                self._window = None

    def turn(self) -> None:
        """Observe once, and decide at the end of a window. Raises: BapoError if the buffer does not respond."""
        if self._mode == "off":
            self._export(ScalingDecision(desired=self._fleet.num_wanted, reason=ScalingReason.OFF))
            return
        if self._mode == "external" and self._room is not None:
            self._fill(self._room())
        status = self._buffer.status()
        if not trains(self._config, status):
            self._window = None
            return
        if self._fleet.prefix and self._state.changed_s is None:
            self._desired = max(self._desired, self._elsewhere(status) + self._fleet.num_wanted)
        moment = self._observe(status)
        if self._window is None:
            self._window = Window(self._config, moment)
            return
        self._window.add(moment)
        if self._window.is_over:
            self._decide(self._window.observation())
            self._window = Window(self._config, self._observe(status))

    def _observe(self, status: BufferStatus) -> Moment:
        return Moment(
            time_s=self._clock(),
            wanted=self._fleet.num_wanted if self._mode == "fleet" else self._desired,
            workers=self._fleet.statuses(),
            stored=self._fleet.metrics.total("groups/fresh/stored"),
            stale=self._fleet.metrics.total("groups/fresh/stale"),
            elsewhere=self._elsewhere(status),
            status=status,
        )

    def _elsewhere(self, status: BufferStatus) -> int:
        """Workers of the run's other rollout servers that have called the buffer recently."""
        if not self._fleet.prefix:
            return 0
        heard_s = self._config.buffer.lease_s / 2  # they renew their leases more often
        others = (leases for worker, leases in status.workers.items() if not worker.startswith(self._fleet.prefix))
        return sum(leases.silent_s < heard_s for leases in others)

    def _decide(self, seen: Observation) -> None:
        self._state, decision = decide(self._config.autoscaling, self._most, self._state, seen, self._clock())
        changes = decision.desired != seen.wanted
        log.log(
            logging.INFO if changes else logging.DEBUG,
            "autoscaling desired=%d wanted=%d ready=%d reason=%s need=%s wait=%s idle=%s missing=%s",
            decision.desired,
            seen.wanted,
            seen.ready,
            decision.reason,
            _short(decision.need),
            _short(seen.wait_share),
            _short(seen.idle_share),
            ",".join(decision.missing) or "-",
        )
        for name, gauge in GAUGES.items():
            value = getattr(seen, name)
            self._telemetry.gauge(gauge).set(math.nan if value is None else value)
        self._export(decision)
        if changes and self._mode == "fleet":
            self._fleet.scale(decision.desired)

    def _export(self, decision: ScalingDecision) -> None:
        self._desired = decision.desired
        self._telemetry.gauge("bapo_rollout_desired_workers").set(decision.desired)
        if decision.need is not None:
            self._telemetry.gauge("bapo_rollout_needed_workers").set(decision.need)
        for reason in ScalingReason:
            shown = self._telemetry.gauge("bapo_rollout_scaling_reason").labels(reason=reason.value)
            shown.set(reason is decision.reason)

    def _fill(self, room: int) -> None:
        number = min(max(room, 1), self._config.rollout.max_workers)
        if number != self._fleet.num_wanted:
            log.info("the cluster has room for %d workers, the target was %d", number, self._fleet.num_wanted)
            self._fleet.scale(number)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
