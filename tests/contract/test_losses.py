"""What every policy loss promises: found by name from the folder, so that a new file is tested without an edit here.

That two ranks give what one gives is in `tests/full/test_fsdp.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo.algorithms.methods import LOSS
from bapo.config.tree import Config
from bapo.core.types import Batch
from learner.batch.microbatch import rows_of
from learner.batch.packing import minibatches
from learner.losses.base import PolicyLoss, TokenInputs, load_loss
from learner.losses.objective import Objective
from learner.model.policy import Policy
from tests.support.learner import (
    CPU,
    learner_config,
    loss_settings,
    make_updater,
    random_batch,
    tiny_policy,
    with_experts,
)


def config_of(name: str, path: Path | str = "model", budget: int = 5000, **loss: Any) -> Config:
    """Two passes, so that ratios leave 1."""
    learner = {"microbatch_tokens": budget, "lr": 1e-4, "epochs": 2}
    return learner_config(path, loss={**loss_settings(name), **loss}, learner=learner)


def trained(config: Config, batch: Batch, path: Path) -> tuple[list[float], list[float], Policy]:
    """(losses, gradient norms) of the mini-batches, and the weights behind them."""
    policy = tiny_policy(config)
    results = make_updater(config, policy, path).run(batch).minibatches
    return [result.loss for result in results], [result.grad_norm for result in results], policy


@pytest.mark.parametrize("name", LOSS.names())
@pytest.mark.parametrize("aggregation", ["token_mean", "two_term"])
def test_losses_and_gradients_do_not_depend_on_the_token_budget(
    name: str, aggregation: str, model_path: Path, tmp_path: Path
) -> None:
    batch = with_experts(random_batch())
    whole = trained(config_of(name, model_path, aggregation=aggregation), batch, tmp_path)
    cut = trained(config_of(name, model_path, budget=64, aggregation=aggregation), batch, tmp_path)
    assert len(whole[0]) == 6
    assert cut[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-5)
    assert cut[1] == pytest.approx(whole[1], rel=1e-3, abs=1e-5)
    assert max(whole[1]) > 1e-4, "a loss without a gradient would agree with itself"


@pytest.mark.parametrize("name", [name for name in LOSS.names() if name != "sft"])  # which has no part for advantages
def test_the_first_minibatch_trains_right_responses_up_and_wrong_ones_down(name: str) -> None:
    # At theta_t, and sampled by it: whatever the surrogate, d loss / d log pi has the sign of -A.
    logprobs = torch.tensor([-0.5, -1.0, -0.7, -0.2], requires_grad=True)
    config = config_of(name).loss
    given = TokenInputs(
        rows=rows_of(np.array([2, 2]), CPU),
        anchor_M=logprobs.detach(),
        rollout_M=logprobs.detach(),
        reference_M=None,
        advantage_M=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        weight_M=torch.ones(4),
        expert_M=torch.zeros(4, dtype=torch.bool),
    )
    Objective(config).token_losses(logprobs, given).surrogate_M.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.sign().tolist() == [-1, -1, 1, 1]


def has_both_modes(name: str) -> bool:
    """Some losses are centred on the policy of the step, or know the rollout policy alone."""
    return {"decoupled", "direct"} <= set(LOSS.find(name).ratio_modes)


@pytest.mark.parametrize("name", [name for name in LOSS.names() if has_both_modes(name)])
def test_decoupled_is_direct_when_the_policy_of_the_step_sampled(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old, logprobs = (-torch.rand(6, generator=generator) for _ in range(2))
    given = TokenInputs(
        rows=rows_of(np.array([2, 4]), CPU),
        anchor_M=old,
        rollout_M=old,
        reference_M=None,
        advantage_M=torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, -0.5]),
        weight_M=torch.ones(6),
        expert_M=torch.zeros(6, dtype=torch.bool),
    )
    found = [
        Objective(config).token_losses(logprobs, given).surrogate_M
        for config in (config_of(name, ratio_mode=mode).loss for mode in ("decoupled", "direct"))
    ]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("name", LOSS.names())
def test_an_absurd_log_ratio_has_a_finite_loss_and_gradient(name: str) -> None:
    config = config_of(name).loss
    logprobs = torch.full((3,), -30.0, requires_grad=True)
    given = TokenInputs(
        rows=rows_of(np.array([1, 2]), CPU),
        anchor_M=torch.full((3,), -500.0),
        rollout_M=torch.full((3,), -900.0),
        reference_M=None,
        advantage_M=torch.tensor([1.0, -1.0, -1.0]),
        weight_M=torch.ones(3),
        expert_M=torch.tensor([False, False, True]),
    )
    Objective(config).token_losses(logprobs, given).surrogate_M.sum().backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize("name", [name for name in LOSS.names() if load_loss(config_of(name).loss).whole_minibatch])
def test_a_loss_that_is_searched_sees_every_computed_token_of_its_minibatch_and_no_other(
    name: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, batch = config_of(name, model_path, budget=64), random_batch()
    seen: list[int] = []
    kind = type(load_loss(config.loss))
    fitted = kind.fitted

    def noted(self: PolicyLoss, logprobs_M: torch.Tensor, anchor_M: torch.Tensor, inputs: TokenInputs) -> PolicyLoss:
        seen.append(len(logprobs_M))
        return fitted(self, logprobs_M, anchor_M, inputs)

    monkeypatch.setattr(kind, "fitted", noted)
    trained(config, batch, tmp_path)
    sizes = [len(entry.group.token_ids) for entry in batch.entries]
    plans = [minibatches(8, 3, seed=7, step=1, epoch=epoch) for epoch in (0, 1)]
    assert seen == [sum(sizes[g] for g in chosen) for plan in plans for chosen in plan]
