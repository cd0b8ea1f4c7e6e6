"""The run as seen by the endpoints of the page.

    RUN/metrics.jsonl, RUN/groups --(each step once, in order)--> folds --> responses
    RUN/evaluations.jsonl         --(each row once)-------------> `evaluations`
    the buffer's API              --(each time)-----------------> `live`

A fold is the state an endpoint keeps between two steps: it processes every step once, in order, and restarts when the
run goes back to a checkpoint. Records are read in slices, so that a page of a long run shows its progress and the
process is never blocked for long. A resumed run drops the records after its checkpoint and writes them again:
metrics.jsonl is then replaced by a rename, and the view restarts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from bapo.config.tree import Config
from bapo.core.errors import BapoError, ContractError
from bapo.core.json_values import to_map
from bapo.core.types import GroupResult
from bapo.runtime.auth.api_tokens import Token
from bapo.runtime.run_directory.files import Lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.recording import RecordedStep
from bapo.runtime.run_directory.rows import EvaluationRow, MetricsRow, ended_early
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url

log = logging.getLogger(__name__)

SLICE_S = 0.08
"""Maximum time per response for reading records; at least one step is read."""
DIGITS = 6
"""Significant digits that are sent; a curve shows three."""

BUFFER_TIMEOUT_S = 2.0
MAX_BATCHES = 1000
"""Maximum number of compositions shown while there are no records of steps."""


class Fold(Protocol):
    """State over the steps so far."""

    def advance(self, step: RecordedStep) -> None:
        """Add one step, in order. `results` is empty if the groups of a step cannot be read."""


FoldType = TypeVar("FoldType", bound=Fold)


@dataclass(kw_only=True)
class RunView:
    """One run while its page is served. Endpoints are called one at a time (`endpoints.ask`)."""

    run: RunDirectory
    config: Config
    makers: tuple[type, ...] = ()
    """Classes of the folds, created from the config."""
    live: LiveBuffer | None = None
    """None: only the run directory is available."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    """Increases when the run goes back, which invalidates earlier responses. Starts at the start time, so that no other
    process repeats it."""
    num_steps: int = 0
    """Number of steps in the folds."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False
    """Whether the folds include all recorded steps."""
    ended: str = ""
    """Why the run ended before its last step."""
    problem: str = ""
    """Why records or their groups cannot be read; empty if they can."""

    def __post_init__(self) -> None:
        self._begin(time.time_ns() // 1_000_000)

    def fold(self, kind: type[FoldType]) -> FoldType:
        return cast(FoldType, self._folds[kind])

    def first_new(self, since: int, generation: int) -> int:
        """`since` if the caller knows this generation, else 0."""
        return since if generation == self.generation else 0

    def refresh(self) -> None:
        """Add new steps for at most SLICE_S. Raises: ContractError for a damaged file."""
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
        self.generation, self.num_steps, self.problem, self.ended = generation, 0, "", ""
        self.evaluations = []
        self._lines = Lines(self.run.path / "metrics.jsonl", MetricsRow)
        self._measured = Lines(self.run.path / "evaluations.jsonl", EvaluationRow)
        self._folds = {kind: kind(self.config) for kind in self.makers}

    def _take(self, row: dict[str, Any]) -> None:
        step = RecordedStep(step=int(row["step"]), results=self._results(int(row["step"])), metrics=row)
        for fold in self._folds.values():
            fold.advance(step)
        self.num_steps += 1
        self.ended = ended_early([row])

    def _results(self, step: int) -> tuple[GroupResult, ...]:
        """Groups of a step, written before its row. () if they cannot be read, which the page reports."""
        try:
            return tuple(result for _, results in self.run.read_groups([step]) for result in results)
        except ImportError:
            self.problem = "cannot read the groups of the steps: pyarrow is not installed on the server of this page"
        except ContractError as error:
            self.problem = f"cannot read the groups of step {step}: {error}"
        return ()


class LiveBuffer:
    """The buffer of a live run, accessed over its API."""

    def __init__(self, config: Config, run: RunDirectory, url: str | None = None, token: Token | None = None) -> None:
        """
        Args:
            url: default: from the config and RUN/ports.
            token: default: the token of this process.
        """
        self._config, self._run, self._url, self._token = config, run, url, token
        self._client: BufferClient | None = None

    def numbers(self, *, with_batches: bool) -> dict[str, Any] | None:
        """Status and newest compositions in step order; None while the buffer does not respond."""
        try:
            client = self._connected()
            batches = client.compositions(limit=MAX_BATCHES)[::-1] if with_batches else []
            return {"status": to_map(client.status()), "batches": batches}
        except BapoError as error:
            log.debug("the buffer did not respond: %s", error)
            return None

    def _connected(self) -> BufferClient:
        """Connect to the buffer. Raises: DeadlineError if it has not announced its port yet."""
        if self._client is None:
            url = self._url or buffer_url(self._config, self._run, timeout_s=0.0)
            self._client = BufferClient(url, timeout_s=BUFFER_TIMEOUT_S, retry_s=0.0, token=self._token)
        return self._client


def number(value: Any) -> Any:
    """Round a number for sending; null instead of NaN and infinity."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
