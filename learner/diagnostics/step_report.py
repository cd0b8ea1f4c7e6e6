"""Measurements of one step: sums over mini-batches, the row of metrics.jsonl, and the log line."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.algorithms.composer import Reason
from bapo.config.tree import Config
from bapo.core.baselines import item_of, items_with_advantage
from bapo.core.reward_details import as_columns, mean_of_groups
from bapo.core.types import Batch, GroupResult, Origin, Outcome, Purpose, are_equal, num_sampled, sampled_rewards
from bapo.runtime.metrics.learner import PHASES
from learner.diagnostics.off_policy_alarm import Alarm
from learner.diagnostics.theorem_meter import Diagnosis, theorem_fields
from learner.diagnostics.utilization import UNKNOWN, GpuEvent, Utilization
from learner.distributed.world import World
from learner.losses.objective import TokenLosses
from learner.stale_tokens import young_rows

log = logging.getLogger(__name__)

Float32s = NDArray[np.float32]


class Stopwatch:
    """Seconds per named phase, by the host's clock and, with events, by the GPU's.

    Work on a GPU is queued: by the host's clock a phase ends when its work is queued, unless something waits for it.
    """

    def __init__(self, events: Callable[[], GpuEvent] | None = None) -> None:
        """`events`: of `gpu_events`; None: no GPU time."""
        self.seconds: dict[str, float] = {}
        self._new_event = events
        self._events: list[tuple[str, GpuEvent, GpuEvent]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of this block to `name`."""
        start, begin = time.perf_counter(), self._recorded()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            end = self._recorded()
            if begin is not None and end is not None:
                self._events.append((name, begin, end))

    @property
    def gpu_seconds(self) -> dict[str, float]:
        """From the work before each phase to the end of its own work; waits for the GPU. Empty without events."""
        found: dict[str, float] = {}
        for name, begin, end in self._events:
            end.synchronize()
            found[name] = found.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        return found

    def _recorded(self) -> GpuEvent | None:
        if self._new_event is None:
            return None
        event = self._new_event()
        event.record()
        return event


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchResult:
    """One optimizer step, over all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    """Response tokens of the mini-batch, the denominator of the loss."""
    num_active: int
    """Tokens that contribute to the loss and were computed; the denominator of the means below."""
    entropy: float
    """Mean over active tokens, nats."""
    clip_ratio: float
    """Share of active tokens whose objective was clipped."""
    kl: float
    """Mean over active tokens, nats."""
    ratio_max: float
    """Largest rho."""
    stop: bool
    """Whether any rank was asked to stop."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Facts of a fitted loss: clip_low, clip_high, balance."""


class Meter:
    """Accumulates a mini-batch on the device, with one transfer to the host at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = torch.zeros(4, device=world.device)
        self._ratio_max = torch.zeros(1, device=world.device)

    @torch.no_grad()
    def add(self, loss: Tensor, losses: TokenLosses, entropy_M: Tensor) -> None:
        """Add one micro-batch."""
        self._sums += torch.stack((loss, entropy_M.sum(), losses.clipped_M.sum(), losses.kl_M.sum()))
        if len(losses.ratio_M):
            self._ratio_max = torch.maximum(self._ratio_max, losses.ratio_M.max())

    def result(
        self, grad_norm: Tensor, *, num_tokens: int, num_active: int, stop: bool, facts: Mapping[str, float]
    ) -> MinibatchResult:
        """The result of the mini-batch; identical on all ranks."""
        flag = torch.tensor([float(stop)], device=self._world.device)
        sums = self._world.sum(self._sums)
        peaks = self._world.max(torch.cat((self._ratio_max, flag)))
        loss, entropy, clipped, kl, norm, ratio_max, stopped = torch.cat((sums, grad_norm.view(1), peaks)).tolist()
        return MinibatchResult(
            loss=loss,
            grad_norm=norm,
            num_tokens=num_tokens,
            num_active=num_active,
            entropy=entropy / max(1, num_active),
            clip_ratio=clipped / max(1, num_active),
            kl=kl / max(1, num_active),
            ratio_max=ratio_max,
            stop=stopped > 0,
            facts=facts,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """All [M], on the host; NaN for responses that no pass computed."""

    logprobs_M: Float32s
    entropy_M: Float32s
    ratio_M: Float32s
    clipped_M: Float32s
    """1 where clipping changed the objective."""
    advantage_M: Float32s

    def spread(self, known_M: NDArray[np.bool_]) -> TokenValues:
        """The values among all tokens, of which those that are not known have none."""
        return TokenValues(**{each.name: spread(getattr(self, each.name), known_M) for each in fields(self)})


def spread(values: Float32s, known_M: NDArray[np.bool_]) -> Float32s:
    """[M] with NaN for what is not known."""
    found_M = np.full(len(known_M), np.nan, np.float32)
    found_M[known_M] = values
    return found_M


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One step's update."""

    lr: float
    minibatches: tuple[MinibatchResult, ...]
    """Empty for an empty batch."""
    num_tokens: int
    """Response tokens of the batch."""
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    seconds: Mapping[str, float] = field(default_factory=dict)
    utilization: Utilization = UNKNOWN
    facts: Mapping[str, float] = field(default_factory=dict)
    """Method-specific values: value_loss, value_mean, supervised_loss, clip_low, clip_high, balance."""
    tokens: TokenValues | None = None
    """Set in steps with token records."""
    advantage_M: Float32s | None = None
    """Set in steps with texts: advantage of every token of the batch."""

    def mean(self, name: str, *, over: str = "num_tokens") -> float | None:
        """Mean of a field over the mini-batches, weighted by the field `over`; None if the weights are 0."""
        weights = [getattr(result, over) for result in self.minibatches]
        if not sum(weights):
            return None
        values = [getattr(result, name) for result in self.minibatches]
        return float(np.average(values, weights=weights))


