"""The evaluator's loop: evaluate held-out splits on the training workers, and write rows.

Training never waits for an evaluation, but workers are shared and prefer evaluation over fresh requests, because a
policy version can only be evaluated while workers have it. Results are in evaluations.jsonl, so the evaluator may
crash and restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import DeadlineError, UnavailableError
from bapo.core.reward_details import as_columns, mean_of_groups, means_of
from bapo.core.statistics import INTERVAL, estimate
from bapo.core.types import Group, Outcome, Progress, Purpose, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.curves import as_compared, passed
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.base import Task, extract_of
from bapo.tasks.images import keep_images
from bapo.transport.buffer_client import BufferClient
from services.evaluator.majority import MajorityVote, decoder_of
from services.evaluator.plan import (
    BASE_VERSION,
    Measurement,
    Target,
    due_budget,
    final_version,
    label_of,
    measurements_of,
    next_target,
    parts_of,
    requests_of,
)

log = logging.getLogger(__name__)

POLL_S = 0.5


class Evaluator:
    def __init__(
        self,
        config: Config,
        task: Task,
        buffer: BufferClient,
        run: RunDirectory,
        telemetry: Telemetry,
        *,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._task = task
        self._buffer = buffer
        self._run = run
        extract = extract_of(task, another_reward=config.task.has_another_reward)
        self._majority = MajorityVote(extract, partial(decoder_of, config.model.path))
        self._bases: dict[str, Mapping[str, Any]] = {}
        """Split -> its row of the base model."""
        self._accuracy = telemetry.gauge("bapo_eval_accuracy_ratio")
        self._pass_at_k = telemetry.gauge("bapo_eval_passk_ratio")
        self._version = telemetry.gauge("bapo_eval_policy_version")
        self._sleep = sleep
        self._now = now

    def run(self) -> None:
        """Run until the final weights are evaluated. Raises: DeadlineError, UnavailableError, StorageError."""
        num_steps = self._config.run.num_steps
        for row in self._run.read_evaluations():  # from an evaluator before this one
            self._show(row)
        progress = self._buffer.progress()
        measured, budgets = self._measured_versions(), self._measured_budgets()
        self._warn_of_missed_base(progress)
        is_over = False
        while True:
            final = final_version(progress, num_steps)
            if final is not None and not is_over:
                is_over, measured = True, self._measured_versions(final)
            if final in measured:
                return
            target = next_target(
                progress,
                measured,
                num_steps=num_steps,
                settings=self._config.evaluation,
                cadence=self._config.cadence,
                budget=self._due_budget(progress, budgets),
                skips_late=self._config.checkpoint.keep_best > 0,
            )
            if target is None:
                self._sleep(POLL_S)
            else:
                self.measure(target)
                measured.add(target.version)
                if target.budget is not None:
                    budgets.add(target.budget)
            progress = self._buffer.progress()

    def _warn_of_missed_base(self, progress: Progress) -> None:
        """Workers cannot get the first weights again, and every claim of learning needs their accuracy."""
        names = self._measurements().keys() - self._measured_names("version").get(BASE_VERSION, set())
        if names and progress.policy_version > BASE_VERSION:
            log.warning(
                "the base model was not evaluated on %s before training changed it; start another run to measure it",
                ", ".join(sorted(names)),
            )

    def _measured_versions(self, final: int | None = None) -> set[int]:
        """Versions that have a row for every measurement."""
        ends = (BASE_VERSION, final)
        return {
            version
            for version, names in self._measured_names("version").items()
            if names.issuperset(self._measurements(is_full=version in ends))
        }

    def _measured_budgets(self) -> set[int]:
        """Those of `at_responses` that have a row for every measurement."""
        found = self._measured_names("at_responses")
        return {budget for budget, names in found.items() if names.issuperset(self._measurements())}

    def _measured_names(self, key: str) -> dict[int, set[str]]:
        """Value of a column of the rows -> names of the measurements with that value."""
        found: dict[int, set[str]] = {}
        for row in self._run.read_evaluations():
            if row.get(key) is not None:
                found.setdefault(int(row[key]), set()).add(row["split"])
        return found

    def _due_budget(self, progress: Progress, measured: Collection[int]) -> int | None:
        """The one of `at_responses` that has been sampled before the weights that the workers have. Reads the records
        of all steps, while one is left."""
        at_responses = self._config.evaluation.at_responses
        if max(at_responses, default=0) <= max(measured, default=0):
            return None
        rows = self._run.read_metrics()
        if len(rows) >= self._config.run.num_steps:  # the last weights are measured anyway
            return None
        version = self._config.cadence.synced_version(progress.policy_version)
        sampled = sum(int(row["num_responses"]) for row in rows if row["step"] < version)
        return due_budget(at_responses, sampled, measured)

    def _measurements(self, *, is_full: bool = True) -> dict[str, Measurement]:
        """What is measured of some weights, by name."""
        config = self._config
        return measurements_of(
            self._task.held_out_splits, config.evaluation, temperature=config.rollout.temperature, is_full=is_full
        )

    def _forget_older(self, version: int) -> None:
        """Delete requests of a killed evaluator for versions that will never be collected."""
        for label in self._buffer.status().evaluations:
            name, measured = parts_of(label)
            if name in self._measurements() and measured < version:
                self._buffer.forget(label)

    def measure(self, target: Target) -> None:
        """Request all measurements, wait for them, and write a row for each that has none yet."""
        have = {row["split"] for row in self._run.read_evaluations() if _is_of(row, target)}
        self._forget_older(target.version)
        for name in have:  # left by an evaluator that was killed before it could delete them
            self._buffer.forget(label_of(name, target.version))
        measurements = self._measurements(is_full=target.is_full)
        due = [found for name, found in measurements.items() if name not in have]
        asked = [(measurement, self._request(target, measurement)) for measurement in due]
        for measurement, requests in asked:
            label = label_of(measurement.name, target.version)
            self._wait(label, requests)
            self._record(measurement, target, len(requests))
            self._buffer.forget(label)

    def _record(self, measurement: Measurement, target: Target, num_asked: int) -> None:
        label = label_of(measurement.name, target.version)
        groups = self._buffer.collect(label)
        if not groups:
            raise UnavailableError(
                f"evaluation {label}: all {num_asked} groups failed; "
                f"last failure: {self._buffer.status().last_failure or 'see the log of the rollout server'}"
            )
        row = evaluation_row(
            measurement,
            target,
            groups,
            num_asked=num_asked,
            rollout=self._config.rollout,
            majority=self._majority.of(groups),
        )
        self._run.append_evaluation(row)
        self._show(row)
        log.info(
            "evaluated split=%s version=%d mean_reward=%.4f low=%.4f high=%.4f num_prompts=%d dropped=%d took_s=%.1f",
            measurement.name, target.version, row["accuracy"], row["low"], row["high"],
            row["num_prompts"], row["num_dropped"], row["seconds"],
        )  # fmt: skip

    def _show(self, row: Mapping[str, Any]) -> None:
        """Set the gauges: of an evaluation with fewer prompts than the base model's, as compared with it."""
        split, k = row["split"], int(row["num_samples"])
        if row["version"] == BASE_VERSION:
            self._bases[split] = row
        base = self._bases.get(split)
        self._accuracy.labels(split=split).set(as_compared(row, base)["accuracy"])
        self._version.labels(split=split).set(row["version"])
        before = passed(base, k) if base is not None and base["num_samples"] >= k else None
        self._pass_at_k.labels(split=split, k=str(k)).set(as_compared(passed(row, k), before)["accuracy"])

    def _request(self, target: Target, measurement: Measurement) -> list[RolloutRequest]:
        prompts = list(self._task.prompts(measurement.split))[: target.num_prompts]
        keep_images(self._task, prompts, self._run.images)
        requests = requests_of(target, measurement, prompts, self._config.evaluation)
        self._buffer.enqueue(requests)
        return requests

    def _wait(self, label: str, requests: Sequence[RolloutRequest]) -> None:
        """Wait until every group is done or has failed permanently. Raises: DeadlineError without progress."""
        num_asked = len(requests)
        timeout_s = self._config.learner.batch_timeout_s
        counts: tuple[int, ...] = ()
        moved_s = self._now()
        while True:
            status = self._buffer.status()
            settled = status.evaluations.get(label, 0)
            if settled >= num_asked:
                return
            if settled + status.num_open(Purpose.EVALUATE) < num_asked:
                # Redis restarted without its last second of writes, or from a snapshot, which has no evaluations.
                # Known ids are not enqueued twice.
                log.warning("evaluation %s: requests are missing in the buffer, requesting them again", label)
                self._buffer.enqueue(requests)
            # Same timeout as the learner: workers that are busy with other requests are no reason to fail the run.
            if status.counts != counts:
                counts, moved_s = status.counts, self._now()
            elif self._now() - moved_s > timeout_s:
                raise DeadlineError(
                    f"evaluation {label}: {settled}/{num_asked} groups, no progress for "
                    f"{timeout_s:.0f} s (learner.batch_timeout_s); see the rollout server's log"
                )
            self._sleep(POLL_S)


