"""Gauges of the learner's /metrics for one step, declared in `bapo.runtime.metrics.learner`.

A value that does not exist in a step (no group of that subset, no update) is NaN, not its last value.
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bapo.algorithms.composer import Reason
from bapo.config.tree import Config
from bapo.core.types import Batch, GroupResult, Origin, num_correct, num_sampled, sampled_rewards
from bapo.runtime.metrics.learner import GPU_PHASES, PHASES
from bapo.runtime.metrics.metric import RATIOS, TRAINING
from bapo.runtime.metrics.server import Telemetry, show_disk
from learner.diagnostics.step_report import staleness_of
from learner.diagnostics.theorem_meter import Diagnosis

OF_THE_ROW = {
    "bapo_learner_step": "step",
    "bapo_learner_policy_version": "policy_version",
    "bapo_learner_loss": "loss",
    "bapo_learner_grad_norm": "grad_norm",
    "bapo_learner_entropy_nats": "entropy",
    "bapo_learner_clip_ratio": "clip_ratio",
    "bapo_learner_kl_penalty_nats": "kl",
    "bapo_learner_learning_rate": "lr",
    "bapo_learner_last_step_timestamp_seconds": "time",
    "bapo_learner_mfu_ratio": "mfu",
    "bapo_learner_update_mfu_ratio": "mfu_update",
}
"""Gauge -> key of metrics.jsonl."""
OF_EPISODES = {
    "bapo_learner_episode_turns": "episode_turns_mean",
    "bapo_learner_episode_context_tokens": "episode_context_tokens_mean",
    "bapo_learner_episode_forked_ratio": "episode_forked_share",
    "bapo_learner_episode_masked_ratio": "episode_masked_share",
}
"""The same, of steps with episodes; NaN in others."""
OF_TEACHER = {"bapo_learner_teacher_kl_nats": "teacher_kl"}
"""The same, of distillation."""
DIVERGENCE_GAUGES: tuple[tuple[str, dict[str, str], str], ...] = (
    ("bapo_learner_tv_distance_ratio", {"kind": "token"}, "tv_tok"),
    ("bapo_learner_tv_distance_ratio", {"kind": "sequence"}, "tv_seq"),
    ("bapo_learner_tv_distance_ratio", {"kind": "union"}, "tv_union"),
    ("bapo_learner_tv_distance_ratio", {"kind": "pinsker"}, "tv_pinsker"),
    ("bapo_learner_tv_distance_ratio", {"kind": "bretagnolle_huber"}, "tv_bh"),
    ("bapo_learner_tv_distance_ratio", {"kind": "delta_max"}, "delta_max"),
    ("bapo_learner_kl_nats", {"direction": "forward"}, "kl_fwd"),
    ("bapo_learner_kl_nats", {"direction": "reverse"}, "kl_rev"),
    ("bapo_learner_ess_ratio", {"level": "sequence"}, "ess"),
    ("bapo_learner_ess_ratio", {"level": "token"}, "ess_tok"),
    ("bapo_learner_importance_ratio_max", {}, "max_ratio"),
)
"""Gauge, its labels in addition to the origin, key of a cell of the theorem meter."""


def show_run(telemetry: Telemetry, config: Config, run_path: Path) -> None:
    """Set constant gauges, and those computed at each scrape."""
    telemetry.gauge("bapo_checkpoint_interval_steps").set(config.checkpoint.every)
    show_disk(telemetry, run_path)
    memory = telemetry.gauge("bapo_learner_peak_memory_bytes")
    # In KiB, on Linux.
    memory.labels(kind="resident").set_function(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if torch.cuda.is_available():
        memory.labels(kind="cuda").set_function(torch.cuda.max_memory_allocated)


def show_checkpoint(telemetry: Telemetry, folder: Path, step: int) -> None:
    """Set the gauges of the latest checkpoint. `step`: 0 before the first."""
    telemetry.gauge("bapo_checkpoint_last_step").set(step)
    state = folder / f"step-{step:06d}" / "state.json"
    if state.exists():
        telemetry.gauge("bapo_checkpoint_last_success_timestamp_seconds").set(state.stat().st_mtime)


def show(
    telemetry: Telemetry,
    batch: Batch,
    row: Mapping[str, Any],
    diagnosis: Diagnosis,
    sync_seconds: Mapping[str, float],
    config: Config,
) -> None:
    """Set the gauges of one step.

    Args:
        row: of metrics.jsonl.
        sync_seconds: phases of a weight update that has finished in this step; empty if there was none.
    """
    for name, key in OF_THE_ROW.items():
        telemetry.gauge(name).set(math.nan if row[key] is None else row[key])
    for name, key in (OF_EPISODES | OF_TEACHER).items():
        telemetry.gauge(name).set(row.get(key, math.nan))
    # Not by tool: a model can invent any number of names.
    calls = row.get("episode_calls_mean")
    telemetry.gauge("bapo_learner_episode_tool_calls").set(math.nan if calls is None else sum(calls.values()))
    parts = telemetry.gauge("bapo_learner_reward_part_ratio")
    parts.clear()  # an optional one may have no value in this step
    for name, value in row.get("reward_parts", {}).items():  # not facts: a function can name any number of them
        parts.labels(reward=name).set(value)
    telemetry.counter("bapo_learner_steps_total").inc()
    telemetry.counter("bapo_learner_tokens_total").inc(row["num_tokens"])
    for phase in PHASES:
        if row[f"{phase}_s"]:  # 0 means that the step had no such phase
            telemetry.histogram("bapo_learner_phase_seconds").labels(phase=phase).observe(row[f"{phase}_s"])
    for phase in GPU_PHASES:
        if row[f"{phase}_gpu_s"] is not None:
            telemetry.histogram("bapo_learner_phase_gpu_seconds").labels(phase=phase).observe(row[f"{phase}_gpu_s"])
    for phase, seconds in sync_seconds.items():
        telemetry.histogram("bapo_sync_duration_seconds").labels(phase=phase).observe(seconds)
    show_staleness(telemetry, batch, config)
    show_groups(telemetry, batch)
    show_divergences(telemetry, row)
    show_ratios(telemetry, diagnosis)


def show_staleness(telemetry: Telemetry, batch: Batch, config: Config) -> None:
    """Observe the staleness of the trained groups."""
    for origin in Origin:
        found = staleness_of(batch, origin, config)
        histogram = telemetry.histogram("bapo_learner_staleness_steps").labels(origin=origin.value)
        for staleness in found:
            histogram.observe(staleness)
        oldest = telemetry.gauge("bapo_learner_staleness_max_steps").labels(origin=origin.value)
        oldest.set(max(found, default=math.nan))


def show_groups(telemetry: Telemetry, batch: Batch) -> None:
    """Observe correct responses per group sampled for this step, without reused and stale groups."""
    sizes = [num_sampled(result) for result in batch.results]
    found = Counter(
        (num_correct(sampled_rewards(result)), result.purpose.value)
        for result in {result.group_id: result for result in batch.results}.values()
        if result.origin is not Origin.X3 and result.reason != Reason.STALE
    )
    for purpose in TRAINING.values:
        for number in range(max(sizes, default=0) + 1):
            gauge = telemetry.gauge("bapo_group_accuracy_groups").labels(bin=str(number), purpose=purpose)
            gauge.set(found[number, purpose])


def show_ratios(telemetry: Telemetry, diagnosis: Diagnosis) -> None:
    """Observe the token ratios of the theorem meter, and the KL between engine and learner with the same weights."""
    totals = telemetry.totals("bapo_learner_importance_ratio")
    for origin, ratios in diagnosis.ratios.items():
        places = Counter(sum(ratio > bound for bound in RATIOS) for ratio in ratios)
        totals.add([origin.value], [places[place] for place in range(len(RATIOS) + 1)], sum(ratios))
    young = [cell for cell in diagnosis.cells if cell.policy == "theta_t" and cell.age == 0]
    if diagnosis.cells:
        tokens = sum(cell.num_tokens for cell in young)
        total = sum(cell.means.kl_rev_tok * cell.num_tokens for cell in young)
        telemetry.gauge("bapo_learner_mismatch_kl_nats").set(total / tokens if tokens else math.nan)


def show_divergences(telemetry: Telemetry, row: Mapping[str, Any]) -> None:
    """Set the gauges of the theorem meter if the step was measured; subsets without groups become NaN."""
    if not row["divergences"]:
        return
    cells = {cell["origin"]: cell for cell in row["divergences"] if cell["policy"] == "theta_t" and cell["age"] is None}
    bounds = {bound["origin"]: bound for bound in row["bounds"]}
    for number, origin in enumerate(Origin, start=1):
        cell, bound = cells.get(origin.value, {}), bounds.get(origin.value, {})
        values = [(name, labels, cell.get(key)) for name, labels, key in DIVERGENCE_GAUGES]
        values += [("bapo_learner_improvement_bound", {"form": form}, bound.get(form)) for form in ("paper", "tight")]
        penalties = {"theta": "penalty_theta", "theta_t": "penalty_current"}
        values += [("bapo_learner_improvement_penalty", {"of": of}, bound.get(key)) for of, key in penalties.items()]
        values.append(("bapo_learner_stability_constant", {}, row[f"k{number}"]))
        for name, labels, value in values:
            gauge = telemetry.gauge(name).labels(origin=origin.value, **labels)
            gauge.set(math.nan if value is None else value)


class PromptsSeen:
    """Tracks which prompts of a run never had a correct response, and which have just been newly solved.

    Kept by rank 0, which sees every batch; rebuilt from the records after a resume. It counts every first correct
    response after an all-incorrect first group, including prompts that were merely re-sampled: not suitable for
    comparing methods.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._unsolved_gauge = telemetry.gauge("bapo_prompts_unsolved")
        self._rescued = telemetry.counter("bapo_prompts_rescued_total")
        self._solved: set[str] = set()
        self._unsolved: set[str] = set()

    def count(self, results: Iterable[GroupResult], *, is_new: bool = True) -> None:
        """Count the groups of one step, in assembly order. `is_new`: False for records of earlier steps."""
        for result in results:
            if not num_correct(sampled_rewards(result)):
                if result.prompt_id not in self._solved:
                    self._unsolved.add(result.prompt_id)
                continue
            if result.prompt_id in self._unsolved:
                self._unsolved.remove(result.prompt_id)
                if is_new:
                    self._rescued.labels(purpose=result.purpose.value).inc()
            self._solved.add(result.prompt_id)
        self._unsolved_gauge.set(len(self._unsolved))
