"""The surrogate objective against the vectors of the specification (V2, V5, V12, V13) and against itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo.config.objective import LossConfig
from learner.batching import rows_of
from learner.loss import TokenLosses, objective, token_losses
from learner.losses.aggregation import token_weights
from learner.losses.base import TokenInputs
from learner.losses.clips import clipped_surrogate, dual_clipped
from learner.losses.corrections import importance_weight
from learner.losses.divergences import is_rev, k1, k2, k3
from learner.losses.registry import load_loss
from tests.learner_setup import CPU

# Two responses of 3 and 2 tokens, one after the other.
LENGTHS = np.array([3, 2])
ROWS = rows_of(LENGTHS, CPU)
OLD = torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.2])
NEW = torch.tensor([-0.8, -0.9, -1.2, -0.2, -3.0])
BEHAVE = torch.tensor([-1.2, -0.6, -3.5, -0.7, -1.0])
ADVANTAGE = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5])


def settings(**fields: object) -> LossConfig:
    return LossConfig.model_validate({"kl_coef": 0.0, "entropy_coef": 0.0, "ratio_mode": "official", **fields})


def inputs(anchor: Tensor, rollout: Tensor, reference: Tensor | None = None) -> TokenInputs:
    return TokenInputs(
        anchor_M=anchor,
        rollout_M=rollout,
        reference_M=reference,
        advantage_M=ADVANTAGE,
        weight_M=torch.full((5,), 0.2),
        rows=ROWS,
        expert_M=torch.zeros(5, dtype=torch.bool),
    )


def losses_of(given: TokenInputs, config: LossConfig, logprobs: Tensor = NEW) -> TokenLosses:
    return token_losses(logprobs, given, load_loss(config), config)


def total(anchor: Tensor, rollout: Tensor, config: LossConfig, max_response_tokens: int = 4) -> float:
    """Loss of the two responses as one mini-batch."""
    weight_R = token_weights(LENGTHS, config.aggregation, max_response_tokens)
    weight = torch.from_numpy(np.repeat(weight_R, LENGTHS)).float()
    losses = losses_of(inputs(anchor, rollout), config)
    return float(objective(losses, torch.zeros(5), weight, config))


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token_mean", -0.706645),
        ("seq_mean_token_mean", -0.486841),
        ("seq_mean_token_sum", -1.766612),
        ("const_len", -0.441653),
    ],
)
def test_v2_clip_higher_with_each_aggregation(aggregation: str, want: float) -> None:
    assert total(OLD, OLD, settings(aggregation=aggregation)) == pytest.approx(want, abs=1e-5)


def test_v2_token_losses_ratios_and_clip_fraction() -> None:
    losses = losses_of(inputs(OLD, OLD), settings())
    assert losses.surrogate_M.tolist() == pytest.approx([-1.832104, -1.005480, -1.92, 0.824361, 0.4], abs=1e-5)
    assert losses.ratio_M.tolist() == pytest.approx([1.221403, 0.670320, 2.225541, 1.648721, 0.165299], abs=1e-5)
    assert losses.clipped_M.tolist() == [0, 0, 1, 0, 1]


def test_v2_symmetric_clip() -> None:
    config = settings(clip_low=0.2, clip_high=0.2)
    losses = losses_of(inputs(OLD, OLD), config)
    assert losses.surrogate_M.tolist() == pytest.approx([-1.8, -1.005480, -1.8, 0.824361, 0.4], abs=1e-5)
    assert total(OLD, OLD, config) == pytest.approx(-0.676224, abs=1e-5)


@pytest.mark.parametrize(("bound", "want"), [(3.0, [3.0, 1.0]), (10.0, [4.481689, 1.0]), (None, [4.481689, 1.0])])
def test_v2_dual_clip(bound: float | None, want: list[float]) -> None:
    ratio = (torch.tensor([0.5, -1.0]) - torch.tensor([-1.0, -1.0])).exp()
    advantage = torch.tensor([-1.0, -1.0])
    loss, _ = dual_clipped(*clipped_surrogate(ratio, advantage, 0.8, 1.28), advantage, bound)
    assert loss.tolist() == pytest.approx(want, abs=1e-5)


def test_dual_clip_stops_the_gradient_of_a_token_beyond_it() -> None:
    logprobs = torch.tensor([0.5, -1.0], requires_grad=True)
    advantage = torch.tensor([-1.0, -1.0])
    loss, clipped = dual_clipped(*clipped_surrogate((logprobs + 1.0).exp(), advantage, 0.8, 1.28), advantage, 3.0)
    loss.sum().backward()
    assert logprobs.grad is not None
    # rho A at the second token: the gradient of exp(0) * 1.
    assert logprobs.grad.tolist() == [0.0, 1.0]
    assert clipped.tolist() == [1.0, 0.0], "a bounded token counts as clipped"


@pytest.mark.parametrize(
    ("cap", "tokens", "mean"),
    [
        (2.0, [-2.237737, -1.111227, -3.84, 0.824361, 0.327492], -1.207422),
        (3.0, [-2.237737, -1.111227, -5.76, 0.824361, 0.327492], -1.591422),
    ],
)
def test_v5_decoupled_with_truncated_importance_weights(cap: float, tokens: list[float], mean: float) -> None:
    config = settings(ratio_mode="decoupled", importance_cap=cap)
    losses = losses_of(inputs(OLD, BEHAVE), config)
    assert losses.surrogate_M.tolist() == pytest.approx(tokens, abs=1e-5)
    assert total(OLD, BEHAVE, config) == pytest.approx(mean, abs=1e-5)


def test_v5_importance_weights_without_a_cap() -> None:
    weights, kept = importance_weight(OLD, BEHAVE, ROWS, settings(importance_cap=None))
    assert kept is None
    assert weights.tolist() == pytest.approx([1.221403, 1.105171, 4.481689, 1.0, 0.818731], abs=1e-5)


def test_v5_direct_to_the_behaviour_policy() -> None:
    config = settings(ratio_mode="direct")
    losses = losses_of(inputs(BEHAVE, BEHAVE), config)
    assert losses.surrogate_M.tolist() == pytest.approx([-1.92, -1.111227, -1.92, 0.824361, 0.4], abs=1e-5)
    assert losses.ratio_M.tolist() == pytest.approx([1.491825, 0.740818, 9.974182, 1.648721, 0.135335], abs=1e-5)
    assert losses.clipped_M.mean().item() == pytest.approx(0.6)
    assert total(BEHAVE, BEHAVE, config) == pytest.approx(-0.745373, abs=1e-5)


def test_direct_ignores_a_cap_below_one() -> None:
    config = settings(ratio_mode="direct", importance_cap=0.5)
    assert total(BEHAVE, BEHAVE, config) == pytest.approx(-0.745373, abs=1e-5)


def test_decoupled_is_direct_when_the_anchor_is_the_behaviour_policy() -> None:
    direct = total(BEHAVE, BEHAVE, settings(ratio_mode="direct"))
    assert total(BEHAVE, BEHAVE, settings(ratio_mode="decoupled")) == pytest.approx(direct, abs=1e-6)


def test_an_unknown_anchor_is_the_policy_itself_without_gradient() -> None:
    logprobs = NEW.clone().requires_grad_()
    config = settings(ratio_mode="decoupled", importance_cap=None)
    losses = losses_of(inputs(torch.full((5,), math.nan), BEHAVE), config, logprobs)
    losses.surrogate_M.sum().backward()
    weights = (NEW - BEHAVE).exp()
    assert losses.ratio_M.tolist() == [1.0] * 5
    assert logprobs.grad is not None
    # At rho = 1 the gradient of -w rho A is -w A.
    torch.testing.assert_close(logprobs.grad, -weights * ADVANTAGE)


def test_v12_kl_to_behaviour_is_exact_in_expectation_over_a_categorical() -> None:
    alpha, pi = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    assert float((alpha * is_rev(pi.log(), alpha.log())).sum()) == pytest.approx(0.025815, abs=1e-6)
    assert float((alpha * k3(pi.log(), alpha.log())).sum()) == pytest.approx(0.024733, abs=1e-6)


def test_v12_kl_to_behaviour_of_two_sequences() -> None:
    alpha = torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.2])
    pi = torch.tensor([-0.9, -0.6, -1.7, -0.8, -1.1])
    kl = is_rev(pi, alpha)
    assert [float(kl[:3].sum()), float(kl[3:].sum())] == pytest.approx([0.065124, 0.010025], abs=1e-6)


@pytest.mark.parametrize(("estimate", "want"), [(k1, 0.3), (k2, 0.045), (k3, 0.040818)])
def test_v13_estimators_of_the_kl_to_the_reference(estimate: Callable[[Tensor, Tensor], Tensor], want: float) -> None:
    assert float(estimate(torch.tensor(-1.0), torch.tensor(-1.3))) == pytest.approx(want, abs=1e-6)


def test_the_reference_replaces_the_behaviour_policy_in_the_kl_term() -> None:
    reference = torch.tensor([-1.1, -1.2, -1.5, -0.5, -3.3])
    config = settings(kl_coef=0.5, kl_ref="reference")
    losses = losses_of(inputs(OLD, OLD, reference=reference), config)
    assert losses.kl_M[4].item() == pytest.approx(0.040818, abs=1e-6)  # V13: log-ratio -0.3
    with_kl = objective(losses, torch.zeros(5), torch.full((5,), 0.2), config)
    assert float(with_kl) == pytest.approx(-0.706645 + 0.5 * float(losses.kl_M.mean()), abs=1e-5)


def test_the_entropy_bonus_lowers_the_loss_by_the_mean_entropy() -> None:
    config = settings(entropy_coef=0.1)
    losses = losses_of(inputs(OLD, OLD), config)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    loss = objective(losses, entropy, torch.full((5,), 0.2), config)
    assert float(loss) == pytest.approx(-0.706645 - 0.1 * 3.0, abs=1e-5)


def test_an_absurd_log_ratio_stays_finite() -> None:
    logprobs = torch.zeros(5, requires_grad=True)
    far = inputs(torch.full((5,), -500.0), torch.full((5,), -900.0))
    losses = losses_of(far, settings(dual_clip=None), logprobs)
    (losses.surrogate_M + losses.kl_M).sum().backward()
    assert bool(losses.surrogate_M.isfinite().all())
    assert bool(losses.kl_M.isfinite().all())
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token_mean", [0.2, 0.2]),
        ("seq_mean_token_mean", [1 / 6, 1 / 4]),
        ("seq_mean_token_sum", [0.5, 0.5]),
        ("const_len", [0.125, 0.125]),
    ],
)
def test_each_aggregation_is_a_weight_per_token(aggregation: str, want: list[float]) -> None:
    assert token_weights(LENGTHS, aggregation, 4).tolist() == pytest.approx(want)  # type: ignore[arg-type]
