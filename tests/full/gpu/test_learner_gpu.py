"""The learner on CUDA against the learner on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bapo.algorithms.methods import LOSS
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World
from learner.model.policy import load_policy
from learner.update.update import Updater
from tests.support.learner import learner_config, loss_settings, make_updater, random_batch, with_experts
from tests.support.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: torch finds no CUDA device here"),
]


def losses(path: Path, device: str, dtype: str) -> list[float]:
    """Losses of the mini-batches of two steps."""
    config = learner_config(path, model={"dtype": dtype}, learner={"device": device, "lr": 1e-4})
    world = World(rank=0, size=1, device=torch.device(device))
    policy = load_policy(path, config, world)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    updater = Updater(config=config, policy=policy, world=world, stop=StopFlag(), run_path=path)
    reports = [updater.run(dataclasses.replace(random_batch(step=step), step=step)) for step in (1, 2)]
    return [result.loss for report in reports for result in report.minibatches]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_cuda_gives_the_losses_of_the_cpu(dtype: str, tolerance: float, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    assert losses(tmp_path, "cuda", dtype) == pytest.approx(losses(tmp_path, "cpu", "float32"), abs=tolerance)


@pytest.mark.parametrize("method", [*LOSS.names(), "critic"])
def test_cuda_gives_every_method_the_losses_of_the_cpu(method: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    loss = {"advantage": "gae", "kl_coef": 0.0} if method == "critic" else loss_settings(method)
    found = []
    for device in ("cuda", "cpu"):
        config = learner_config(tmp_path, loss=loss, learner={"device": device, "lr": 1e-4})
        world = World(rank=0, size=1, device=torch.device(device))
        policy = load_policy(tmp_path, config, world)
        updater = make_updater(config, policy, tmp_path, world=world)
        reports = [updater.run(with_experts(random_batch(step=step))) for step in (1, 2)]
        found.append([result.loss for report in reports for result in report.minibatches])
    assert found[0] == pytest.approx(found[1], rel=1e-2, abs=1e-3)
