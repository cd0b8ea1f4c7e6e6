"""Every method's loss against the reference vectors (V3 to V5, V17, V19, V22), token by token by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from bapo.core.errors import ConfigError
from contrib.luffy.loss import shaped_probability
from learner.advantages.formulas import group_advantages
from learner.batch.microbatch import rows_of
from learner.losses.base import TokenInputs
from learner.losses.objective import Objective, importance_weight, token_weights
from learner.losses.ratios import geometric_ratio, sequence_ratio
from tests.support.learner import CPU
from tests.support.losses import (
    ADVANTAGE,
    BEHAVE,
    LENGTHS,
    NEW,
    OLD,
    ROWS,
    doubles,
    gradient,
    inputs,
    mean,
    run,
    settings,
)
from tests.support.vectors import tokens, vector


@pytest.mark.parametrize(
    ("low", "high", "loss", "total"),
    [(3e-4, 4e-4, "loss_3e4_4e4", "mean_3e4_4e4"), (0.2, 0.28, "loss_20_28", "mean_20_28")],
)
def test_v3_gspo_has_one_ratio_per_response(low: float, high: float, loss: str, total: str) -> None:
    want = vector("V3.gspo")
    losses = run(settings("gspo", clip_low=low, clip_high=high))
    assert losses.surrogate_M.tolist() == pytest.approx(np.repeat(want[loss], LENGTHS), abs=1e-6)
    assert losses.ratio_M.tolist() == pytest.approx(np.repeat(want["s"], LENGTHS), abs=1e-6)
    assert losses.ratio_M.log().tolist() == pytest.approx(np.repeat(want["log_s"], LENGTHS), abs=1e-6)
    assert mean(losses, "seq_mean_token_mean") == pytest.approx(want[total], abs=1e-6)


def test_gspo_spreads_its_gradient_over_the_tokens_of_a_response() -> None:
    # 0.2 in log s is below the bound 1.28, so each of 3 tokens has -s A summed over 3 tokens of loss, over 3.
    assert gradient(settings("gspo"))[:3] == pytest.approx([-1.221403 * 1.5] * 3, abs=1e-6)
    assert gradient(settings("gspo"))[3:] == [0.0, 0.0], "0.522 is below 0.8 and A < 0: clipped"


def test_v4_cispo_keeps_the_gradient_of_every_token() -> None:
    config = settings("cispo", clip_low=None, clip_high=0.2)
    losses, want = run(config), vector("V4.cispo")
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(want["loss_tok"]), abs=1e-6)
    weights = losses.surrogate_M / (-ADVANTAGE * NEW)  # the loss is -weight A log pi
    assert weights.tolist() == pytest.approx(tokens(want["clipped_w"]), abs=1e-6)
    assert mean(losses) == pytest.approx(want["token_mean"], abs=1e-6)
    assert gradient(config) == pytest.approx(tokens(want["gradcoef_on_logp"]), abs=1e-6)
    assert losses.clipped_M.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("denominator", "key"),
    [("all", "loss_over_all_tokens_AReaL"), ("kept", "loss_over_kept_tokens_verl_rs")],  # over 5 tokens, or the 4 kept
)
def test_v5_a_masked_token_is_out_of_the_loss_and_for_verl_out_of_the_denominator(denominator: str, key: str) -> None:
    want = vector("V5.decoupled_mask_cap2")
    config = settings(importance_mode="mask", importance_cap=2.0, importance_denominator=denominator)
    losses = run(config, rollout=BEHAVE)
    assert losses.surrogate_M.tolist() == pytest.approx([-2.237737, -1.111227, 0.0, 0.824361, 0.327492], abs=1e-6)
    weight, kept = importance_weight(OLD, BEHAVE, ROWS, config)
    assert kept is not None
    assert kept.tolist() == [bool(one) for one in tokens(want["kept"])]
    assert (weight * kept).tolist() == pytest.approx(tokens(want["w"]), abs=1e-6)
    lengths = LENGTHS if denominator == "all" else np.array([2, 2])
    weight_R = token_weights(lengths, "token_mean", 4)
    found = float((losses.surrogate_M * torch.from_numpy(np.repeat(weight_R, LENGTHS))).sum())
    assert found == pytest.approx(want[key], abs=1e-6)


def test_v5_sequence_and_geometric_weights() -> None:
    want = vector("V5.seq_and_geo_weights")
    assert sequence_ratio(OLD, BEHAVE, ROWS).tolist() == pytest.approx(want["seq"], abs=1e-6)
    assert geometric_ratio(OLD, BEHAVE, ROWS).tolist() == pytest.approx(want["geo"], abs=1e-6)


@pytest.mark.parametrize(("level", "cap", "key"), [("sequence", 2.0, "seq_trunc2"), ("geometric", 3.0, "geo")])
def test_v5_weights_truncated_at_each_level(level: str, cap: float, key: str) -> None:
    weight, kept = importance_weight(OLD, BEHAVE, ROWS, settings(importance_level=level, importance_cap=cap))
    assert weight.tolist() == pytest.approx(np.repeat(vector("V5.seq_and_geo_weights")[key], LENGTHS), abs=1e-6)
    assert kept is None


def test_a_mask_over_whole_responses_leaves_out_the_whole_response() -> None:
    config = settings(importance_level="sequence", importance_mode="mask", importance_cap=2.0, importance_floor=0.5)
    _, kept = importance_weight(OLD, BEHAVE, ROWS, config)
    assert kept is not None
    assert kept.tolist() == [False] * 3 + [True] * 2, "6.05 is above 2, 0.82 within"


def test_one_token_below_the_veto_drops_its_response_at_any_level() -> None:
    for level in ("token", "sequence", "geometric"):
        _, kept = importance_weight(OLD, BEHAVE, ROWS, settings(importance_level=level, importance_veto=0.9))
        assert kept is not None
        assert kept.tolist() == [True] * 3 + [False] * 2, level  # 0.82 at the last token


def test_v5_the_additive_centre_of_remix() -> None:
    config = settings("geppo_add", importance_level="none", clip_low=0.2, clip_high=0.2)
    losses, want = run(config, rollout=BEHAVE), vector("V5.geppo_additive_center_eps0.2")
    assert (OLD - BEHAVE).exp().tolist() == pytest.approx(tokens(want["center"]), abs=1e-6)
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(want["loss_tok"]), abs=1e-6)
    assert mean(losses) == pytest.approx(want["token_mean"], abs=1e-6)


def test_v5_the_decoupled_loss_without_a_cap() -> None:
    config = settings(importance_cap=None, dual_clip=None, clip_low=0.2, clip_high=0.2)
    losses, want = run(config, rollout=BEHAVE), vector("V5.decoupled_uncapped_eps0.2")
    assert losses.surrogate_M.tolist() == pytest.approx(tokens(want["loss_tok"]), abs=1e-6)
    assert mean(losses) == pytest.approx(want["token_mean"], abs=1e-6)


def test_a_fresh_token_has_the_same_loss_around_both_centres() -> None:
    losses = run(settings("geppo_add", importance_level="none"))
    torch.testing.assert_close(losses.surrogate_M, run(settings(dual_clip=None)).surrogate_M)


def test_v17_luffy_shapes_the_probability_of_an_experts_token() -> None:
    given = vector("V17.luffy")
    p = doubles(given["p"]).requires_grad_()
    shaped = shaped_probability(p, 0.1)
    assert shaped.tolist() == pytest.approx(given["f"], abs=1e-6)
    shaped.sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == pytest.approx(given["dfdp"], abs=1e-6)


def test_v17_luffy_gives_unlikely_tokens_of_an_expert_their_gradient() -> None:
    config = settings("luffy", importance_level="none", clip_low=None, clip_high=None)
    logprobs = doubles(vector("V17.luffy")["p"]).log().requires_grad_()
    given = TokenInputs(
        rows=rows_of(np.array([4]), CPU),
        anchor_M=torch.full((4,), math.nan, dtype=torch.float64),
        rollout_M=torch.zeros(4, dtype=torch.float64),
        reference_M=None,
        advantage_M=torch.full((4,), 0.625, dtype=torch.float64),
        weight_M=torch.ones(4),
        expert_M=torch.ones(4, dtype=torch.bool),
    )
    losses = Objective(config).token_losses(logprobs, given)
    losses.surrogate_M.sum().backward()
    assert logprobs.grad is not None
    want = [-0.625 * weight for weight in vector("V17.luffy")["grad_weight_on_logp"]]
    assert logprobs.grad.tolist() == pytest.approx(want, abs=1e-6)
    assert losses.ratio_M.tolist() == [1.0] * 4


def test_v19_kimi_weighs_the_gradient_of_a_response_by_its_advantage_less_tau_times_its_log_ratio() -> None:
    config = settings("kimi", importance_level="none", options={"tau": 0.1}, aggregation="seq_mean_token_sum")
    # Four responses of two tokens; each log-ratio is split unevenly over its tokens.
    moved = torch.tensor([0.3, -0.2, -0.1, -0.1, 0.0, 0.05, 0.4, -0.4], dtype=torch.float64)
    want = vector("V19.kimi")
    assert moved.reshape(4, 2).sum(dim=1).tolist() == pytest.approx(want["dlogp_seq"])
    advantages = group_advantages(want["r"], "center", 0.0).tolist()
    assert advantages == want["centered"]
    anchor = torch.full((8,), -1.0, dtype=torch.float64)
    logprobs = (anchor + moved).requires_grad_()
    given = TokenInputs(
        rows=rows_of(np.array([2, 2, 2, 2]), CPU),
        anchor_M=anchor,
        rollout_M=anchor,
        reference_M=None,
        advantage_M=doubles(advantages).repeat_interleave(2),
        weight_M=torch.ones(8),
        expert_M=torch.zeros(8, dtype=torch.bool),
    )
    Objective(config).token_losses(logprobs, given).surrogate_M.sum().backward()
    assert logprobs.grad is not None
    assert (-logprobs.grad).tolist() == pytest.approx(np.repeat(want["coef_on_grad_logp"], 2), abs=1e-6)


def test_v22_dppo_drops_tokens_whose_probability_has_moved_far_and_holds_all_near_the_sampler() -> None:
    config = settings("dppo", ratio_mode="direct", clip_low=0.2, clip_high=0.2, kl_coef=2e-3, kl_estimator="k2")
    want = vector("V22.dppo")
    logprobs, infer = doubles(want["logp"]), doubles(want["infer"])
    assert (logprobs.exp() - infer.exp()).tolist() == pytest.approx(want["prob_diff"], abs=1e-6)
    given = TokenInputs(
        rows=rows_of(np.array([3]), CPU),
        anchor_M=infer,
        rollout_M=infer,
        reference_M=None,
        advantage_M=doubles(want["A"]),
        weight_M=torch.ones(3, dtype=torch.float64),
        expert_M=torch.zeros(3, dtype=torch.bool),
    )
    losses = Objective(config).token_losses(logprobs, given)
    assert losses.clipped_M.bool().tolist() == want["dropped"]
    assert (losses.surrogate_M + 2e-3 * losses.kl_M).tolist() == pytest.approx(want["loss_tok"], abs=1e-6)
    total = float(Objective(config).total(losses, torch.zeros(3), given.weight_M))
    assert total == pytest.approx(want["sum"], abs=1e-6)


def test_a_geometric_ratio_counts_each_token_for_what_it_is_and_bounds_the_mean() -> None:
    rows, zeros = rows_of(np.array([2, 2]), CPU), torch.zeros(4, dtype=torch.float64)
    # (-30 + 10) / 2 = -10; (60 + 0) / 2 = 30 is cut to 20.
    found = geometric_ratio(doubles([-30.0, 10.0, 60.0, 0.0]), zeros, rows)
    assert found.tolist() == pytest.approx([4.539993e-05, 4.851652e08], rel=1e-6)


def test_the_squared_term_of_dppo_grows_beyond_20_nats_and_keeps_its_gradient() -> None:
    config = settings("dppo", ratio_mode="direct", clip_low=0.2, clip_high=0.2, kl_coef=2e-3, kl_estimator="k2")
    logprobs = doubles([-26.0]).requires_grad_()
    infer = doubles([-1.0])
    given = TokenInputs(
        rows=rows_of(np.array([1]), CPU),
        anchor_M=infer,
        rollout_M=infer,
        reference_M=None,
        advantage_M=doubles([0.0]),
        weight_M=doubles([1.0]),
        expert_M=torch.zeros(1, dtype=torch.bool),
    )
    total = Objective(config).total(Objective(config).token_losses(logprobs, given), torch.zeros(1), given.weight_M)
    total.backward()
    assert logprobs.grad is not None
    assert total.item() == pytest.approx(0.625)  # 1e-3 * 25^2
    assert logprobs.grad.tolist() == pytest.approx([-0.05])  # 2e-3 * -25


def test_a_loss_that_returns_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(settings())
    monkeypatch.setattr(objective.loss, "surrogate", lambda logprobs_M, anchor_M, inputs: logprobs_M)
    with pytest.raises(ConfigError, match=r"loss.name = \w+: surrogate returned a Tensor; it must return"):
        objective.token_losses(NEW, inputs(OLD, OLD))


def test_an_experts_token_has_no_kl_to_a_policy_that_did_not_sample_it() -> None:
    config = settings(kl_coef=1.0)
    given = dataclasses.replace(inputs(OLD, OLD), expert_M=torch.tensor([False, False, False, True, True]))
    kl = Objective(config).token_losses(NEW, given).kl_M.tolist()
    assert kl[3:] == [0.0, 0.0]
    assert min(kl[:3]) > 0


def test_without_bounds_ppo_is_the_importance_weighted_policy_gradient() -> None:
    config = settings(clip_low=None, clip_high=None, dual_clip=None)
    want = [-1.221403 * 1.5, -0.670320 * 1.5, -2.225541 * 1.5, 1.648721 * 0.5, 0.165299 * 0.5]
    assert run(config).surrogate_M.tolist() == pytest.approx(want, abs=1e-5)
    assert gradient(config) == pytest.approx(want, abs=1e-5), "the gradient of rho is rho"


def test_the_convex_kl_shares_its_anchor_between_the_base_model_and_the_policy_of_this_step() -> None:
    config = settings(kl_coef=1.0, kl_ref="convex")
    given = inputs(OLD, OLD, reference=-1.3, share=0.7)
    first = float(Objective(config).token_losses(NEW, given).kl_M[0])
    # log-ratios -0.8 - (-1.3) = 0.5 and -0.8 - (-1.0) = 0.2; k3 = e^-d - 1 + d
    assert first == pytest.approx(0.7 * (math.exp(-0.5) - 0.5) + 0.3 * (math.exp(-0.2) - 0.8), abs=1e-9)
