"""A machine with GPUs, and what the launcher tells its children of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.gpus.devices import Gpu, Gpus, Torch
from services.launcher.gpus.plan import GpuPlan
from services.launcher.processes import Starter

H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559)
TORCH = Torch(version="2.13.0", cuda="12.9", count=2)
BOX = Gpus(gpus=(H100, H100), visible=("0", "1"), driver="575.57.08", torch=TORCH)
"""Two of them, with a driver and a build of torch that fit."""


def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: GpuPlan, ranks: int) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each process that a run would start, by name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = Config.model_validate({"learner": {"num_ranks": ranks}})
    starter = Starter(config, RunDirectory.create(tmp_path / "run"), gpus)
    made = [starter.fleet(), starter.scheduler(), starter.evaluator(), *starter.learner(resume=False)]
    return {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in made}