def is_due(step: int, every: int) -> bool:
    """Whether something with interval `every` is due in this step; never if `every` is 0."""
    return every > 0 and step % every == 0


def metrics_row(
    batch: Batch,
    report: UpdateReport,
    *,
    policy_version: int,
    config: Config,
    seconds: Mapping[str, float],
    alarm: Alarm | None = None,
    episodes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """One line of metrics.jsonl. Values that do not exist (no group of that origin, no update) are null.

    Args:
        seconds: phases wait_batch, sync and step, and the checkpoint before this step.
        episodes: of `EpisodeReport`; a step without episodes has none of these keys.
    """
    phases = {**dict.fromkeys(PHASES, 0.0), **report.seconds, **seconds}
    row: dict[str, Any] = {
        "step": batch.step,
        "policy_version": policy_version,
        **_mean_rewards(batch, config),
        **{origin.value: sum(entry.origin is origin for entry in batch.entries) for origin in Origin},
        "batch_size": config.algorithm.batch_size,
        **batch.facts,
        **_staleness_fields(batch, config),
        "loss": report.mean("loss"),
        "grad_norm": report.mean("grad_norm"),
        "entropy": report.mean("entropy", over="num_active"),
        "clip_ratio": report.mean("clip_ratio", over="num_active"),
        "kl": report.mean("kl", over="num_active"),
        "ratio_max": max((result.ratio_max for result in report.minibatches), default=None),
        "first_ratio_max": report.minibatches[0].ratio_max if report.minibatches else None,
        **theorem_fields(batch, report.diagnosis, config.algorithm, config.loss.advantage_eps),
        "warning": alarm.text if alarm else None,
        "lr": report.lr,
        "num_tokens": report.num_tokens,
        "num_active_tokens": sum(result.num_active for result in report.minibatches),
        "num_updates": len(report.minibatches),
        **_teacher_fields(batch),
        **_truncation_fields(batch),
        **_informative_fields(batch, config.loss.advantage_pool),
        **_reward_fields(batch),
        **episodes,
        **{f"{name}_s": round(value, 6) for name, value in phases.items()},
        **report.utilization.fields,
        **report.facts,
        "tokens_per_s": report.num_tokens / max(phases["step"], 1e-9),
        "time": time.time(),
    }
    return row


def _mean_rewards(batch: Batch, config: Config) -> dict[str, float]:
    """reward_mean of the step's fresh responses; and r_tot, where it is a moving average."""
    rewards = [reward for result in _fresh(batch) for reward in sampled_rewards(result)]
    if not config.algorithm.r_tot_decay or not rewards:
        return {"reward_mean": batch.r_tot}
    return {"reward_mean": sum(rewards) / len(rewards), "r_tot": batch.r_tot}


def _teacher_fields(batch: Batch) -> dict[str, float]:
    """Reverse KL of the policy that sampled to the teacher: mean over the batch's tokens, in nats."""
    groups = [entry.group for entry in batch.entries]
    gaps = [group.rollout_logprobs - taught for group in groups if (taught := group.teacher_logprobs) is not None]
    return {"teacher_kl": float(np.concatenate(gaps).mean(dtype=np.float64))} if gaps else {}


def _truncation_fields(batch: Batch) -> dict[str, int]:
    """Of the sampled responses that this step was the first to inspect, whether they train or not."""
    results = {result.group_id: result for result in batch.results if result.birth == batch.step}.values()
    return {
        "num_responses": sum(map(num_sampled, results)),
        "num_truncated": sum(result.outcomes.count(Outcome.TRUNCATED) for result in results),
    }


def _informative_fields(batch: Batch, pool: str) -> dict[str, Any]:
    """Groups with rewards that differ, of those that this step was the first to inspect: how many trained, and why the
    others did not. Rewards of groups that trained are compared among all rows of their baseline, an expert's too."""
    useful = items_with_advantage(batch.results, batch.step, pool)
    new = {result.group_id: result for result in batch.results if result.birth == batch.step}.values()
    informative = [
        result
        for result in new
        if (not are_equal(sampled_rewards(result)) if result.origin is None else item_of(result) in useful)
    ]
    left_out = Counter(result.reason for result in informative if result.origin is None)
    return {
        "num_informative": len(informative),
        "num_informative_trained": len(informative) - left_out.total(),
        "informative_left_out": dict(left_out.most_common()),
    }


def _reward_fields(batch: Batch) -> dict[str, dict[str, float]]:
    """Components of the reward and facts, means over the fresh groups of `reward_mean`; where there are any."""
    return as_columns(mean_of_groups(result.reward_details for result in _fresh(batch)))


def _fresh(batch: Batch) -> list[GroupResult]:
    """X_on: the fresh groups of this step, trained or not."""
    results = {result.group_id: result for result in batch.results if result.birth == batch.step}.values()
    return [result for result in results if result.purpose is Purpose.FRESH and result.reason != Reason.STALE]


def _staleness_fields(batch: Batch, config: Config) -> dict[str, float | None]:
    """staleness = step - policy version at consumption, per origin; over tokens if a response has several versions."""
    fields: dict[str, float | None] = {}
    for origin in Origin:
        found = staleness_of(batch, origin, config)
        fields[f"staleness_{origin.value}_mean"] = sum(found) / len(found) if found else None
        fields[f"staleness_{origin.value}_max"] = max(found, default=None)
    groups = [entry.group for entry in batch.entries]
    if any(group.spans is not None for group in groups):
        versions = np.concatenate([group.token_versions for group in groups])
        fields["staleness_tokens_mean"] = float(batch.step - versions.mean())
    return fields


def staleness_of(batch: Batch, origin: Origin, config: Config) -> list[int]:
    """Staleness of each group of this origin, in steps. Of X1 by the rows that had to be young: those that a composer
    joins to them are stored ones, old on purpose."""
    entries = [entry for entry in batch.entries if entry.origin is origin]
    versions = [entry.group.versions[:, 0] for entry in entries]
    if origin is Origin.X1:
        rows = [young_rows(entry, batch, config) for entry in entries]
        versions = [oldest_G[young_G] for oldest_G, young_G in zip(versions, rows, strict=True)]
    return [batch.step - int(oldest_G.min()) for oldest_G in versions if len(oldest_G)]


def log_sft_step(row: Mapping[str, Any], num_steps: int) -> None:
    """Log one line per step of supervised fine-tuning, whose learner is the only process."""
    log.info(
        "step %d/%d loss=%.4f (nats per token) tokens=%d grad_norm=%.3g lr=%.3g step_s=%.2f",
        row["step"], num_steps, row["loss"], row["num_tokens"], row["grad_norm"], row["lr"], row["step_s"],
    )  # fmt: skip


def log_step(row: Mapping[str, Any], num_steps: int) -> None:
    """Log one line per step."""
    names = ("x1", "x2", "x3", "num_bad", "num_high", "num_updates", "num_tokens")
    means = ("reward_mean", "teacher_kl", "loss", "grad_norm", "entropy", "clip_ratio")
    numbers = (*means, *(f"{phase}_s" for phase in PHASES))
    counts = " ".join(f"{name}={row[name]}" for name in names)
    values = " ".join(f"{name}={row[name]:.3g}" for name in numbers if row.get(name) is not None)
    log.info("step %d/%d version=%d %s %s", row["step"], num_steps, row["policy_version"], counts, values)
