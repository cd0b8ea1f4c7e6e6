"""The surrogate objective against the reference vectors (V2, V5, V12, V13) and against itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo.config.objective import LossConfig
from learner.batch.microbatch import rows_of
from learner.losses.base import TokenInputs
from learner.losses.objective import Objective, TokenLosses, importance_weight, is_rev, k1, k2, k3, token_weights
from learner.losses.ratios import clipped_surrogate, dual_clipped
from tests.support.learner import CPU
from tests.support.vectors import tokens, vector

# Two responses of 3 and 2 tokens, one after the other.
V2 = vector("V2.dapo")
LENGTHS = np.array(V2["mask"]).sum(axis=1).astype(int)
ROWS = rows_of(LENGTHS, CPU)
OLD = torch.tensor(tokens(V2["old"]))
NEW = torch.tensor(tokens(V2["new"]))
BEHAVE = torch.tensor(tokens(vector("V5.decoupled_TIS_C2", "behave")))
ADVANTAGE = torch.from_numpy(np.repeat(V2["A"], LENGTHS)).float()


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
    return Objective(config).token_losses(logprobs, given)


def total(anchor: Tensor, rollout: Tensor, config: LossConfig, max_response_tokens: int = 4) -> float:
    """Loss of the two responses as one mini-batch."""
    weight_R = token_weights(LENGTHS, config.aggregation, max_response_tokens)
    weight = torch.from_numpy(np.repeat(weight_R, LENGTHS)).float()
    losses = losses_of(inputs(anchor, rollout), config)
    return float(Objective(config).total(losses, torch.zeros(5), weight))


@pytest.mark.parametrize(
    ("aggregation", "key"),
    [
        ("token_mean", "token_mean"),
        ("seq_mean_token_mean", "seq_mean_token_mean"),
        ("seq_mean_token_sum", "seq_mean_token_sum"),
        ("const_len", "drgrpo_const_Lmax"),
    ],
)
def test_v2_clip_higher_with_each_aggregation(aggregation: str, key: str) -> None:
    want = V2["agg_Lmax4"][key]
    assert total(OLD, OLD, settings(aggregation=aggregation)) == pytest.approx(want, abs=1e-5)


def test_v2_token_losses_ratios_and_clip_fraction() -> None:
    losses = losses_of(inputs(OLD, OLD), settings())
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(V2["loss_tok"]), abs=1e-5)
    assert losses.ratio_M.tolist() == pytest.approx(tokens(V2["rho"]), abs=1e-5)
    assert losses.clipped_M.tolist() == [0, 0, 1, 0, 1]
    assert losses.clipped_M.mean().item() == pytest.approx(V2["clipfrac"])


def test_v2_symmetric_clip() -> None:
    config = settings(clip_low=0.2, clip_high=0.2)
    losses = losses_of(inputs(OLD, OLD), config)
    want = vector("V2.symmetric_eps0.2")
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(want["loss_tok"]), abs=1e-5)
    assert total(OLD, OLD, config) == pytest.approx(want["token_mean"], abs=1e-5)


@pytest.mark.parametrize(
    ("bound", "name"), [(3.0, "V2.dualclip_c3"), (10.0, "V2.dualclip_c10"), (None, "V2.dualclip_c10")]
)
def test_v2_dual_clip(bound: float | None, name: str) -> None:
    given = vector(name)
    ratio = (torch.tensor(given["new"][0]) - torch.tensor(given["old"][0])).exp()
    advantage = torch.tensor(given["A"] * 2)
    loss, _ = dual_clipped(*clipped_surrogate(ratio, advantage, 0.8, 1.28), advantage, bound)
    assert loss.tolist() == pytest.approx(given["loss_tok"][0], abs=1e-5)


def test_dual_clip_stops_the_gradient_of_a_token_beyond_it() -> None:
    logprobs = torch.tensor([0.5, -1.0], requires_grad=True)
    advantage = torch.tensor([-1.0, -1.0])
    loss, clipped = dual_clipped(*clipped_surrogate((logprobs + 1.0).exp(), advantage, 0.8, 1.28), advantage, 3.0)
    loss.sum().backward()
    assert logprobs.grad is not None
    # rho A at the second token: the gradient of exp(0) * 1.
    assert logprobs.grad.tolist() == [0.0, 1.0]
    assert clipped.tolist() == [1.0, 0.0], "a bounded token counts as clipped"


@pytest.mark.parametrize(("cap", "name"), [(2.0, "V5.decoupled_TIS_C2"), (3.0, "V5.decoupled_TIS_C3")])
def test_v5_decoupled_with_truncated_importance_weights(cap: float, name: str) -> None:
    given = vector(name)
    config = settings(ratio_mode="decoupled", importance_cap=cap)
    assert tokens(given["behave"]) == pytest.approx(BEHAVE.tolist())
    weights, _ = importance_weight(OLD, BEHAVE, ROWS, config)
    assert weights.tolist() == pytest.approx(tokens(given["w"]), abs=1e-5)
    losses = losses_of(inputs(OLD, BEHAVE), config)
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(given["loss_tok"]), abs=1e-5)
    assert total(OLD, BEHAVE, config) == pytest.approx(given["token_mean"], abs=1e-5)


def test_v5_direct_to_the_behaviour_policy() -> None:
    config = settings(ratio_mode="direct")
    losses = losses_of(inputs(BEHAVE, BEHAVE), config)
    want = vector("V5.direct_behaviour_ratio")
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(want["loss_tok"]), abs=1e-5)
    assert losses.ratio_M.tolist() == pytest.approx(tokens(want["rho"]), abs=1e-5)
    assert losses.clipped_M.mean().item() == pytest.approx(want["clipfrac"])
    assert total(BEHAVE, BEHAVE, config) == pytest.approx(want["token_mean"], abs=1e-5)


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


def test_an_interpolated_anchor_lies_between_alpha_and_the_policy_in_log_probs() -> None:
    # log pi_prox = log alpha + a (log pi - log alpha): -1.2, -0.6 - 0.15, -3.5 + 2/3 * 2.3 | -0.7 + 0.25, -1.0
    given = dataclasses.replace(inputs(BEHAVE, BEHAVE), policy_share_M=torch.tensor([0.0, 0.5, 2 / 3, 0.5, 0.0]))
    logprobs = NEW.clone().requires_grad_()
    losses = losses_of(given, settings(ratio_mode="interpolated", importance_cap=2.0), logprobs)
    # exp of -0.8 + 1.2, -0.9 + 0.75, -1.2 + 1.966667 | -0.2 + 0.45, -3.0 + 1.0
    assert losses.ratio_M.tolist() == pytest.approx([1.491825, 0.860708, 2.152580, 1.284025, 0.135335], abs=1e-5)
    # w = pi_prox / alpha = 1, e^-0.15, 4.63 cut to 2 | e^0.25, 1; clip: 1.28, none, 1.28 | none for A < 0, 0.8
    # -1.5 * 1.28, -1.5 * e^-0.3, -1.5 * 1.28 * 2 | 0.5 * e^0.5, 0.5 * 0.8
    want = [-1.92, -1.111227, -3.84, 0.824361, 0.4]
    assert losses.surrogate_M.tolist() == pytest.approx(want, abs=1e-5)
    losses.surrogate_M.sum().backward()
    # The anchor has no gradient: d/d log pi of -w rho A is itself, and what is clipped stands still.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.111227, 0.0, 0.824361, 0.0], abs=1e-5)


def test_v12_kl_to_behaviour_is_exact_in_expectation_over_a_categorical() -> None:
    given = vector("V12.exact_cat")
    alpha, pi = torch.tensor(given["alpha"]), torch.tensor(given["pi"])
    assert float((alpha * is_rev(pi.log(), alpha.log())).sum()) == pytest.approx(given["E_klr"], abs=1e-6)
    naive = float((alpha * k3(pi.log(), alpha.log())).sum())
    assert naive == pytest.approx(given["E_k3_naive_alpha_over_pi"], abs=1e-6), "biased: its tokens are alpha's"


def test_v12_kl_to_behaviour_of_two_sequences() -> None:
    given = vector("V12.tv")
    kl = is_rev(torch.tensor(tokens(given["logp_pi"])), torch.tensor(tokens(given["logp_alpha"])))
    assert [float(kl[:3].sum()), float(kl[3:].sum())] == pytest.approx(given["kl_pi_alpha_seq"], abs=1e-6)


@pytest.mark.parametrize(("estimate", "key"), [(k1, "k1"), (k2, "k2"), (k3, "k3")])
def test_v13_estimators_of_the_kl_to_the_reference(estimate: Callable[[Tensor, Tensor], Tensor], key: str) -> None:
    given = vector("V13.kl")
    found = float(estimate(torch.tensor(given["logp"]), torch.tensor(given["ref"])))
    assert found == pytest.approx(given[key], abs=1e-6)


def test_the_reference_replaces_the_behaviour_policy_in_the_kl_term() -> None:
    reference = torch.tensor([-1.1, -1.2, -1.5, -0.5, -3.3])
    config = settings(kl_coef=0.5, kl_ref="reference")
    losses = losses_of(inputs(OLD, OLD, reference=reference), config)
    assert losses.kl_M[4].item() == pytest.approx(0.040818, abs=1e-6)  # V13: log-ratio -0.3
    with_kl = Objective(config).total(losses, torch.zeros(5), torch.full((5,), 0.2))
    assert float(with_kl) == pytest.approx(-0.706645 + 0.5 * float(losses.kl_M.mean()), abs=1e-5)


def test_the_entropy_bonus_lowers_the_loss_by_the_mean_entropy() -> None:
    config = settings(entropy_coef=0.1)
    losses = losses_of(inputs(OLD, OLD), config)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    loss = Objective(config).total(losses, entropy, torch.full((5,), 0.2))
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


@pytest.mark.parametrize("name", ["V5.decoupled_TIS_C2", "V5.decoupled_TIS_C3"])
def test_v5_importance_weights_without_a_cap(name: str) -> None:
    weights, kept = importance_weight(OLD, BEHAVE, ROWS, settings(importance_cap=None))
    assert kept is None
    assert weights.tolist() == pytest.approx(tokens(vector(name)["w_raw"]), abs=1e-5)


def test_direct_ignores_a_cap_below_one() -> None:
    config = settings(ratio_mode="direct", importance_cap=0.5)
    assert total(BEHAVE, BEHAVE, config) == pytest.approx(-0.745373, abs=1e-5)
