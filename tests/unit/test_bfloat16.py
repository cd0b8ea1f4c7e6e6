"""A policy in bfloat16, on one rank: near float32, and what is kept of it is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from contrib.gae.critic import load_critic
from learner.batch.columns import columns_of
from learner.batch.packing import microbatches_of
from learner.distributed.shard_files import optimizer_state
from learner.model.logprobs import response_logprobs
from learner.model.policy import Policy
from learner.publish_weights import gather_weights
from tests.support.learner import ALONE, CPU, learner_config, make_updater, random_batch, tiny_policy
from tests.support.tiny_model import write_tiny_model

TOLERANCE, MEAN_TOLERANCE = 0.25, 0.05
"""Nats per token, of log-probs of about -7. Found here: 0.12 and 0.024; under autocast, with a residual stream in
float32, it was 0.12 and 0.021."""


def rough_policy(model_path: Path) -> Policy:
    return tiny_policy(learner_config(model_path, model={"dtype": "bfloat16"}))


def logprobs_of(policy: Policy, model_path: Path) -> torch.Tensor:
    columns = columns_of(random_batch(num_groups=4), learner_config(model_path))
    [micro] = microbatches_of(
        columns, columns.responses_of(range(4)), budget=4096, rank=0, num_ranks=1, device=CPU
    )  # fmt: skip
    found: torch.Tensor = policy(micro)[0]
    return found


def test_logprobs_are_near_those_of_float32(model_path: Path) -> None:
    rough = logprobs_of(rough_policy(model_path), model_path)
    exact = logprobs_of(tiny_policy(learner_config(model_path)), model_path)
    assert rough.dtype == torch.float32
    gap = (rough - exact).abs()
    assert 0 < gap.max() < TOLERANCE
    assert gap.mean() < MEAN_TOLERANCE


def test_what_is_gathered_behind_a_pass_is_the_float32_that_was_read(model_path: Path) -> None:
    policy = rough_policy(model_path)
    with torch.no_grad():
        logprobs_of(policy, model_path)
    found, read = gather_weights(policy, torch.float32), load_file(model_path / "model.safetensors")
    assert found.keys() == read.keys()
    assert all(torch.equal(found[name], read[name]) for name in read)


def test_the_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    # One chunk of gradient 1 and 255 of 2^-9: in bfloat16 each of those would be rounded away.
    hidden = torch.full((256, 1), 2.0**-9).bfloat16()
    hidden[0] = 1.0
    head = torch.zeros(2, 1).bfloat16().requires_grad_()
    logprobs, _ = response_logprobs(
        hidden, head, torch.zeros(256, dtype=torch.int64), temperature=1.0, chunk_tokens=1,
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    logprobs.sum().backward()
    # Half of each hidden value, as p = 1/2: (1 + 255 / 512) / 2 = 0.749 -> 0.75 in bfloat16.
    assert head.grad is not None
    assert head.grad.tolist() == [[0.75], [-0.75]]


def test_moments_are_found_behind_a_pass(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, model={"dtype": "bfloat16"})
    policy = tiny_policy(config)
    updater = make_updater(config, policy, tmp_path)
    updater.run(random_batch(num_groups=3))
    with torch.no_grad():
        logprobs_of(policy, model_path)
    weights = gather_weights(policy, torch.float32)
    moments = optimizer_state(policy.model, updater.optimizer)
    assert moments.pop("num_updates").tolist() == [1]
    assert moments.keys() == {f"{moment}/{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights}
    assert {moment.dtype for moment in moments.values()} == {torch.float32}


def test_the_critics_head_computes_in_float32(model_path: Path) -> None:
    critic = load_critic(learner_config(model_path, model={"dtype": "bfloat16"}), ALONE)
    seen: list[torch.dtype] = []
    critic.head.register_forward_pre_hook(lambda module, inputs: seen.extend((module.weight.dtype, inputs[0].dtype)))
    columns = columns_of(random_batch(num_groups=2), learner_config(model_path))
    [micro] = microbatches_of(columns, columns.responses_of(range(2)), budget=4096, rank=0, num_ranks=1, device=CPU)
    assert critic(micro).dtype == torch.float32
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("tie", [True, False])
def test_embeddings_and_head_are_gathered_each_for_itself_unless_they_share_their_weights(
    tie: bool, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, tie=tie)
    policy = rough_policy(tmp_path)
    ends: list[Any] = [policy.model.get_input_embeddings(), policy.model.get_output_embeddings()]
    assert [isinstance(end, FSDPModule) for end in ends] == [not tie] * 2
    logprobs_of(policy, tmp_path).sum().backward()
    for end in ends:
        assert isinstance(end.weight, DTensor), "sharded again after the backward pass"
        assert end.weight.grad.dtype == torch.float32
        assert end.weight.grad.full_tensor().norm() > 0
