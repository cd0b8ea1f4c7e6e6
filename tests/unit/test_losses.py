"""Every method's loss against the vectors of the specification (V3 to V6, V17, V19, V22), token by token by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bapo.config.objective import Aggregation, LossConfig, LossName
from learner.batching import rows_of
from learner.loss import TokenLosses, objective, token_losses
from learner.losses.aggregation import token_weights
from learner.losses.balanced_clip import balance, search
from learner.losses.base import TokenInputs
from learner.losses.corrections import importance_weight
from learner.losses.luffy import shaped_probability
from learner.losses.ratios import geometric_ratio, sequence_ratio
from learner.losses.registry import load_loss, loss_names
from tests.learner_setup import CPU

# Two responses of 3 and 2 tokens, one after the other.
LENGTHS = np.array([3, 2])
ROWS = rows_of(LENGTHS, CPU)
OLD = torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.2], dtype=torch.float64)
NEW = torch.tensor([-0.8, -0.9, -1.2, -0.2, -3.0], dtype=torch.float64)
BEHAVE = torch.tensor([-1.2, -0.6, -3.5, -0.7, -1.0], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5], dtype=torch.float64)


def settings(name: str = "ppo", **fields: object) -> LossConfig:
    return LossConfig.model_validate({"name": name, "kl_coef": 0.0, "entropy_coef": 0.0, **fields})


def run(
    config: LossConfig, *, anchor: Tensor = OLD, rollout: Tensor = OLD, logprobs: Tensor = NEW, reference: float = 0.0
) -> TokenLosses:
    return token_losses(logprobs, inputs(anchor, rollout, reference), load_loss(config), config)


def inputs(anchor: Tensor, rollout: Tensor, reference: float = 0.0, share: float = 1.0) -> TokenInputs:
    return TokenInputs(
        rows=ROWS,
        anchor_M=anchor,
        rollout_M=rollout,
        reference_M=torch.full_like(NEW, reference),
        advantage_M=ADVANTAGE,
        weight_M=torch.full_like(NEW, 0.2),
        expert_M=torch.zeros(5, dtype=torch.bool),
        reference_share=share,
    )


def mean(losses: TokenLosses, aggregation: str = "token_mean") -> float:
    weight_R = token_weights(LENGTHS, aggregation, 4)  # type: ignore[arg-type]
    return float((losses.surrogate_M * torch.from_numpy(np.repeat(weight_R, LENGTHS))).sum())


def gradient(config: LossConfig, anchor: Tensor = OLD, rollout: Tensor = OLD) -> list[float]:
    """d(sum of token losses) / d log pi of each token."""
    logprobs = NEW.clone().requires_grad_()
    run(config, anchor=anchor, rollout=rollout, logprobs=logprobs).surrogate_M.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


def test_the_names_in_the_configuration_are_the_files_of_the_folder() -> None:
    assert loss_names() == tuple(sorted(get_args(LossName)))


@pytest.mark.parametrize(
    ("low", "high", "want", "total"),
    [(3e-4, 4e-4, [-1.500600, 0.499850], -0.500375), (0.2, 0.28, [-1.832104, 0.4], -0.716052)],
)
def test_v3_gspo_has_one_ratio_per_response(low: float, high: float, want: list[float], total: float) -> None:
    losses = run(settings("gspo", clip_low=low, clip_high=high))
    assert losses.surrogate_M.tolist() == pytest.approx([want[0]] * 3 + [want[1]] * 2, abs=1e-6)
    assert losses.ratio_M.tolist() == pytest.approx([1.221403] * 3 + [0.522046] * 2, abs=1e-6)
    assert mean(losses, "seq_mean_token_mean") == pytest.approx(total, abs=1e-6)


def test_gspo_spreads_its_gradient_over_the_tokens_of_a_response() -> None:
    # 0.2 in log s is below the bound 1.28, so each of 3 tokens has -s A summed over 3 tokens of loss, over 3.
    assert gradient(settings("gspo"))[:3] == pytest.approx([-1.221403 * 1.5] * 3, abs=1e-6)
    assert gradient(settings("gspo"))[3:] == [0.0, 0.0], "0.522 is below 0.8 and A < 0: clipped"


def test_v4_cispo_keeps_the_gradient_of_every_token() -> None:
    config = settings("cispo", clip_low=None, clip_high=0.2)
    losses = run(config)
    # -weight A log pi with the weights 1.2, .670320, 1.2, 1.2, .165299.
    assert losses.surrogate_M.tolist() == pytest.approx([1.44, 0.904932, 2.16, -0.12, -0.247948], abs=1e-6)
    assert mean(losses) == pytest.approx(0.827397, abs=1e-6)
    assert gradient(config) == pytest.approx([-1.8, -1.005480, -1.8, 0.6, 0.082649], abs=1e-6)
    assert losses.clipped_M.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("denominator", "want"),
    [("all", -0.439422), ("kept", -0.549278)],  # AReaL: over 5 tokens; verl: over the 4 kept ones
)
def test_v5_a_masked_token_is_out_of_the_loss_and_for_verl_out_of_the_denominator(
    denominator: str, want: float
) -> None:
    config = settings(importance_mode="mask", importance_cap=2.0, importance_denominator=denominator)
    losses = run(config, rollout=BEHAVE)
    assert losses.surrogate_M.tolist() == pytest.approx([-2.237737, -1.111227, 0.0, 0.824361, 0.327492], abs=1e-6)
    _, kept = importance_weight(OLD, BEHAVE, ROWS, config)
    assert kept is not None
    lengths = LENGTHS if denominator == "all" else np.array([2, 2])
    weight_R = token_weights(lengths, "token_mean", 4)
    assert float((losses.surrogate_M * torch.from_numpy(np.repeat(weight_R, LENGTHS))).sum()) == pytest.approx(
        want, abs=1e-6
    )


def test_v5_sequence_and_geometric_weights() -> None:
    assert sequence_ratio(OLD, BEHAVE, ROWS).tolist() == pytest.approx([6.049647, 0.818731], abs=1e-6)
    assert geometric_ratio(OLD, BEHAVE, ROWS).tolist() == pytest.approx([1.822119, 0.904837], abs=1e-6)


@pytest.mark.parametrize(
    ("level", "cap", "want"),
    [
        ("sequence", 2.0, [2.0] * 3 + [0.818731] * 2),
        ("geometric", 3.0, [1.822119] * 3 + [0.904837] * 2),
        ("token", 2.0, [1.221403, 1.105171, 2.0, 1.0, 0.818731]),
    ],
)
def test_v5_weights_truncated_at_each_level(level: str, cap: float, want: list[float]) -> None:
    weight, kept = importance_weight(OLD, BEHAVE, ROWS, settings(importance_level=level, importance_cap=cap))
    assert weight.tolist() == pytest.approx(want, abs=1e-6)
    assert kept is None


def test_a_mask_over_whole_responses_leaves_out_the_whole_response() -> None:
    config = settings(importance_level="sequence", importance_mode="mask", importance_cap=2.0, importance_floor=0.5)
    _, kept = importance_weight(OLD, BEHAVE, ROWS, config)
    assert kept is not None
    assert kept.tolist() == [False] * 3 + [True] * 2, "6.05 is above 2, 0.82 within"


def test_a_floor_leaves_out_what_is_too_small() -> None:
    config = settings(importance_mode="mask", importance_cap=5.0, importance_floor=1.0)
    _, kept = importance_weight(OLD, BEHAVE, ROWS, config)
    assert kept is not None
    assert kept.tolist() == [True, True, True, True, False]  # 0.82 at the last token


def test_one_token_below_the_veto_drops_its_response_at_any_level() -> None:
    for level in ("token", "sequence", "geometric"):
        _, kept = importance_weight(OLD, BEHAVE, ROWS, settings(importance_level=level, importance_veto=0.9))
        assert kept is not None
        assert kept.tolist() == [True] * 3 + [False] * 2, level  # 0.82 at the last token


def test_v5_the_additive_centre_of_remix() -> None:
    config = settings("geppo_add", importance_level="none", clip_low=0.2, clip_high=0.2)
    losses = run(config, rollout=BEHAVE)
    want = [-2.132104, -1.111227, -7.022534, 0.824361, 0.309365]
    assert losses.surrogate_M.tolist() == pytest.approx(want, abs=1e-6)
    assert mean(losses) == pytest.approx(-1.826428, abs=1e-6)


def test_v5_the_multiplicative_centre_of_dots_is_the_decoupled_loss_without_a_cap() -> None:
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    losses = run(settings("geppo_mul", importance_level="none", **bounds), rollout=BEHAVE)
    want = [-2.198525, -1.111227, -8.067040, 0.824361, 0.327492]
    assert losses.surrogate_M.tolist() == pytest.approx(want, abs=1e-6)
    assert mean(losses) == pytest.approx(-2.044988, abs=1e-6)
    decoupled = run(settings(importance_cap=None, dual_clip=None, **bounds), rollout=BEHAVE)
    torch.testing.assert_close(losses.surrogate_M, decoupled.surrogate_M, rtol=1e-9, atol=0)


def test_a_fresh_token_has_the_same_loss_around_every_centre() -> None:
    for name in ("geppo_add", "geppo_mul"):
        losses = run(settings(name, importance_level="none"))
        torch.testing.assert_close(losses.surrogate_M, run(settings(dual_clip=None)).surrogate_M)


# V6: ratios, advantages and sampling probabilities of eight tokens.
V6_RATIO = torch.tensor([0.5, 0.7, 0.9, 1.0, 1.3, 1.6, 2.2, 3.5], dtype=torch.float64)
V6_ADVANTAGE = torch.tensor([-1, -1, -1, -1, 1, 1, 1, -1], dtype=torch.float64)
V6_ROLLOUT = torch.tensor([0.1, 0.3, 0.6, 0.9, 0.4, 0.2, 0.05, 0.02], dtype=torch.float64)
CODE = {"balanced_metric": "code", "balanced_low": [0.6, 0.8, 0.05], "balanced_high": [1.2, 2.0, 0.05]}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({**CODE, "balanced_target": 0.5}, (0.6, 1.2, 0.537313, 1)),
        ({**CODE, "balanced_target": 0.6}, (0.8, 1.5, 0.614286, 11)),
        ({**CODE, "balanced_target": 1.0}, (0.8, 2.0, 0.700000, 21)),
        ({"balanced_target": 0.30}, (0.6, 1.2, 0.304688, 1)),
        ({"balanced_target": 0.32}, (0.6, 1.3, 0.321905, 3)),
        ({"balanced_target": 0.40}, (0.9, 3.0, 0.336879, 52)),
    ],
)
def test_v6_the_search_widens_the_bounds_until_positive_tokens_contribute_enough(
    fields: dict[str, object], want: tuple[float, float, float, int]
) -> None:
    found = search(V6_RATIO, V6_ADVANTAGE, V6_ROLLOUT, settings("balanced_clip", **fields))
    assert (found.low, found.high, found.metric) == pytest.approx(want[:3], abs=1e-6)
    assert found.num_evaluations == want[3]


@pytest.mark.parametrize(
    ("metric", "lows", "high", "want"),
    [
        ("code", [0.6, 0.7, 0.8, 0.95], 1.2, [0.537313, 0.529412, 0.514286, 0.489796]),
        ("paper", [0.6, 0.7, 0.8, 0.95], 1.2, [0.304688, 0.303502, 0.298851, 0.288889]),
        ("gradient", [0.4, 0.6, 0.8, 0.95], 1.3, [0.164557, 0.175676, 0.194030, 0.224138]),
    ],
)
def test_v6_raising_the_lower_bound_works_against_both_published_metrics_and_for_the_gradient(
    metric: str, lows: list[float], high: float, want: list[float]
) -> None:
    found = [balance(metric, V6_RATIO, V6_ADVANTAGE, V6_ROLLOUT, low, high) for low in lows]
    assert found == pytest.approx(want, abs=1e-6)


def test_balanced_clip_is_ppo_within_the_bounds_that_were_found() -> None:
    config = settings("balanced_clip", dual_clip=3.0, balanced_low=[0.7, 0.7, 0.1], balanced_high=[1.5, 1.5, 0.1])
    fitted = load_loss(config).fitted(NEW, OLD, inputs(OLD, OLD))
    losses = token_losses(NEW, inputs(OLD, OLD), fitted, config)
    ppo = run(settings(clip_low=0.3, clip_high=0.5, dual_clip=3.0))
    torch.testing.assert_close(losses.surrogate_M, ppo.surrogate_M)
    assert {name: fitted.facts[name] for name in ("clip_low", "clip_high")} == {"clip_low": 0.7, "clip_high": 1.5}


def test_a_minibatch_without_wrong_responses_is_balanced() -> None:
    ones = torch.ones(2)
    assert [balance(metric, ones, ones, ones, 0.6, 1.2) for metric in ("paper", "gradient", "code")] == [1, 1, math.inf]
    assert balance("paper", ones, torch.zeros(2), ones, 0.6, 1.2) == 1.0
    config = settings("balanced_clip", **CODE)
    given = dataclasses.replace(inputs(OLD, OLD), advantage_M=torch.ones(5))
    assert load_loss(config).fitted(NEW, OLD, given).facts == {"clip_low": 0.6, "clip_high": 1.2}, "no infinite record"


def test_v17_luffy_shapes_the_probability_of_an_experts_token() -> None:
    p = torch.tensor([0.02, 0.1, 0.5, 0.9], dtype=torch.float64)
    assert shaped_probability(p, 0.1).tolist() == pytest.approx([0.166667, 0.5, 0.833333, 0.9], abs=1e-6)


def test_v17_luffy_gives_unlikely_tokens_of_an_expert_their_gradient() -> None:
    config = settings("luffy", importance_level="none", clip_low=None, clip_high=None)
    logprobs = torch.tensor([0.02, 0.1, 0.5, 0.9], dtype=torch.float64).log().requires_grad_()
    given = TokenInputs(
        rows=rows_of(np.array([4]), CPU),
        anchor_M=torch.full((4,), math.nan, dtype=torch.float64),
        rollout_M=torch.zeros(4, dtype=torch.float64),
        reference_M=None,
        advantage_M=torch.full((4,), 0.625, dtype=torch.float64),
        weight_M=torch.ones(4),
        expert_M=torch.ones(4, dtype=torch.bool),
    )
    losses = token_losses(logprobs, given, load_loss(config), config)
    losses.surrogate_M.sum().backward()
    assert logprobs.grad is not None
    want = [-0.625 * weight for weight in (0.138889, 0.25, 0.138889, 0.09)]
    assert logprobs.grad.tolist() == pytest.approx(want, abs=1e-6)
    assert losses.ratio_M.tolist() == [1.0] * 4


def test_luffy_does_not_clip_what_the_policy_sampled() -> None:
    losses = run(settings("luffy", importance_level="none", clip_low=None, clip_high=None))
    want = [-1.221403 * 1.5, -0.670320 * 1.5, -2.225541 * 1.5, 1.648721 * 0.5, 0.165299 * 0.5]
    assert losses.surrogate_M.tolist() == pytest.approx(want, abs=1e-5)
    assert losses.clipped_M.tolist() == [0.0] * 5


def test_v19_kimi_weighs_the_gradient_of_a_response_by_its_advantage_less_tau_times_its_log_ratio() -> None:
    config = settings("kimi", importance_level="none", kimi_tau=0.1, aggregation="seq_mean_token_sum")
    # Four responses of two tokens; each log-ratio is split unevenly over its tokens.
    moved = torch.tensor([0.3, -0.2, -0.1, -0.1, 0.0, 0.05, 0.4, -0.4], dtype=torch.float64)
    anchor = torch.full((8,), -1.0, dtype=torch.float64)
    logprobs = (anchor + moved).requires_grad_()
    given = TokenInputs(
        rows=rows_of(np.array([2, 2, 2, 2]), CPU),
        anchor_M=anchor,
        rollout_M=anchor,
        reference_M=None,
        advantage_M=torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64).repeat_interleave(2),
        weight_M=torch.ones(8),
        expert_M=torch.zeros(8, dtype=torch.bool),
    )
    token_losses(logprobs, given, load_loss(config), config).surrogate_M.sum().backward()
    assert logprobs.grad is not None
    # The log-ratios of the responses are .1, -.2, .05 and 0.
    want = [0.49, 0.49, -0.48, -0.48, -0.505, -0.505, 0.5, 0.5]
    assert (-logprobs.grad).tolist() == pytest.approx(want, abs=1e-6)


def test_v22_dppo_drops_tokens_whose_probability_has_moved_far_and_holds_all_near_the_sampler() -> None:
    config = settings("dppo", ratio_mode="direct", clip_low=0.2, clip_high=0.2, kl_coef=2e-3, kl_estimator="k2")
    logprobs = torch.tensor([-0.2, -1.5, -0.9], dtype=torch.float64)
    infer = torch.tensor([-0.6, -0.7, -1.0], dtype=torch.float64)
    given = TokenInputs(
        rows=rows_of(np.array([3]), CPU),
        anchor_M=infer,
        rollout_M=infer,
        reference_M=None,
        advantage_M=torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64),
        weight_M=torch.ones(3, dtype=torch.float64),
        expert_M=torch.zeros(3, dtype=torch.bool),
    )
    losses = token_losses(logprobs, given, load_loss(config), config)
    assert losses.clipped_M.tolist() == [1, 1, 0]
    tokens = losses.surrogate_M + 2e-3 * losses.kl_M
    assert tokens.tolist() == pytest.approx([0.000160, 0.000640, 1.105181], abs=1e-6)
    assert float(objective(losses, torch.zeros(3), given.weight_M, config)) == pytest.approx(1.105981, abs=1e-6)


def test_an_experts_token_has_no_kl_to_a_policy_that_did_not_sample_it() -> None:
    config = settings(kl_coef=1.0)
    given = dataclasses.replace(inputs(OLD, OLD), expert_M=torch.tensor([False, False, False, True, True]))
    kl = token_losses(NEW, given, load_loss(config), config).kl_M.tolist()
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
    first = float(token_losses(NEW, given, load_loss(config), config).kl_M[0])
    # log-ratios -0.8 - (-1.3) = 0.5 and -0.8 - (-1.0) = 0.2; k3 = e^-d - 1 + d
    assert first == pytest.approx(0.7 * (math.exp(-0.5) - 0.5) + 0.3 * (math.exp(-0.2) - 0.8), abs=1e-9)


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        # Group 0 has two fresh rows of 3 and 2 tokens and one replayed of 4; group 1 has one fresh row of 5.
        ("two_term", [1 / (2 * 2 * 3), 1 / (2 * 2 * 2), 1 / (2 * 1 * 4), 1 / (2 * 1 * 5)]),
        ("group_const_len", [1 / (2 * 10)] * 4),
    ],
)
def test_aggregations_by_group(aggregation: str, want: list[float]) -> None:
    weights = token_weights(
        np.array([3, 2, 4, 5]),
        aggregation,  # type: ignore[arg-type]
        10,
        group_R=np.array([0, 0, 0, 1]),
        replayed_R=np.array([False, False, True, False]),
    )
    assert weights.tolist() == pytest.approx(want)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len"])
def test_a_response_that_is_left_out_whole_has_no_weight_and_is_not_counted(aggregation: str) -> None:
    weights = token_weights(np.array([3, 0, 2]), aggregation, 4)  # type: ignore[arg-type]
    without = token_weights(np.array([3, 2]), aggregation, 4)  # type: ignore[arg-type]
    assert weights.tolist() == [without[0], 0.0, without[1]]
    assert token_weights(np.array([0, 0]), aggregation, 4).tolist() == [0.0, 0.0]  # type: ignore[arg-type]


@given(data=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_the_weights_of_a_minibatch_add_up_to_a_mean(data: list[tuple[int, int, bool]]) -> None:
    lengths, groups, replayed = (np.array(column) for column in zip(*data, strict=True))
    kept = lengths > 0
    kinds = {(group, old) for length, group, old in data if length}
    want = {
        "token_mean": 1.0,
        "seq_mean_token_mean": 1.0,
        "seq_mean_token_sum": lengths.sum() / max(1, kept.sum()),
        "const_len": lengths.sum() / (max(1, kept.sum()) * 10),
        "group_const_len": lengths.sum() / (max(1, len(set(groups[kept]))) * 10),
        # One mean over fresh and one over replayed rows for each group that has them.
        "two_term": len(kinds) / max(1, len(set(groups[kept]))),
    }
    for aggregation in get_args(Aggregation):
        weights = token_weights(lengths, aggregation, 10, group_R=groups, replayed_R=replayed)
        assert float(weights @ lengths) == pytest.approx(want[aggregation] if kept.any() else 0.0), aggregation
