"""A critic beside the policy, and the advantages that it gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.core.errors import DivergenceError
from bapo.core.sequences import sequences_of
from contrib.gae.critic import CriticTrainer, value_loss
from learner.advantages.formulas import whitened
from learner.update.step import Step, step_inputs
from learner.update.update import Updater
from tests.support.learner import CPU, learner_config, make_updater, random_batch, tiny_policy
from tests.support.vectors import vector


def ppo(**options: float) -> dict[str, object]:
    loss = {"advantage": "gae", "kl_coef": 0.0, "entropy_coef": 0.0, "ratio_mode": "direct"}
    return {**loss, "advantage_options": options}


def critic_of(updater: Updater) -> CriticTrainer:
    [critic] = (hook for hook in updater.hooks if isinstance(hook, CriticTrainer))
    return critic


def test_v15_the_value_loss_takes_the_worse_of_the_value_and_the_clipped_one() -> None:
    given = vector("V15.gae")
    now, before = torch.tensor(given["vpreds"]), torch.tensor(given["values"])
    found = value_loss(now, before, torch.tensor(given["returns_lam1"]), 0.5)
    assert float(found.mean()) == pytest.approx(given["value_loss_clip0_5"], abs=1e-6)


def test_a_new_critic_values_everything_at_0_so_advantages_are_whitened_rewards(
    model_path: Path, tmp_path: Path
) -> None:
    config, batch = learner_config(model_path, loss=ppo()), random_batch()
    updater = make_updater(config, tiny_policy(config), tmp_path)
    step = Step.of(step_inputs(batch, config, CPU), updater.memory)
    critic_of(updater).before_passes(step)
    rewards = np.concatenate([np.repeat(entry.group.rewards, entry.group.lengths) for entry in batch.entries])
    np.testing.assert_allclose(step.inputs.advantage_M.numpy(), whitened(rewards), atol=1e-5)
    # Three mini-batches; the first sees V = 0, so its loss is half the share of tokens of right responses.
    assert step.facts["value_mean"] == 0.0
    assert 0 < step.facts["value_loss"] < 0.5


def test_the_critic_learns_the_reward_and_its_values_are_those_of_a_plain_pass(
    model_path: Path, tmp_path: Path
) -> None:
    config = learner_config(model_path, loss=ppo(critic_lr=3e-2, value_clip=10.0))
    batch = random_batch()
    updater = make_updater(config, tiny_policy(config), tmp_path)
    losses = [updater.run(dataclasses.replace(batch, step=step)).facts["value_loss"] for step in range(1, 13)]
    assert losses[-1] < 0.5 * losses[0]
    step, critic = step_inputs(batch, config, CPU), critic_of(updater).critic
    values = updater.passes.evaluate(critic, step, np.arange(32)).split(step.columns.lengths_R.tolist())
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).base_model.eval()
    plain.load_state_dict(critic.model.state_dict())
    group, response = batch.entries[0].group, next(sequences_of(batch.entries[0].group))
    prompt = group.prompt_token_ids.tolist()
    with torch.no_grad():
        hidden = plain(torch.tensor([prompt + response.token_ids.tolist()])).last_hidden_state[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(values[0], critic.head(hidden).squeeze(1), rtol=0, atol=1e-4)


def test_reused_groups_are_valued_by_the_critic_of_their_step(model_path: Path, tmp_path: Path) -> None:
    config, batch = learner_config(model_path, loss=ppo(critic_lr=1e-3)), random_batch()
    updater = make_updater(config, tiny_policy(config), tmp_path)
    first = updater.run(batch).facts["value_mean"]
    second = updater.run(dataclasses.replace(batch, step=2)).facts["value_mean"]
    assert first == 0.0
    assert abs(second) > 1e-3


def test_a_critic_does_not_depend_on_the_token_budget(model_path: Path, tmp_path: Path) -> None:
    losses = []
    for budget in (64, 5000):
        config = learner_config(model_path, loss=ppo(critic_lr=1e-3), learner={"microbatch_tokens": budget})
        updater = make_updater(config, tiny_policy(config), tmp_path)
        reports = [updater.run(dataclasses.replace(random_batch(), step=step)) for step in (1, 2)]
        losses.append([report.facts["value_loss"] for report in reports])
        losses[-1] += [result.loss for report in reports for result in report.minibatches]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)


def test_a_critic_that_diverges_stops_the_run(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, loss=ppo(critic_lr=1e30, critic_grad_clip=1e-3))
    updater = make_updater(config, tiny_policy(config), tmp_path)
    with pytest.raises(DivergenceError, match="step 1, critic: loss is"):
        updater.run(random_batch())
