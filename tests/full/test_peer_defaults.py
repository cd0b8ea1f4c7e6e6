"""What the presets `trl-grpo` and `verl-grpo` are compared with is what these frameworks released.

The presets against the stored lists: tests/unit/test_config_peers.py, in `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from bapo.config.learner import LearnerConfig
from learner.update.update import lr_at
from tests.support.peers import VERSIONS, released, stored


@pytest.mark.parametrize("peer", VERSIONS)
def test_the_stored_defaults_are_those_of_the_release(peer: str) -> None:
    try:
        found = released(peer)
    except OSError as error:
        pytest.skip(f"{error}; to run this test: a machine on which `pip download {peer}=={VERSIONS[peer]}` works")
    assert found == stored(peer)


def test_the_benchmark_runs_the_version_of_trl_that_is_stored() -> None:
    pinned = Path("benchmarks/peer_trl/requirements.txt").read_text().splitlines()
    assert f"trl=={VERSIONS['trl']}" in pinned


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_after_the_warmup_the_schedules_are_those_of_transformers(name: str, warmup: int) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-6)
    theirs_name = f"{name}_with_warmup" if name == "constant" else name
    schedule = get_scheduler(theirs_name, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    theirs = []
    for _ in range(20):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    settings = LearnerConfig.model_validate({"lr": 1e-6, "lr_schedule": name, "warmup_steps": warmup})
    ours = [lr_at(settings, step, 20) for step in range(1, 21)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:])
    # In the warmup ours is a step ahead: the first step of a run is not one of rate 0.
    assert ours[: max(0, warmup - 1)] == pytest.approx(theirs[1:warmup])
