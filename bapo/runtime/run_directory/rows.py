"""What the rows of a run directory are: keys and types, for records that another user or version may have left.

A row keeps all keys that it has; here stand those that somebody computes with. A `Number` is finite, and so is its
square; what is a float may be NaN or infinite, because a learner that diverges writes that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bapo.core.errors import RecordError

Number = Annotated[float, Meta(ge=-1e150, le=1e150)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Step = Annotated[int, Meta(ge=1, le=2**21)]
Version = Annotated[int, Meta(ge=0, le=2**21)]


class Cell(msgspec.Struct):
    """One subset of a batch, or one age of it, under the theorem meter."""

    policy: str
    origin: Literal["x1", "x2", "x3"]
    age: Count | None
    num_groups: Count


class WholeCell(Cell, kw_only=True):
    """The same with all that the report's table has."""

    tv_tok: float
    tv_tok_p95: float
    tv_seq: float
    kl_fwd: float
    ess: float
    delta_max: float
    max_ratio: float


class Bound(msgspec.Struct):
    """The bound of theorem 3.2 on one subset."""

    origin: Literal["x1", "x2", "x3"]
    gain: float
    penalty_theta: float
    penalty_current: float
    paper: float
    tight: float
    paper_vacuous: bool
    tight_vacuous: bool


class WholeBound(Bound, kw_only=True):
    """The same with all that the report's table has."""

    k: float


class MetricsRow(msgspec.Struct):
    """One line of metrics.jsonl."""

    step: Step
    policy_version: Version | None = None
    reward_mean: Share | None = None
    r_tot: Share | None = None
    x1: Count | None = None
    x2: Count | None = None
    x3: Count | None = None
    batch_size: Count | None = None
    num_bad: Count | None = None
    num_high: Count | None = None
    num_updates: Count | None = None
    num_tokens: Count | None = None
    c2: float | None = None
    c3: float | None = None
    k1: float | None = None
    k2: float | None = None
    k2_on_grid: float | None = None
    k3: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    kl: float | None = None
    clip_ratio: float | None = None
    ratio_max: float | None = None
    lr: float | None = None
    staleness_x1_mean: float | None = None
    staleness_x2_mean: float | None = None
    staleness_x3_mean: float | None = None
    tokens_per_s: float | None = None
    time: Seconds | None = None
    step_s: Seconds | None = None
    wait_batch_s: Seconds | None = None
    prox_s: Seconds | None = None
    update_s: Seconds | None = None
    diagnostics_s: Seconds | None = None
    sync_s: Seconds | None = None
    checkpoint_s: Seconds | None = None
    divergences: Sequence[Cell] = ()
    bounds: Sequence[Bound] = ()
    warning: str | None = None


class WholeMetricsRow(MetricsRow, kw_only=True):
    """One line of metrics.jsonl with all that reports and comparisons need."""

    reward_mean: Share
    x1: Count
    x2: Count
    x3: Count
    batch_size: Count
    step_s: Seconds
    grad_norm: Number | None = None
    entropy: Number | None = None
    divergences: Sequence[WholeCell] = ()
    bounds: Sequence[WholeBound] = ()


class EvaluationRow(msgspec.Struct):
    """One line of evaluations.jsonl."""

    version: Version
    split: str | None = None
    step: Version | None = None
    accuracy: Share | None = None
    low: Share | None = None
    high: Share | None = None
    num_prompts: Count | None = None
    num_samples: Count | None = None
    num_dropped: Count | None = None
    mean_tokens: Number | None = None
    truncated_share: Share | None = None
    rewards: dict[str, Annotated[list[Share], Meta(min_length=1)]] | None = None


class WholeEvaluationRow(EvaluationRow, kw_only=True):
    """One line of evaluations.jsonl with all that reports and comparisons need."""

    split: str
    step: Version
    accuracy: Share
    low: Share
    high: Share
    num_prompts: Count
    num_samples: Count
    mean_tokens: Number
    truncated_share: Share
    rewards: dict[str, Annotated[list[Share], Meta(min_length=1)]]


class Addresses(msgspec.Struct):
    """Of services that may be asked."""

    buffer_url: str | None = None
    fleet_url: str | None = None


class ProcessRow(msgspec.Struct):
    """A process of the launcher."""

    pid: int | None = None
    ready_after_s: float | None = None
    peak_mib: float | None = None
    exit_code: int | None = None
    restarts: Count | None = None


class RunRow(msgspec.Struct):
    """run.json."""

    status: str = ""
    message: str | None = None
    started_at: Seconds | None = None
    ended_at: Seconds | None = None
    processes: dict[str, ProcessRow] = {}
    addresses: Addresses | None = None
    versions: dict[str, str | None] = {}
    commit: str | None = None


class ResultRow(msgspec.Struct):
    """One line of a study's results.jsonl."""

    run: str
    method: str
    status: str
    starts: Count
    wall_s: Seconds
    seed: int | None = None
    reason: str = ""


def object_of(data: bytes, where: str, kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    """The object that JSON holds. Raises: RecordError that says where which key is wrong."""
    try:
        row = json.loads(data)
        if b"\\u" in data:
            json.dumps(row, ensure_ascii=False).encode()  # refuses half of a character
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecordError(f"{where} is no object, but {row!r:.80}")
    if kind is not None:
        require_row(row, kind, where)
    return row


def require_row(row: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    """Raises: RecordError that says where which key is wrong."""
    try:
        msgspec.convert(row, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RecordError(f"{where}: {error}") from error
