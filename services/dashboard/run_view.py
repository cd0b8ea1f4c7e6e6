"""The run as the endpoints of the page see it.

    RUN/metrics.jsonl, RUN/groups --(each step once, in order)--> folds --> answers
    RUN/evaluations.jsonl         --(each row once)-------------> `evaluations`
    the buffer's API              --(asked each time)-----------> `live`

A fold is whatever an endpoint keeps between two steps: it takes every step once, in order, and begins again when
the run went back to a checkpoint. Reading is done in slices: a page that opens on a long run sees how far it is, and
the process that serves it is never busy for long. A run that resumes drops the records after its checkpoint and writes
them again: metrics.jsonl is then another file (it is replaced by a rename), and the view begins again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from bapo.analysis.whatif.recording import RecordedStep
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ContractError
from bapo.core.types import GroupResult
from bapo.runtime.auth.api_tokens import Token
from bapo.runtime.run_directory.files import Lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import EvaluationRow, MetricsRow
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url
from bapo.transport.messages import status_map

log = logging.getLogger(__name__)

SLICE_S = 0.08
"""Longest time that one answer reads records; at least one step is read."""
DIGITS = 6
"""Significant digits that are sent: a curve shows three."""

BUFFER_TIMEOUT_S = 2.0
MAX_BATCHES = 1000
"""Compositions that are shown where there are no records of steps."""


class Fold(Protocol):
    """What is kept of the steps so far."""

    def advance(self, step: RecordedStep) -> None:
        """Take one step; they come in order. `results` is empty where the groups of a step cannot be read."""


FoldType = TypeVar("FoldType", bound=Fold)


@dataclass(kw_only=True)
class RunView:
    """One run, for as long as a page of it is served. Endpoints are called one at a time (`endpoints.ask`)."""

    run: RunDirectory
    config: Config
    makers: tuple[type, ...] = ()
    """Classes of the folds; each is made from the configuration."""
    live: LiveBuffer | None = None
    """None: nothing but the run directory is there."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    """Rises when the run went back: what was answered before no longer holds. Begins at the time of the start, so that
    no other process repeats it."""
    num_steps: int = 0
    """Steps that the folds have taken."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False
    """Whether that is all there is."""
    problem: str = ""
    """Why records, or the groups of them, cannot be read; empty when they can."""

    def __post_init__(self) -> None:
        self._begin(time.time_ns() // 1_000_000)

    def fold(self, kind: type[FoldType]) -> FoldType:
        return cast(FoldType, self._folds[kind])

    def first_new(self, since: int, generation: int) -> int:
        """`since` of a caller that knows this generation; 0 for one that knows another, or none."""
        return since if generation == self.generation else 0

    def refresh(self) -> None:
        """Take the steps that are new, for at most SLICE_S. Raises: ContractError for a damaged file."""
        if self._lines.is_another_file() or self._measured.is_another_file():
            self._begin(self.generation + 1)
        self.evaluations += self._measured.read()
        deadline = time.monotonic() + SLICE_S
        self.is_complete = False
        for row in self._lines.read():
            self._take(row)
            if time.monotonic() > deadline:
                return
        self.is_complete = True

    def _begin(self, generation: int) -> None:
        self.generation, self.num_steps, self.problem = generation, 0, ""
        self.evaluations = []
        self._lines = Lines(self.run.path / "metrics.jsonl", MetricsRow)
        self._measured = Lines(self.run.path / "evaluations.jsonl", EvaluationRow)
        self._folds = {kind: kind(self.config) for kind in self.makers}

    def _take(self, row: dict[str, Any]) -> None:
        step = RecordedStep(step=int(row["step"]), results=self._results(int(row["step"])), metrics=row)
        for fold in self._folds.values():
            fold.advance(step)
        self.num_steps += 1

    def _results(self, step: int) -> tuple[GroupResult, ...]:
        """Groups of a step, written before its row. () when they cannot be read: the page then says so."""
        try:
            return tuple(result for _, results in self.run.read_groups([step]) for result in results)
        except ImportError:
            self.problem = "the groups of the steps cannot be read: pyarrow is not installed where the page is served"
        except ContractError as error:
            self.problem = f"the groups of step {step} cannot be read: {error}"
        return ()


class LiveBuffer:
    """The buffer of a live run, asked over its API."""

    def __init__(self, config: Config, run: RunDirectory, url: str | None = None, token: Token | None = None) -> None:
        """
        Args:
            url: None: from the configuration and RUN/ports.
            token: None: that of this process.
        """
        self._config, self._run, self._url, self._token = config, run, url, token
        self._client: BufferClient | None = None

    def numbers(self, *, with_batches: bool) -> dict[str, Any] | None:
        """Its status, and its newest compositions in the order of steps; None while it does not answer."""
        try:
            client = self._connected()
            batches = client.compositions(limit=MAX_BATCHES)[::-1] if with_batches else []
            return {"status": status_map(client.status()), "batches": batches}
        except BapoError as error:
            log.debug("the buffer did not answer the page: %s", error)
            return None

    def _connected(self) -> BufferClient:
        """The buffer announces its port when it is up. Raises: DeadlineError before that."""
        if self._client is None:
            url = self._url or buffer_url(self._config, self._run, timeout_s=0.0)
            self._client = BufferClient(url, timeout_s=BUFFER_TIMEOUT_S, retry_s=0.0, token=self._token)
        return self._client


def number(value: Any) -> Any:
    """A number as it is sent: few digits, and null instead of what JSON cannot say."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
