"""When what a batch is made of gets into the metrics: behind the answer, before anybody can miss it."""

from __future__ import annotations

import pytest

from buffer_service import service
from tests.assembly_setup import Setup


def trained(text: bytes) -> float:
    """Groups that the metrics have seen in batches."""
    lines = [line for line in text.decode().splitlines() if line.startswith("bapo_batch_trained_groups_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def filled(setup: Setup, last: int, first: int = 1) -> None:
    """Batches of two groups for these steps, none of them committed."""
    for step in range(first, last + 1):
        setup.fill(f"a{step}", f"b{step}", step=step, version=step)
        assert setup.service.batch(step) is not None


def test_a_batch_is_counted_when_it_is_committed(redis_url: str) -> None:
    setup = Setup(redis_url)
    filled(setup, 1)
    assert trained(setup.metrics.exposition(None)) == 0
    setup.service.commit(1, 0)
    setup.service.commit(1, 0)
    assert trained(setup.metrics.exposition(None)) == 2


def test_whoever_looks_at_the_metrics_sees_all_batches(redis_url: str) -> None:
    setup = Setup(redis_url)
    filled(setup, 3)
    assert trained(setup.service.exposition(None)) == 6
    assert trained(setup.service.exposition(None)) == 6


def test_what_nobody_asks_for_does_not_pile_up(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_UNCOUNTED", 2)
    setup = Setup(redis_url)
    filled(setup, 2)
    assert trained(setup.metrics.exposition(None)) == 0
    filled(setup, 3, first=3)
    assert trained(setup.metrics.exposition(None)) == 6
