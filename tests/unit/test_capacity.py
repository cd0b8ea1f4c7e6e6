"""Capacity planning against sums done by hand."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bapo.capacity import Costs, Plan, capacity
from bapo.cli import app

BY_HAND = Plan(
    workers=100, tokens_per_s=1000.0, parameters=1e9, weight_bytes=2, response_tokens=1250, group_size=8, batch_size=50,
    decode_tokens_per_s=5.0,
    v=4, slack=1, checkpoint_every=5, high_window=3, high_share=0.5, polls_per_s=2.0, workers_per_host=8,
    host_bytes_per_s=1e9,
)  # fmt: skip
ROUND = Costs(
    push_call_s=1e-3, push_byte_s=1e-9, pull_byte_s=1e-9, claim_s=2e-3, redis_byte_s=1e-9, transport_bytes_per_s=1e8
)


def test_rates_sizes_and_memory() -> None:
    found = capacity(BY_HAND, ROUND)
    # 100,000 tokens/s, 10,000 tokens per group.
    assert found.groups_per_s == pytest.approx(10.0)
    assert found.step_s == pytest.approx(5.0)
    assert found.group_bytes == 80_700
    # A response of 1,250 tokens takes 250 s, so 2,500 groups are on their way; 50 x (4 + 1) may be.
    assert (found.in_flight_needed, found.in_flight_allowed) == (pytest.approx(2500), 250)
    assert found.in_bytes_per_s == pytest.approx(807_000)
    # 50 x (4 + 1 running ahead, 1.5 steps in B_high, 5 steps until a checkpoint)
    assert found.resident_groups == 575
    assert found.redis_bytes == 575 * (80_700 + 504)


def test_what_the_services_are_asked_for() -> None:
    found = capacity(BY_HAND, ROUND)
    assert found.calls_per_s == pytest.approx(210)
    # 200 claims of 2 ms, 10 pushes of 1 ms + 80.7 us, 0.807 MB/s out at 1 ns a byte
    assert found.service_load == pytest.approx(0.4 + 0.010807 + 0.000807)
    assert found.replicas == 1
    assert found.redis_load == pytest.approx(0.000807 + 210 * 0.35 * 2e-3)
    many = capacity(Plan(workers=1000, tokens_per_s=1.0), ROUND)
    assert many.service_load > 4.0
    assert many.replicas == 9, "2,000 claims of 2 ms, at half load each, and a little more"


def test_weights_go_to_hosts_and_not_to_workers() -> None:
    found = capacity(BY_HAND, ROUND)
    assert found.hosts == 13
    assert found.weight_file_bytes == 2e9
    assert found.sync_period_s == pytest.approx(20.0)
    assert found.http_s == pytest.approx(13 * 20.0)
    assert found.line_s == pytest.approx(26.0)
    assert found.shared_s == pytest.approx(2.0)
    assert found.relay_s == pytest.approx(8.0), "1, 3, 7, 15 hosts have it after four rounds"
    assert found.bottleneck.name == "weights, HTTP from one rollout server, as measured"
    assert found.bottleneck.load == pytest.approx(13.0)


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="workers must be above 0"):
        Plan(workers=0)


def test_the_command_prints_a_table_or_json() -> None:
    shown = CliRunner().invoke(app, ["plan-capacity", "--workers", "64", "--parameters", "7e9"])
    assert shown.exit_code == 0, shown.output
    assert "first bottleneck: weights" in shown.output
    found = json.loads(CliRunner().invoke(app, ["plan-capacity", "--json"]).output)
    assert found["hosts"] == 1000
    assert found["weight_file_bytes"] == 140e9
