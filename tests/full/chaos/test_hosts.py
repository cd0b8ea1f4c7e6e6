"""A Ray cluster of three hosts trains; one is cut off and comes back. Needs root; skipped with a reason elsewhere.

The scripted engine in Ray actors; with real vLLM: `sudo python -m benchmarks.multi_host --engine vllm`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.multi_host.__main__ import Trial
from benchmarks.multi_host.hosts import Hosts, HostsError

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
STEPS = 4


def test_a_host_that_is_cut_off_costs_time_and_nothing_else_and_joins_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(3))
        except HostsError as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        trial = Trial(hosts, tmp_path, "scripted_actor", PATIENCE_S)
        trial.both_sample(STEPS)
        trial.cut(STEPS)
        trial.heal(STEPS)
        trial.end()
    figures = trial.figures
    assert figures.problems == []
    assert figures.num_steps >= 3 * STEPS
    workers = set(figures.fresh_by_worker or {})
    assert {"worker-0", "worker-1"} <= workers, "both hosts sampled"
    assert any("." in worker for worker in workers), "a worker took the place of the lost one"
    assert figures.weights_fetched >= 3, "hosts without the run directory fetched the weights"
