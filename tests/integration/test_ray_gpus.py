"""A Ray node of our own and GPUs that are not there: in a process of its own, because Ray reads its settings once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
from rollout_server import ray_settings
ray_settings.apply()
from bapo.config.tree import Config
from bapo.errors import UnavailableError
from rollout_server.fleet_ray import RayNode
rollout = Config.model_validate({"rollout": {"num_workers": 2, "worker_resources": {"GPU": 1}}}).rollout
try:
    RayNode(rollout)
except UnavailableError as error:
    print(error)
"""


@pytest.mark.slow
def test_workers_that_need_more_gpus_than_ray_sees_are_refused_at_once() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        env=environment,
        check=True,
    )
    assert "Ray sees 0 GPUs on this machine (CUDA_VISIBLE_DEVICES: )" in done.stdout
    assert "room for 0 workers of {'GPU': 1.0}, but rollout.num_workers = 2" in done.stdout
