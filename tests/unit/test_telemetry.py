"""The registry of metrics, what a process shows of it, and what processes make of their own events."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bapo.runtime.metrics.metric import ORIGIN, Metric, Process
from bapo.runtime.metrics.registry import metrics_of
from bapo.runtime.metrics.server import BucketTotals, Telemetry
from bapo.tasks.grading.pool import Grades
from buffer_service.metrics import BufferMetrics, Scrape
from buffer_service.state import Memory
from rollout_server.delivery import outcome_counts
from rollout_server.fleet.metrics import FleetMetrics
from rollout_server.worker_report import WorkerCounts, WorkerReport
from services.scheduler.loop import RoundClock
from tests.support.buffer import STATUS
from tests.support.buffer_app import small_config


def names(exposition: bytes) -> set[str]:
    """Of the families that a text shows, as the registry spells them."""
    return set(re.findall(r"^# TYPE (\S+) ", exposition.decode(), re.MULTILINE))


@pytest.mark.parametrize("process", list(Process))
def test_a_process_shows_everything_that_the_registry_lists_for_it_from_the_start(process: Process) -> None:
    shown = {name for name in names(Telemetry(process).exposition()) if name.startswith("bapo_")}
    assert shown == {metric.name for metric in metrics_of(process)}


def test_a_process_cannot_make_a_metric_of_another() -> None:
    with pytest.raises(KeyError, match="bapo_learner_loss"):
        Telemetry(Process.SCHEDULER).gauge("bapo_learner_loss")


def test_what_is_not_known_yet_is_not_zero_and_what_was_not_counted_yet_is() -> None:
    telemetry = Telemetry(Process.LEARNER)
    assert math.isnan(telemetry.registry.get_sample_value("bapo_learner_loss") or 0.0)
    assert telemetry.registry.get_sample_value("bapo_learner_tokens_total") == 0.0
    assert telemetry.registry.get_sample_value("bapo_learner_staleness_steps_count", {"origin": "x2"}) == 0.0


def test_every_series_carries_the_name_of_the_run() -> None:
    text = Telemetry(Process.SCHEDULER, run="mine").exposition().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(samples) > 3
    assert {sample.labels["run"] for sample in samples} == {"mine"}


def test_counts_per_bucket_add_up_to_a_histogram() -> None:
    totals = BucketTotals(
        Metric("bapo_x_seconds", "histogram", "X.", "run/X", (), (ORIGIN,), buckets=(1.0, 10.0), added_up=True)
    )
    totals.add(["x1"], [3, 0, 1], 42.5)
    totals.add(["x1"], [1, 2, 0], 7.5)
    (family,) = totals.collect()
    assert {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples} == {
        ("bapo_x_seconds_bucket", "1.0"): 4,
        ("bapo_x_seconds_bucket", "10.0"): 6,
        ("bapo_x_seconds_bucket", "+Inf"): 7,
        ("bapo_x_seconds_count", None): 7,
        ("bapo_x_seconds_sum", None): 50.0,
    }


# -- events of processes


def lines(text: bytes, name: str) -> list[str]:
    """Series of one metric."""
    return [line for line in text.decode().splitlines() if line.startswith((f"{name} ", f"{name}{{"))]


def test_a_store_that_is_away_is_said_and_what_only_it_knows_is_not() -> None:
    metrics = BufferMetrics(Telemetry(Process.BUFFER_SERVICE), small_config())
    batch = {"x1": 2, "x2": 1, "x3": 0, "batch_size": 4}
    look = Scrape(status=replace(STATUS, batches=[batch]), memory=Memory(used=7, limit=0), persistent=True)
    there = metrics.exposition(look)
    assert lines(there, "bapo_buffer_redis_up") == ["bapo_buffer_redis_up 1.0"]
    assert lines(there, "bapo_buffer_redis_memory_bytes") == ["bapo_buffer_redis_memory_bytes 7.0"]
    assert lines(there, "bapo_buffer_redis_memory_limit_bytes") == ["bapo_buffer_redis_memory_limit_bytes NaN"]
    assert lines(there, "bapo_batch_fill_ratio") == ["bapo_batch_fill_ratio 0.75"]
    assert len(lines(there, "bapo_buffer_groups")) == 4

    away = metrics.exposition(None)
    assert lines(away, "bapo_buffer_redis_up") == ["bapo_buffer_redis_up 0.0"]
    assert lines(away, "bapo_buffer_redis_persistent") == ["bapo_buffer_redis_persistent NaN"]
    assert lines(away, "bapo_buffer_groups") == []
    assert lines(metrics.exposition(look), "bapo_buffer_groups") == lines(there, "bapo_buffer_groups")


def test_the_target_of_a_run_is_the_step_that_it_ended_after() -> None:
    metrics = BufferMetrics(Telemetry(Process.BUFFER_SERVICE), small_config(run={"num_steps": 40}))

    def target(step: int, version: int) -> list[str]:
        status = replace(STATUS, step=step, policy_version=version, assembled_step=23, committed_step=23, batches=[])
        look = Scrape(status=status, memory=Memory(used=7, limit=0), persistent=True)
        return lines(metrics.exposition(look), "bapo_run_target_steps")

    assert target(23, 22) == ["bapo_run_target_steps 40.0"]
    assert target(41, 24) == ["bapo_run_target_steps 23.0"], "by evaluation.patience"
    assert target(41, 22) == ["bapo_run_target_steps 40.0"], "the loop of another framework counts its own steps"


def test_a_round_takes_until_the_buffer_lists_it_no_more() -> None:
    telemetry, now = Telemetry(Process.SCHEDULER), [100.0]
    clock = RoundClock(telemetry, lambda: now[0])

    def value(name: str, **labels: str) -> float | None:
        return telemetry.registry.get_sample_value(name, labels)

    clock.issued(4, 3)
    clock.issued(8, 0)
    now[0] = 107.0
    clock.poll(replace(STATUS, step=6, reevaluation_rounds={4: 1, 8: 0}))
    assert value("bapo_reevaluation_lag_steps") == 2
    assert value("bapo_reevaluation_duration_seconds_count") == 0
    now[0] = 109.0
    clock.poll(replace(STATUS, step=7, reevaluation_rounds={4: 0}))
    assert value("bapo_reevaluation_lag_steps") == 0
    assert value("bapo_reevaluation_duration_seconds_sum") == 9.0
    assert value("bapo_reevaluation_rounds_total", outcome="asked") == 1
    assert value("bapo_reevaluation_rounds_total", outcome="empty") == 1


def report(tally: WorkerCounts) -> WorkerReport:
    return WorkerReport(
        state="sampling", policy_version=3, inflight=0, tokens_per_s=5.0, pid=1, rss_bytes=11, counts=tally.snapshot()
    )


def test_outcome_counts_are_counted_from_0_and_errors_are_never_wrong() -> None:
    telemetry = Telemetry(Process.ROLLOUT_SERVER)
    metrics, tally = FleetMetrics(telemetry, "countdown"), WorkerCounts()

    def value(outcome: str) -> float | None:
        labels = {"task": "countdown", "outcome": outcome}
        return telemetry.registry.get_sample_value("bapo_verifier_results_total", labels)

    assert value("timeout") == 0
    grades = Grades(rewards=np.array([0, 1, 0.5, 0], dtype=np.float32), num_busy=1)
    assert outcome_counts(grades) == {"correct": 1, "partial": 1, "wrong": 1, "busy": 1}
    tally.add("verdict/timeout/countdown", 8)
    metrics.observe("worker-0", "ready", report(tally))
    assert (value("timeout"), value("wrong")) == (8, 0)
