"""What single methods add to a step: a critic, cross-entropy, a reference that is replaced, masks, fresh moments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.config.tree import Config
from bapo.core.errors import DivergenceError
from bapo.core.sequences import sequences_of
from bapo.core.types import Batch
from learner.advantages.formulas import whitened
from learner.update.critic import load_critic, value_loss
from learner.update.step_state import StepInputs, minibatch_weights, step_inputs, step_logprobs
from tests.support.learner import ALONE, CPU, learner_config, make_updater, random_batch, tiny_policy, with_supervised
from tests.support.tiny_model import perturb
from tests.support.vectors import vector


def step_of(config: Config, batch: Batch) -> StepInputs:
    return step_inputs(batch, config, CPU)


# -- a critic


PPO = {"advantage": "gae", "kl_coef": 0.0, "entropy_coef": 0.0, "ratio_mode": "direct"}


def test_v15_the_value_loss_takes_the_worse_of_the_value_and_the_clipped_one() -> None:
    given = vector("V15.gae")
    now, before = torch.tensor(given["vpreds"]), torch.tensor(given["values"])
    found = value_loss(now, before, torch.tensor(given["returns_lam1"]), 0.5)
    assert float(found.mean()) == pytest.approx(given["value_loss_clip0_5"], abs=1e-6)


def test_a_new_critic_values_everything_at_0_so_advantages_are_whitened_rewards(
    model_path: Path, tmp_path: Path
) -> None:
    config, batch = learner_config(model_path, loss=PPO), random_batch()
    updater = make_updater(config, tiny_policy(config), tmp_path, critic=load_critic(config, ALONE))
    assert updater._critic is not None
    step, facts = updater._critic.run(step_of(config, batch))
    rewards = np.concatenate([np.repeat(entry.group.rewards, entry.group.lengths) for entry in batch.entries])
    np.testing.assert_allclose(step.advantage_M.numpy(), whitened(rewards), atol=1e-5)
    # Three mini-batches; the first sees V = 0, so its loss is half the share of tokens of right responses.
    assert facts["value_mean"] == 0.0
    assert 0 < facts["value_loss"] < 0.5


def test_the_critic_learns_the_reward_and_its_values_are_those_of_a_plain_pass(
    model_path: Path, tmp_path: Path
) -> None:
    config = learner_config(model_path, loss=PPO, critic={"lr": 3e-2, "value_clip": 10.0})
    batch, critic = random_batch(), load_critic(config, ALONE)
    updater = make_updater(config, tiny_policy(config), tmp_path, critic=critic)
    losses = [updater.run(dataclasses.replace(batch, step=step)).facts["value_loss"] for step in range(1, 13)]
    assert losses[-1] < 0.5 * losses[0]
    step = step_of(config, batch)
    values = updater._passes.evaluate(critic, step, np.arange(32)).split(step.columns.lengths_R.tolist())
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).base_model.eval()
    plain.load_state_dict(critic.model.state_dict())
    group, response = batch.entries[0].group, next(sequences_of(batch.entries[0].group))
    prompt = group.prompt_token_ids.tolist()
    with torch.no_grad():
        hidden = plain(torch.tensor([prompt + response.token_ids.tolist()])).last_hidden_state[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(values[0], critic.head(hidden).squeeze(1), rtol=0, atol=1e-4)


def test_reused_groups_are_valued_by_the_critic_of_their_step(model_path: Path, tmp_path: Path) -> None:
    config, batch = learner_config(model_path, loss=PPO, critic={"lr": 1e-3}), random_batch()
    updater = make_updater(config, tiny_policy(config), tmp_path, critic=load_critic(config, ALONE))
    first = updater.run(batch).facts["value_mean"]
    second = updater.run(dataclasses.replace(batch, step=2)).facts["value_mean"]
    assert first == 0.0
    assert abs(second) > 1e-3


def test_a_critic_does_not_depend_on_the_token_budget(model_path: Path, tmp_path: Path) -> None:
    losses = []
    for budget in (64, 5000):
        config = learner_config(model_path, loss=PPO, learner={"microbatch_tokens": budget}, critic={"lr": 1e-3})
        updater = make_updater(config, tiny_policy(config), tmp_path, critic=load_critic(config, ALONE))
        reports = [updater.run(dataclasses.replace(random_batch(), step=step)) for step in (1, 2)]
        losses.append([report.facts["value_loss"] for report in reports])
        losses[-1] += [result.loss for report in reports for result in report.minibatches]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)


# -- cross-entropy


def test_entries_of_kind_sft_are_trained_by_cross_entropy_and_by_nothing_else(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, supervised={"lr": 1e-3, "entropy_coef": 0.0}, learner={"lr": 1e-9})
    policy, batch = tiny_policy(config), with_supervised(random_batch(), 1, 4)
    updater = make_updater(config, policy, tmp_path)
    with torch.no_grad():
        step = step_of(config, batch)
        assert sorted(group for groups in step.plan for group in groups) == [0, 2, 3, 5, 6, 7]
        responses = step.columns.responses_of([1, 4])
        logprobs = updater._passes.evaluate(lambda micro: policy(micro)[0], step, responses)
    want = -float(logprobs.sum()) / float(step.columns.lengths_R[responses].sum())
    first = updater.run(batch).facts["supervised_loss"]
    assert first == pytest.approx(want, rel=1e-4)
    for number in range(2, 8):
        last = updater.run(dataclasses.replace(batch, step=number)).facts["supervised_loss"]
    assert last < 0.8 * first


# -- the reference


def test_behind_its_step_the_reference_is_the_policy(model_path: Path, tmp_path: Path) -> None:
    loss = {"kl_ref": "convex", "kl_coef": 0.1, "kl_restart_step": 2, "importance_level": "none"}
    config = learner_config(model_path, loss=loss, learner={"minibatch_size": 8})
    policy, reference = tiny_policy(config), tiny_policy(config).requires_grad_(False)
    perturb(policy.model, seed=1)  # type: ignore[arg-type]
    updater = make_updater(config, policy, tmp_path, reference)
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
        policy, reference = tiny_policy(config), tiny_policy(config).requires_grad_(False)
        perturb(policy.model, seed=1)  # type: ignore[arg-type]
        batch = dataclasses.replace(random_batch(), step=number)
        kl.append(make_updater(config, policy, tmp_path, reference).run(batch).minibatches[0].kl)
    # In the first mini-batch the policy is the policy of the step: that part of the term is 0.
    assert [kl[1] / kl[0], kl[2] / kl[0]] == pytest.approx([0.9, 0.5], rel=1e-5)


# -- passes and moments


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
    step = step_of(config, marked)
    weights = minibatch_weights(step, step_logprobs(step, config.loss, updater.memory), 0, config)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_mean_over_kept_tokens_counts_those_within_the_bounds(model_path: Path, tmp_path: Path) -> None:
    loss = {"importance_mode": "mask", "importance_cap": 2.0, "importance_denominator": "kept", "kl_coef": 0.0}
    config = learner_config(model_path, loss=loss, learner={"minibatch_size": 8})
    batch = random_batch()  # its rollout log-probs are noise, so that many ratios are far from 1
    policy = tiny_policy(config)
    updater = make_updater(config, policy, tmp_path)
    step = step_of(config, batch)
    known = step_logprobs(step, config.loss, updater.memory)
    updater._evaluate_anchors(step, known)
    assert not bool(known.anchor_M.isnan().any()), "known before the first pass, which must have its denominator"
    kept = ((known.anchor_M - step.rollout_M).exp() <= 2.0).numpy()
    weights = minibatch_weights(step, known, 0, config).numpy()
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_allclose(weights, kept / kept.sum(), rtol=1e-5)
    [result] = updater.run(batch).minibatches
    ratio = np.exp(known.anchor_M.numpy() - step.rollout_M.numpy())
    want = -(ratio * step.advantage_M.numpy())[kept].sum() / kept.sum() - 0.001 * result.entropy
    # The entropy bonus is over kept tokens as well, so it differs a little from the record's mean over all.
    assert result.loss == pytest.approx(want, abs=2e-3)


def test_a_critic_that_diverges_stops_the_run(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, loss=PPO, critic={"lr": 1e30, "grad_clip": 1e-3})
    updater = make_updater(config, tiny_policy(config), tmp_path, critic=load_critic(config, ALONE))
    with pytest.raises(DivergenceError, match="step 1, critic: loss is"):
        updater.run(random_batch())


def test_a_batch_of_supervised_entries_alone_has_no_policy_update(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path)
    batch = with_supervised(random_batch(num_groups=2), 0, 1)
    report = make_updater(config, tiny_policy(config), tmp_path).run(batch)
    assert (report.minibatches, sorted(report.facts)) == ((), ["supervised_loss"])


def test_a_reset_optimizer_begins_each_step_without_moments(model_path: Path, tmp_path: Path) -> None:
    counts = []
    for reset in (False, True):
        config = learner_config(model_path, learner={"reset_optimizer": reset})
        updater = make_updater(config, tiny_policy(config), tmp_path)
        for step in (1, 2):
            updater.run(random_batch(step=step))
        counts.append({int(state["step"]) for state in updater.optimizer.state.values()})
    assert counts == [{6}, {3}], "three mini-batches per step"
