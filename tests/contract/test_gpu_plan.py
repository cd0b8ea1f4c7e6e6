"""Whose GPU is whose, on machines that are written down by hand; and what the launcher then tells its children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.runtime import machine
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.gpus.plan import GpuPlan, share_gpus
from services.launcher.processes import Starter


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed, as far as the plan knows: torch and vLLM for GPUs."""
    found = {"torch": "2.13.0", "vllm": "0.32.0"}
    monkeypatch.setattr(machine, "installed", found.get)
    return found


def plan(
    visible: tuple[str, ...],
    ranks: int = 1,
    workers: int = 1,
    *,
    learner: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    **how: bool,
) -> GpuPlan:
    sections = {
        "learner": {"num_ranks": ranks, **(learner or {})},
        "rollout": {"num_workers": workers, **(rollout or {})},
    }
    return share_gpus(Config.model_validate(sections), visible, **how)


def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: GpuPlan, ranks: int) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each process that a run would start, by name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = Config.model_validate({"learner": {"num_ranks": ranks}})
    starter = Starter(config, RunDirectory.create(tmp_path / "run"), gpus)
    made = [starter.fleet(), starter.scheduler(), starter.evaluator(), *starter.learner(resume=False)]
    return {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in made}


def test_ranks_see_the_learners_gpus_and_the_rollout_server_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = GpuPlan(visible=("4", "5", "6", "7"), learner=(0, 1), workers=(2, 3))
    assert specs(tmp_path, monkeypatch, gpus, ranks=2) == {
        "rollout_server": "6,7",
        "learner": "4,5",
        "learner-1": "4,5",
        "scheduler": "4,5,6,7",
        "evaluator": "4,5,6,7",
    }
