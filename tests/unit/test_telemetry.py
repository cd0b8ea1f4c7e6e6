"""The registry of metrics, and what a process shows of it."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bapo.runtime.metrics.metric import ORIGIN, Metric, Process
from bapo.runtime.metrics.registry import metrics_of
from bapo.runtime.metrics.server import BucketTotals, Telemetry


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
