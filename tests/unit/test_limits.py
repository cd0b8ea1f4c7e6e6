"""Limits beside the planner's sums: what a run of its size would run into, said before it does."""

from __future__ import annotations

import pytest

from bapo.config.load import load_config
from bapo.limits import Limit, limits


def found(*overrides: str, parameters: int | None = 1_500_000_000, is_cluster: bool = True) -> dict[str, Limit]:
    config = load_config(["bapo"], list(overrides))
    return {limit.key: limit for limit in limits(config, parameters=parameters, is_cluster=is_cluster)}


def test_what_the_papers_sizes_ask_for() -> None:
    asked = found()
    # 8 hosts x 1.5e9 parameters x 2 bytes at 83 MB/s; 256 x (5 + 3 + 10) groups of 8 x 8,192 x 8 + 700 + 504 bytes in
    # nine tenths of the memory; 32 groups x 8 x 8,192 tokens at 1,500 tokens/s.
    assert asked["rollout.sync_timeout_s"].needed == pytest.approx(24e9 / 83e6)
    assert asked["buffer.max_memory_mb"].needed == pytest.approx(4608 * (524_288 + 1204) / 2**20 / 0.9)
    assert asked["learner.batch_timeout_s"].needed == pytest.approx(2_097_152 / 1500)
    assert not any(limit.is_low for limit in asked.values())


def test_a_limit_below_the_sums_is_told_with_what_to_write() -> None:
    asked = found("--rollout.sync_timeout_s=120", "--buffer.max_memory_mb=2048", "--learner.batch_timeout_s=600")
    assert [limit.is_low for limit in asked.values()] == [True, True, True]
    assert asked["rollout.sync_timeout_s"].complaint == (
        "rollout.sync_timeout_s = 120 is low: one update of 3.0 GB over HTTP to 8 hosts takes so long (289); write 578"
    )
