"""Compiled layers give the same losses, by few graphs: tracing takes 10 s, and Inductor half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from learner.model.layers import LayerOptions, prepare_layers
from tests.support.learner import learner_config, make_updater, random_batch, tiny_policy


def test_compiled_layers_give_the_same_losses_with_one_set_of_graphs_and_break_at_the_attention_alone(
    model_path: Path, tmp_path: Path
) -> None:
    """With recomputation, as on a GPU. 3 s of tracing."""
    torch.compiler.reset()
    counters.clear()
    config = learner_config(model_path, learner={"microbatch_tokens": 64}, loss={"ratio_mode": "direct"})
    found = []
    for compiled in (False, True):
        policy = tiny_policy(config)
        prepare_layers(policy, LayerOptions(recompute=compiled, compiled=compiled), backend="aot_eager")
        updater = make_updater(config, policy, tmp_path)
        reports = [updater.run(random_batch(step=step)) for step in (1, 2)]
        found.append([[result.loss, result.grad_norm] for report in reports for result in report.minibatches])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    # The layer and its attention module, each before and behind the attention; for all layers and micro-batches.
    assert counters["stats"]["unique_graphs"] == 4
    assert all("packed_attention" in reason for reason in counters["graph_break"])


@pytest.fixture
def own_process_group() -> Iterator[None]:
    """What FSDP makes of this process ends with the test."""
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("own_process_group")
def test_inductor_compiles_one_set_of_graphs_for_all_lengths_and_passes_in_bfloat16(
    model_path: Path, tmp_path: Path
) -> None:
    """As on one GPU: FSDP2, recomputation, passes without gradients (proximal log-probs) and with them."""
    torch.compiler.reset()
    counters.clear()
    found = []
    for compiled in (False, True):
        config = learner_config(
            model_path,
            model={"path": str(model_path), "dtype": "bfloat16"},
            learner={"microbatch_tokens": 64, "compile": compiled, "gradient_checkpointing": True},
        )
        updater = make_updater(config, tiny_policy(config), tmp_path)
        reports = [updater.run(random_batch(step=step, seed=step)) for step in range(1, 21)]
        found.append([[result.loss, result.grad_norm] for report in reports for result in report.minibatches])
        if compiled:
            # A layer and its attention, before and behind the packed attention; with gradients and without.
            assert counters["stats"]["unique_graphs"] <= 8
    np.testing.assert_allclose(found[1], found[0], rtol=0.2, atol=0.02)
