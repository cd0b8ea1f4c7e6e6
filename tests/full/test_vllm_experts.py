"""A mixture of experts from the learner to vLLM on CPU: what is trained and published is what samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.sequences import sequences_of
from bapo.core.types import WeightUpdate
from learner.model.policy import Policy, sequence_microbatch
from rollout_server.engines import vllm
from rollout_server.weights.canary import Agreement
from rollout_server.weights.receive import load_verified
from tests.support.engines import Driven
from tests.support.factories import make_request
from tests.support.learner import FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch
from tests.support.tiny_experts import write_tiny_experts

TOLERANCE = 1e-4


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[Driven]:
    write_tiny_experts(tmp_path / "model")
    os.environ.update(vllm.ENVIRONMENT)
    rollout = RolloutConfig(max_groups_in_flight=8, max_prompt_tokens=128)
    config = Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=rollout)
    engine = vllm.make_engine(config)
    yield Driven(engine, vllm.make_tokenization(config), config)
    engine.close()


def test_log_probs_equal_the_learners_before_and_after_two_updates(calls: Driven, tmp_path: Path) -> None:
    found: list[tuple[float, float]] = []
    config = learner_config(
        tmp_path / "model", run={"num_steps": 4}, learner={"lr": 1e-2}, cadence={"max_steps_ahead": 0}
    )
    fleet, buffer = FakeFleet(), FakeBuffer(lambda step: random_batch(step=step))
    learner = make_test_learner(config, tmp_path / "run", buffer=buffer, fleet=fleet)

    def take(update: WeightUpdate) -> None:
        """The learner waits meanwhile."""
        before = largest_difference(calls, learner.policy)
        load_verified(calls.engine, update, Agreement())
        found.append((before, largest_difference(calls, learner.policy)))

    fleet.on_update = take
    learner.run(1)
    assert [update.version for update in fleet.updates] == [1, 2, 4, 5]
    (first, same), *updates = found
    assert max(first, same) < TOLERANCE, "version 1 is the model that both have read"
    for before, after in updates:
        assert before > 100 * TOLERANCE
        assert after < TOLERANCE


@torch.no_grad()
def largest_difference(calls: Driven, policy: Policy) -> float:
    """Of the log-probs of tokens that the engine samples."""
    differences = []
    for group in calls.finish(make_request(prompt_id=f"p{i}") for i in range(4)):
        prompt = group.prompt_token_ids.tolist()
        for response in sequences_of(group):
            micro = sequence_microbatch([*prompt, *response.token_ids.tolist()], policy.device, num_prompt=len(prompt))
            ours, _ = policy(micro, with_entropy=False)
            differences.append(np.abs(ours.numpy() - response.rollout_logprobs).max())
    return float(max(differences))
