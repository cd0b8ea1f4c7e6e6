"""What holds for every method: found by its preset, so that a new one is tested without an edit here.

That two ranks give what one gives: tests/full/test_fsdp.py, for all that presets are made of. That no item is
twice in a batch, that it has at most B, and that a restored run has the same ones: test_composers.py,
test_composer_resume.py and test_selectors.py; and a killed one: tests/full/test_paper_order.py,
test_selector_restart.py and test_budget_resume.py. That `decoupled` is `direct` where pi_theta_t sampled: test_loss.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bapo.config.layers import preset_names
from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.types import Batch
from learner.advantages.of_batch import row_advantages
from learner.batch.columns import columns_of
from tests.support.learner import make_updater, random_batch, tiny_policy, with_experts, with_supervised

PRESETS = preset_names()
LOSSES = {name: load_config([name], []).loss for name in PRESETS}
WITH_GROUP_BASELINE = [
    name for name, loss in LOSSES.items() if loss.advantage == "group" and loss.advantage_pass_k == 1
]
"""A critic's advantages are whitened over the batch, which is another sum that is 0 (test_learner_methods.py); weights
for pass@K count successes more than failures."""


def small(name: str, path: Path | str = "model", budget: int = 5000) -> Config:
    """The preset with sizes for eight groups of four."""
    sizes = {
        "run.num_steps": 2, "model.path": path, "model.dtype": "float32", "algorithm.batch_size": 8,
        "algorithm.group_size": 4, "rollout.max_prompt_tokens": 12, "rollout.max_response_tokens": 24,
        "learner.minibatch_size": 4, "learner.microbatch_tokens": budget, "learner.device": "cpu",
        "learner.lr": 1e-4, "learner.warmup_steps": 0, "shaping.overlong_cache": 8,
    }  # fmt: skip
    return load_config([name], [token for key, value in sizes.items() for token in (f"--{key}", str(value))])


def mixed_batch(model: PreTrainedModel | None = None, *, with_sft: bool = False) -> Batch:
    """Groups of all origins, rows of experts, rows that were sampled before, and, if asked, entries of kind sft."""
    batch = with_experts(random_batch(model))
    return with_supervised(batch, 2, 5) if with_sft else batch


@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
def test_the_advantages_of_every_pool_sum_to_0(name: str) -> None:
    config, batch = small(name), mixed_batch()
    settings, columns = config.loss, columns_of(batch, config)
    advantage_R = row_advantages(batch, config)
    assert np.abs(advantage_R).max() > 0.1
    if settings.advantage_batch_norm:
        used_R = ~columns.sft_R
        assert float((advantage_R * columns.lengths_R)[used_R].sum()) == pytest.approx(0, abs=1e-9)
        return
    for place, entry in enumerate(batch.entries):
        own = advantage_R[columns.group_R == place]
        fresh = ~(entry.replayed_rows | entry.expert_rows)
        one_pool = settings.advantage_pool == "mixed" or fresh.all() or not fresh.any()
        for pool in [np.ones_like(fresh)] if one_pool else [fresh, ~fresh]:
            if pool.sum() > 1:
                assert float(own[pool].sum()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_method_minimises_does_not_depend_on_micro_batches(name: str, model_path: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)  # its log-probs are alpha's
    found = []
    for budget in (5000, 64):
        config = small(name, model_path, budget)
        updater = make_updater(config, tiny_policy(config), tmp_path)
        with_sft = any(hook.trains_sft for hook in updater.hooks)
        results = updater.run(mixed_batch(model, with_sft=with_sft)).minibatches
        found.append([value for result in results for value in (result.loss, result.grad_norm)])
    assert found[0] == pytest.approx(found[1], rel=2e-3, abs=1e-5)
    assert max(found[0]) > 1e-4
