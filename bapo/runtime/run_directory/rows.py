"""Schemas of the rows in a run directory, validated on reading because another user or version may have written them.

Only keys used by the code are listed; a row keeps all its keys. A plain float may be NaN or infinite, as written by a
diverging learner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from bapo.core.errors import RecordError
from bapo.core.types import Count, Seconds, Share, Version

Number = Annotated[float, Meta(ge=-1e150, le=1e150)]
"""Finite, and so is its square."""
Step = Annotated[int, Meta(ge=1, le=2**21)]
OTHER_TOOLS = "(others)"
"""In `episode_calls_mean`: calls of the less frequent tools together. No tool has this name."""


def _optional(names: str, kind: Any) -> list[tuple[str, Any, None]]:
    """Fields that may be missing or null."""
    return [(name, kind | None, None) for name in names.split()]


def _with(row: type[msgspec.Struct], *fields: tuple[str, Any] | tuple[str, Any, Any]) -> type[msgspec.Struct]:
    """The row with additional or replaced fields."""
    return msgspec.defstruct(f"Whole{row.__name__}", fields, bases=(row,), kw_only=True)


def _required(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


Origin = Literal["x1", "x2", "x3"]
Cell = msgspec.defstruct("Cell", [("policy", str), ("origin", Origin), ("age", Count | None), ("num_groups", Count)])
"""One subset of a batch, or one age of it, in the off-policy diagnostics."""
WholeCell = _with(Cell, *_required("tv_tok tv_tok_p95 tv_seq kl_fwd ess delta_max max_ratio", float))
"""The same with all fields required for reports."""
Bound = msgspec.defstruct(
    "Bound",
    [
        ("origin", Origin),
        *_required("gain penalty_theta penalty_current paper tight", float),
        *_required("paper_vacuous tight_vacuous", bool),
    ],
)
"""The bound of theorem 3.2 on one subset."""
WholeBound = _with(Bound, ("k", float))
"""The same with all fields required for reports."""
MetricsRow = msgspec.defstruct(
    "MetricsRow",
    [
        ("step", Step),
        *_optional("policy_version", Version),
        *_optional("reward_mean r_tot", Share),
        *_optional("x1 x2 x3 batch_size num_bad num_high num_updates num_tokens", Count),
        *_optional("num_informative num_informative_trained", Count),
        *_optional("informative_left_out", dict[str, Count]),
        *_optional("c2 c3 k1 k2 k2_on_grid k3 loss grad_norm entropy kl clip_ratio ratio_max lr tokens_per_s", float),
        *_optional("teacher_kl", float),
        *_optional("tflops_per_s mfu mfu_update", float),
        *_optional("staleness_x1_mean staleness_x2_mean staleness_x3_mean", float),
        *_optional("time step_s wait_batch_s prox_s update_s diagnostics_s sync_s checkpoint_s", Seconds),
        *_optional("prox_gpu_s update_gpu_s", Seconds),
        *_optional("num_episodes", Count),
        *_optional("episode_turns_mean episode_context_tokens_mean", Number),
        *_optional("episode_forked_share episode_masked_share", Share),
        *_optional("episode_calls_mean", dict[str, Number]),
        *_optional("reward_parts reward_facts", dict[str, Number]),
        ("divergences", GenericAlias(list, Cell), ()),
        ("bounds", GenericAlias(list, Bound), ()),
        ("warning", str | None, None),
        ("ended", str | None, None),
    ],
)
"""One line of metrics.jsonl."""
WholeMetricsRow = _with(
    MetricsRow,
    ("reward_mean", Share),
    *_required("x1 x2 x3 batch_size num_updates", Count),
    ("step_s", Seconds),
    *_optional("grad_norm entropy", Number),
    ("divergences", GenericAlias(list, WholeCell), ()),
    ("bounds", GenericAlias(list, WholeBound), ()),
)
"""One line of metrics.jsonl with all fields required for reports and comparisons."""


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
    versions: Annotated[list[Version], Meta(min_length=2, max_length=2)] | None = None
    reward_parts: dict[str, Number] | None = None
    reward_facts: dict[str, Number] | None = None
    rewards: dict[str, Annotated[list[Share], Meta(min_length=1)]] | None = None


_MEASURED = "split step accuracy low high num_prompts num_samples mean_tokens truncated_share rewards"
_HINTS = get_type_hints(EvaluationRow, include_extras=True)
WholeEvaluationRow = _with(EvaluationRow, *((name, get_args(_HINTS[name])[0]) for name in _MEASURED.split()))
"""One line of evaluations.jsonl with all fields required for reports and comparisons."""


class Addresses(msgspec.Struct):
    """URLs of the services."""

    buffer_url: str | None = None
    rollout_url: str | None = None


class ProcessRow(msgspec.Struct):
    """A process started by the launcher."""

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


RATE_STEPS = 20
"""Steps whose mean time predicts the time left."""


def pace_s(metrics: Sequence[Mapping[str, Any]], since: float) -> float | None:
    """Seconds per step at the pace of the latest steps, with what is done between them; None if unknown.

    Args:
        since: Unix time of this start of the run: a resumed run has older steps.
    """
    times = [float(row["time"]) for row in metrics[-RATE_STEPS - 1 :] if row["time"] >= since]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def ended_early(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Why the run ended before its last step, as its last row says; empty if it did not."""
    return str(metrics[-1].get("ended") or "") if metrics else ""


def last_step(metrics: Sequence[Mapping[str, Any]], num_steps: int) -> int:
    """T, or the step after which the run ended early."""
    return int(metrics[-1]["step"]) if ended_early(metrics) else num_steps


def object_of(data: bytes, where: str, kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    """Parse a line of JSON. Raises: RecordError with location and key."""
    try:
        row = json.loads(data)
        if b"\\u" in data:
            json.dumps(row, ensure_ascii=False).encode()  # rejects lone surrogates
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecordError(f"{where} is not a JSON object: {row!r:.80}")
    if kind is not None:
        require_row(row, kind, where)
    return row


def require_row(row: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    """Raises: RecordError with location and key."""
    try:
        msgspec.convert(row, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RecordError(f"{where}: {error}") from error
