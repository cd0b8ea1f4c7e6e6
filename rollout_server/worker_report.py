"""How a worker tells what it does: counts, a rate, and the report that the fleet polls."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bapo.runtime.metrics.registry import BY_NAME

RATE_WINDOW_S = 10.0
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """How a worker is, in plain values: what the fleet polls."""

    state: str
    """loading | loaded | sampling | draining | stopped | failed"""
    policy_version: int
    inflight: int
    tokens_per_s: float
    pid: int
    rss_bytes: int
    stuck_s: float = 0.0
    """Seconds that the engine's current step has taken."""
    running: int = 0
    """Responses that get a token in each step of the engine."""
    waiting: int = 0
    """Responses that the engine has no room for yet."""
    kv_cache_usage: float = math.nan
    """Share of the engine's key-value cache that is taken, in [0, 1]; NaN: it has none."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """They only rise:
    `groups/<purpose>/<fate>`, `tokens/<purpose>`, `truncated/<purpose>`, `failed/<reason>`, `verdict/<outcome>/<task>`;
    of histograms `seen/<metric>/<bucket>/<label>` and `sum/<metric>/<label>` in millionths."""
    error: str = ""
    """Class name of what made it fail."""
    message: str = ""

    @property
    def num_stored(self) -> int:
        """Groups that the buffer has taken from it."""
        return sum(count for key, count in self.counts.items() if key.startswith("groups/") and key.endswith("/stored"))

    @property
    def num_failed(self) -> int:
        """Groups that it could not sample or grade."""
        return sum(count for key, count in self.counts.items() if key.startswith("failed/"))

    @property
    def num_tokens(self) -> int:
        """Tokens that it has sampled."""
        return sum(count for key, count in self.counts.items() if key.startswith("tokens/"))


class Tally:
    """Counts by key, such as `groups/fresh/graded`; they only rise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, key: str, count: int = 1) -> None:
        """Add to one key."""
        with self._lock:
            self._counts[key] += count

    def observe(self, metric: str, label: str, values: Sequence[float]) -> None:
        """Sort observations into the buckets of a metric with one label."""
        places = np.searchsorted(BY_NAME[metric].buckets, values, side="left")
        with self._lock:
            for place in places.tolist():
                self._counts[f"seen/{metric}/{place}/{label}"] += 1
            self._counts[f"sum/{metric}/{label}"] += round(sum(values) * MILLION)

    def snapshot(self) -> dict[str, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)


class Rate:
    """Tokens per second over the last `RATE_WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> None:
        """Sampled just now."""
        with self._lock:
            self._events.append((time.monotonic(), num_tokens))

    def per_s(self) -> float:
        """The rate now."""
        horizon = time.monotonic() - RATE_WINDOW_S
        with self._lock:
            while self._events and self._events[0][0] < horizon:
                self._events.popleft()
            return sum(num for _, num in self._events) / RATE_WINDOW_S
