"""The report of a worker that the fleet polls, and the counts and the token rate in it."""

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
    """State and counts of a worker, in plain values."""

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
    """Responses that get a token in each engine step."""
    waiting: int = 0
    """Responses waiting for room in the engine."""
    kv_cache_usage: float = math.nan
    """Share of the engine's KV cache in use, in [0, 1]; NaN: no cache."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counters: `groups/<purpose>/<result>`, `tokens/<purpose>`, `truncated/<purpose>`, `failed/<reason>`,
    `verdict/<outcome>/<task>`, `undecided/<check>`, `episodes/<event>`,
    `episodes/failed/<reason>`; of histograms
    `seen/<metric>/<bucket>/<label>` and `sum/<metric>/<label>` in millionths."""
    waiting_for: str = ""
    """What its groups wait for outside of the run; empty: nothing."""
    error: str = ""
    """Class name of the error that caused the failure."""
    message: str = ""

    @property
    def num_stored(self) -> int:
        """Groups that the buffer has stored."""
        return sum(count for key, count in self.counts.items() if key.startswith("groups/") and key.endswith("/stored"))

    @property
    def num_failed(self) -> int:
        """Groups that it could not sample or grade."""
        return sum(count for key, count in self.counts.items() if key.startswith("failed/"))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(count for key, count in self.counts.items() if key.startswith("tokens/"))


class WorkerCounts:
    """Counters by key, such as `groups/fresh/stored`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, key: str, count: int = 1) -> None:
        """Increase one counter."""
        with self._lock:
            self._counts[key] += count

    def observe(self, metric: str, label: str, values: Sequence[float]) -> None:
        """Add observations to the histogram buckets of a metric with one label."""
        buckets = np.searchsorted(BY_NAME[metric].buckets, values, side="left")
        with self._lock:
            for bucket in buckets.tolist():
                self._counts[f"seen/{metric}/{bucket}/{label}"] += 1
            self._counts[f"sum/{metric}/{label}"] += round(sum(values) * MILLION)

    def snapshot(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counts)


class Rate:
    """Tokens per second over the last `RATE_WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> None:
        """Count tokens that were just sampled."""
        with self._lock:
            self._events.append((time.monotonic(), num_tokens))

    def per_s(self) -> float:
        """The current rate."""
        horizon = time.monotonic() - RATE_WINDOW_S
        with self._lock:
            while self._events and self._events[0][0] < horizon:
                self._events.popleft()
            return sum(num for _, num in self._events) / RATE_WINDOW_S
