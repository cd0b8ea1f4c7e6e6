"""What single methods add to a step: a reference that is replaced, masks, fresh moments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bapo.config.tree import Config
from bapo.core.types import Batch
from learner.update.step import Step, step_inputs
from learner.update.update import Updater
from tests.support.learner import CPU, learner_config, make_updater, random_batch, tiny_policy
from tests.support.tiny_model import perturb


def step_of(updater: Updater, config: Config, batch: Batch) -> Step:
    return Step.of(step_inputs(batch, config, CPU), updater.memory)


# -- the reference


def test_behind_its_step_the_reference_is_the_policy(model_path: Path, tmp_path: Path) -> None:
    loss = {"kl_ref": "convex", "kl_coef": 0.1, "kl_restart_step": 2, "importance_level": "none"}
    config = learner_config(model_path, loss=loss, learner={"minibatch_size": 8})
    policy = tiny_policy(config)
    perturb(policy.model, seed=1)  # type: ignore[arg-type]
    updater = make_updater(config, policy, tmp_path)
    far = [updater.run(random_batch(step=step)).minibatches[0].kl for step in (1, 2)]
    assert min(far) > 0.01
    assert updater.parts["reference"].tensors() == {}, "the base model is in no checkpoint"
    assert updater.run(random_batch(step=3)).minibatches[0].kl == pytest.approx(0.0, abs=1e-6)
    saved = updater.parts["reference"].tensors()
    assert saved.keys() == dict(policy.model.named_parameters()).keys()
    # It stays where it is, while the policy goes on.
    assert updater.run(random_batch(step=4)).minibatches[0].kl > 1e-6


def test_the_convex_kl_is_to_the_base_model_alone_for_50_steps(model_path: Path, tmp_path: Path) -> None:
    loss = {"kl_ref": "convex", "kl_coef": 0.1, "importance_level": "none"}
    config = learner_config(model_path, loss=loss, learner={"minibatch_size": 8})
    kl = []
    for number in (50, 51, 100):
        policy = tiny_policy(config)
        perturb(policy.model, seed=1)  # type: ignore[arg-type]
        batch = dataclasses.replace(random_batch(), step=number)
        kl.append(make_updater(config, policy, tmp_path).run(batch).minibatches[0].kl)
    # In the first mini-batch the policy is the policy of the step: that part of the term is 0.
    assert [kl[1] / kl[0], kl[2] / kl[0]] == pytest.approx([0.9, 0.5], rel=1e-5)


# -- what is left out


def test_truncated_responses_are_in_no_loss_and_no_denominator(model_path: Path, tmp_path: Path) -> None:
    batch = random_batch()
    group = batch.entries[0].group
    cut = dataclasses.replace(group, outcomes=np.array([0, 1, 0, 1], np.uint8))
    marked = dataclasses.replace(batch, entries=(dataclasses.replace(batch.entries[0], group=cut), *batch.entries[1:]))
    config = learner_config(model_path, shaping={"overlong_filter": True}, learner={"minibatch_size": 8})
    updater = make_updater(config, tiny_policy(config), tmp_path)
    [result] = updater.run(marked).minibatches
    left_out = int(group.lengths[1] + group.lengths[3])
    assert result.num_tokens == result.num_active == sum(len(e.group.token_ids) for e in batch.entries) - left_out
    assert float(step_of(updater, config, marked).weights(0).sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_mean_over_kept_tokens_counts_those_within_the_bounds(model_path: Path, tmp_path: Path) -> None:
    loss = {"importance_mode": "mask", "importance_cap": 2.0, "importance_denominator": "kept", "kl_coef": 0.0}
    config = learner_config(model_path, loss=loss, learner={"minibatch_size": 8})
    batch = random_batch()  # its rollout log-probs are noise, so that many ratios are far from 1
    policy = tiny_policy(config)
    updater = make_updater(config, policy, tmp_path)
    step = step_of(updater, config, batch)
    updater._evaluate_anchors(step)
    anchor_M, rollout_M = step.anchor_M, step.inputs.rollout_M
    assert not bool(anchor_M.isnan().any()), "known before the first pass, which must have its denominator"
    kept = ((anchor_M - rollout_M).exp() <= 2.0).numpy()
    weights = step.weights(0).numpy()
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_allclose(weights, kept / kept.sum(), rtol=1e-5)
    [result] = updater.run(batch).minibatches
    ratio = np.exp(anchor_M.numpy() - rollout_M.numpy())
    want = -(ratio * step.inputs.advantage_M.numpy())[kept].sum() / kept.sum() - 0.001 * result.entropy
    # The entropy bonus is over kept tokens as well, so it differs a little from the record's mean over all.
    assert result.loss == pytest.approx(want, abs=2e-3)


def test_a_reset_optimizer_begins_each_step_without_moments(model_path: Path, tmp_path: Path) -> None:
    counts = []
    for reset in (False, True):
        config = learner_config(model_path, learner={"reset_optimizer": reset})
        updater = make_updater(config, tiny_policy(config), tmp_path)
        for step in (1, 2):
            updater.run(random_batch(step=step))
        counts.append({int(state["step"]) for state in updater.optimizer.state.values()})
    assert counts == [{6}, {3}], "three mini-batches per step"
