"""Layers that recompute their activations, or are compiled, give the same loss, gradients and weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from bapo.config.learner import LearnerConfig
from learner.distributed.sharding import decoder_layers
from learner.model.layers import (
    LayerOptions,
    _Kept,
    budget_of,
    checkpoints_activations,
    compiles_layers,
    prepare_layers,
)
from learner.model.policy import Policy
from learner.update.update import Updater
from tests.support.learner import learner_config, make_updater, random_batch, tiny_policy

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
    # A tenth of a MB is more than the activations of one layer and less than those of both.
    for settings in ({}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "activation_gib": 1e-4}):
        config = learner_config(
            model_path,
            loss={"advantage": advantage, "ratio_mode": "direct"},
            learner={"microbatch_tokens": 80, **settings},
        )
        policy = tiny_policy(config)
        updater = make_updater(config, policy, tmp_path)
        reports = [updater.run(random_batch(step=step)) for step in (1, 2)]
        losses = [(result.loss, result.grad_norm) for report in reports for result in report.minibatches]
        modules = [policy, *(part.critic for part in updater.parts.values())]
        found.append((losses, [parameter.clone() for module in modules for parameter in module.parameters()]))
    plain_losses, plain = found[0]
    for losses, weights in found[1:]:
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


@pytest.mark.parametrize(("gib", "computed"), [
    (0.0, 4), (1e-9, 3), (1.0, 2),
])  # fmt: skip
def test_layers_keep_their_activations_as_far_as_the_budget_goes(
    gib: float, computed: int, model_path: Path, tmp_path: Path
) -> None:
    """Of two layers: both recompute; the first is measured and kept, which uses up the budget; both are kept."""
    config = learner_config(
        model_path,
        learner={"gradient_checkpointing": True, "activation_gib": gib, "microbatch_tokens": 4096},
        loss={"ratio_mode": "direct"},
    )
    policy = tiny_policy(config)
    with counted_calls(policy) as calls:
        make_updater(config, policy, tmp_path).run(random_batch(num_groups=3))
    assert len(calls) == computed


def test_what_a_layer_keeps_is_counted_without_its_weights_and_once() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8))
    kept, hidden = _Kept(layer), torch.zeros(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor):
        layer(hidden)
    # The input, and the output of the sigmoid, which it and the second product keep: 5 x 8 float32 each.
    assert kept.bytes == 2 * 5 * 8 * 4


@pytest.mark.parametrize(
    ("setting", "device", "is_worth_it", "compiler", "want"),
    [
        ("auto", "cuda", True, "/usr/bin/c++", True),
        ("auto", "cuda", False, "/usr/bin/c++", False),
        ("auto", "cuda", True, None, False),
        ("auto", "cpu", True, "/usr/bin/c++", False),
        (True, "cpu", False, None, True),
        (False, "cuda", True, "/usr/bin/c++", False),
    ],
)
def test_layers_are_compiled_on_gpus_where_there_is_a_compiler(
    setting: bool | Literal["auto"],
    device: str,
    is_worth_it: bool,
    compiler: str | None,
    want: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: compiler)
    assert compiles_layers(setting, torch.device(device), is_worth_it=is_worth_it) is want


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 100 GB: 30 are free, torch has 50, of which 45 were in use at the peak."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30e9, 100e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50e9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 45e9)


def on_one_gpu(model_path: Path, tmp_path: Path) -> tuple[Updater, Policy]:
    """What a GPU would have, computed here."""
    config = learner_config(model_path, learner={"microbatch_tokens": 4096}, loss={"ratio_mode": "direct"})
    policy = tiny_policy(config)
    options = LayerOptions.of(config.learner, torch.device("cuda"))
    assert (options.recompute, options.keep_bytes) == (True, None)
    prepare_layers(policy, replace(options, compiled=False))
    return make_updater(config, policy, tmp_path), policy


@pytest.mark.usefixtures("gpu_memory")
def test_on_one_gpu_layers_keep_what_two_steps_have_left_free(model_path: Path, tmp_path: Path) -> None:
    updater, policy = on_one_gpu(model_path, tmp_path)
    with counted_calls(policy) as calls:
        computed = []
        for step in (1, 2, 3):
            updater.run(random_batch(num_groups=3, step=step))
            computed.append(len(calls))
            calls.clear()
    assert computed == [4, 4, 2], "both layers twice, twice, and once"
    budget = budget_of(policy)
    assert budget is not None
    assert budget._limit == 27_000_000_000  # 30 + 50 - 45, less 8 for the reserve


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", ["forward", "attention", "mlp", "policy"])
def test_after_an_out_of_memory_error_layers_keep_nothing_and_all_steps_are_the_same(
    place: str, dtype: str, model_path: Path, tmp_path: Path
) -> None:
    """In bfloat16 FSDP has gradients that it has not reduced yet, and waits for the end of the pass."""
    config = learner_config(
        model_path,
        model={"path": str(model_path), "dtype": dtype},
        loss={"ratio_mode": "direct"},
        learner={"microbatch_tokens": 80, "gradient_checkpointing": True, "activation_gib": 1.0},
    )
    results = []
    for fails in (False, True):
        policy = tiny_policy(config)
        updater = make_updater(config, policy, tmp_path)
        results.append([updater.run(random_batch(step=1)).minibatches])
        if fails:
            fail_once(policy, place)
        results[-1] += [updater.run(random_batch(step=step)).minibatches for step in (2, 3)]
        budget = budget_of(policy)
        assert budget is not None
        assert (budget._limit == 0) is fails
    numbers = [[(each.loss, each.grad_norm) for step in steps for each in step] for steps in results]
    assert numbers[0] == numbers[1]


def fail_once(policy: Policy, place: str) -> None:
    """Out of memory in the fourth pass through this place: in the middle of a mini-batch."""
    layer: Any = policy.model.get_decoder().layers[0]
    calls = iter(range(100))

    def hook(*_: object) -> None:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    if place == "forward":
        layer.self_attn.register_forward_pre_hook(hook)
    elif place == "policy":
        policy.register_full_backward_pre_hook(hook)
    else:
        module = layer.self_attn if place == "attention" else layer.mlp
        module.register_full_backward_pre_hook(hook)


def test_several_ranks_keep_nothing_unless_they_are_told() -> None:
    several = LearnerConfig(num_ranks=2)
    assert LayerOptions.of(several, torch.device("cuda")).keep_bytes == 0
    assert LayerOptions.of(LearnerConfig(num_ranks=2, activation_gib=1.0), torch.device("cuda")).keep_bytes == 1 << 30
