"""Layers that recompute their activations give the same loss, gradients and weights, and keep less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from learner.distributed.sharding import decoder_layers
from learner.model.loading import checkpoints_activations
from learner.model.policy import Policy
from learner.update.critic import load_critic
from tests.support.learner import ALONE, learner_config, make_updater, random_batch, tiny_policy

NUM_LAYERS, INTERMEDIATE_SIZE = 2, 128
"""Of the tiny model."""


@contextmanager
def counted_calls(policy: Policy) -> Iterator[list[int]]:
    """How often the attention of each layer computes; one number per call: tokens of its packing."""
    calls: list[int] = []
    attention = [layer.self_attn for layer in decoder_layers(policy)]
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, _args, kwargs: calls.append(len(kwargs["packing"].places_N)), with_kwargs=True
        )
        for module in attention
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(("setting", "device", "found"), [
    ("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True), (False, "cuda", False),
])  # fmt: skip
def test_auto_is_on_for_cuda_alone(setting: bool | str, device: str, found: bool) -> None:
    assert checkpoints_activations(setting, torch.device(device)) is found


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_two_steps_give_the_same_losses_and_weights_to_the_last_bit(
    advantage: str, model_path: Path, tmp_path: Path
) -> None:
    found = []
    for recompute in (False, True):
        config = learner_config(
            model_path,
            loss={"advantage": advantage, "ratio_mode": "direct"},
            learner={"gradient_checkpointing": recompute, "microbatch_tokens": 80},
        )
        policy = tiny_policy(config)
        critic = load_critic(config, ALONE) if advantage == "gae" else None
        updater = make_updater(config, policy, tmp_path, critic=critic)
        reports = [updater.run(random_batch(step=step)) for step in (1, 2)]
        losses = [(result.loss, result.grad_norm) for report in reports for result in report.minibatches]
        modules = [policy, critic] if critic is not None else [policy]
        found.append((losses, [parameter.clone() for module in modules for parameter in module.parameters()]))
    (plain_losses, plain), (losses, weights) = found
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def test_a_layer_computes_twice_with_gradients_and_sees_the_packing_of_its_own_micro_batch(
    model_path: Path, tmp_path: Path
) -> None:
    for recompute, times in ((False, 1), (True, 2)):
        config = learner_config(
            model_path,
            learner={"gradient_checkpointing": recompute, "microbatch_tokens": 64},
            loss={"ratio_mode": "direct"},
        )
        policy = tiny_policy(config)
        updater = make_updater(config, policy, tmp_path)
        micros: list[int] = []
        policy.register_forward_pre_hook(lambda _module, args, seen=micros: seen.append(len(args[0].token_ids_N)))
        with counted_calls(policy) as calls:
            updater.run(random_batch(num_groups=3))
        assert len(set(micros)) > 1, "several micro-batches of several sizes"
        assert calls == [size for size in micros for _ in range(NUM_LAYERS * times)]