def _is_of(row: Mapping[str, Any], target: Target) -> bool:
    """Whether it is a measurement of this target; that of a budget is taken once, whichever weights were due then."""
    if target.budget is not None:
        return bool(row.get("at_responses") == target.budget)
    return row["version"] == target.version and row.get("at_responses") is None


def evaluation_row(
    measurement: Measurement,
    target: Target,
    groups: Sequence[Group],
    *,
    num_asked: int,
    rollout: RolloutConfig,
    majority: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Mean reward of one measurement (`accuracy`) with its interval, and what a fair comparison with another run needs.

    Args:
        groups: at least one; permanently failed groups are missing and counted as dropped, not as incorrect.
        majority: prompt id -> reward of the most frequent answer.
    """
    found = estimate([group.mu for group in groups])
    num_tokens = sum(len(group.token_ids) for group in groups)
    num_responses = sum(group.size for group in groups)
    num_truncated = sum(int((group.outcomes == Outcome.TRUNCATED).sum()) for group in groups)
    return {
        "split": measurement.name,
        "version": target.version,
        "step": target.step,
        "at_responses": target.budget,
        "accuracy": found.mean,
        "low": found.low,
        "high": found.high,
        "interval": INTERVAL,
        "num_prompts": len(groups),
        "num_dropped": num_asked - len(groups),
        "num_samples": groups[0].size,
        "truncated_share": num_truncated / num_responses,
        "mean_tokens": num_tokens / num_responses,
        "versions": [
            min(int(group.versions.min()) for group in groups),
            max(int(group.versions.max()) for group in groups),
        ],
        "seconds": round(_busy_seconds(groups), 3),
        "sampling": rollout.sampling(measurement.settings),
        **as_columns(mean_of_groups(means_of(group.reward_details) for group in groups)),
        "majority": majority,
        "rewards": {group.prompt.prompt_id: [float(r) for r in group.rewards] for group in groups},
    }


def _busy_seconds(groups: Sequence[Group]) -> float:
    """Time from the first claim to the last graded group, excluding worker startup."""
    begin = min(group.timing.claimed_at for group in groups)
    return max(g.timing.claimed_at + g.timing.sample_s + g.timing.grade_s for g in groups) - begin
