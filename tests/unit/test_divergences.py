"""Divergence estimators: the vectors (V12), exact expectations on a chain that can be enumerated, and invariances."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.diagnostics import divergences as module
from learner.diagnostics.divergences import Divergences, pooled, response_gaps
from tests.support.vectors import tokens, vector

# Two responses of 3 and 2 tokens, sampled from alpha.
V12 = vector("V12.tv")
ALPHA, POLICY = np.array(tokens(V12["logp_alpha"])), np.array(tokens(V12["logp_pi"]))
LENGTHS = np.array([3, 2])


def divergences(*columns: np.ndarray) -> Divergences:
    return pooled(response_gaps(*columns))


def test_divergences_are_those_of_the_vectors() -> None:
    found = divergences(POLICY, ALPHA, LENGTHS)
    assert found.tv_tok == pytest.approx(V12["tv_token_mean"], abs=1e-6)
    assert found.tv_seq == pytest.approx(V12["tv_seq_mc_mean"], abs=1e-6)
    assert found.kl_fwd == pytest.approx(sum(V12["kl_alpha_pi_seq"]) / 2, abs=1e-6)
    assert found.kl_rev == pytest.approx(sum(V12["kl_pi_alpha_seq"]) / 2, abs=1e-6)
    assert found.kl_rev_tok == pytest.approx(sum(V12["kl_pi_alpha_seq"]) / 5, abs=1e-6)
    assert found.tv_pinsker == pytest.approx(V12["pinsker"], abs=1e-6)
    assert found.tv_bh == pytest.approx(V12["bretagnolle_huber"], abs=1e-6)
    assert found.tv_union == pytest.approx(V12["union_sum_tv"], abs=1e-6)
    assert found.ess == pytest.approx(V12["ess_frac_seq"], abs=1e-6)
    assert found.max_ratio == pytest.approx(V12["max_ratio"], abs=1e-6)


def test_effective_sample_sizes_by_hand() -> None:
    # Weights 1 and 3: (1 + 3)^2 / (2 (1 + 9)) = 0.8. Tokens 1, 1 and 3, 1: 6^2 / (4 * 12) = 0.75.
    found = divergences(np.log([1.0, 1.0, 3.0, 1.0]), np.zeros(4), np.array([2, 2]))
    assert found.ess == pytest.approx(0.8)
    assert found.ess_tok == pytest.approx(0.75)


def test_long_responses_keep_the_ratio_of_their_weights_however_small_these_are() -> None:
    # D = -30 and -25: weights e^-5 and 1, (1 + .0067379)^2 / (2 (1 + .0000454)) = 1.0135213 / 2.0000908 = .506738.
    found = divergences(np.array([-15.0, -15.0, -12.5, -12.5]), np.zeros(4), np.array([2, 2]))
    assert found.ess == pytest.approx(0.506738, abs=1e-6)
    assert found.tv_seq == pytest.approx(0.5), "|W - 1| / 2 of weights near 0"


def test_a_weight_that_overflows_leaves_every_estimate_finite() -> None:
    # 50 tokens of +20 nats: D = 1000 beside D = 0, so only the first response counts.
    found = divergences(np.array([20.0] * 50 + [0.0]), np.zeros(51), np.array([50, 1]))
    assert found.ess == pytest.approx(0.5)
    assert found.tv_seq == 1.0
    assert math.isfinite(found.kl_fwd)


# A chain of two tokens out of two. alpha starts 0 with .6; behind 0 it stays with .7, behind 1 with .2.
ALPHA_CHAIN = {(): 0.6, (0,): 0.7, (1,): 0.8}
"""Probability of token 0 behind a prefix."""
POLICY_CHAIN = {(): 0.45, (0,): 0.5, (1,): 0.9}


def chain_probability(chain: dict[tuple[int, ...], float], sequence: tuple[int, int]) -> list[float]:
    """Of each token of the sequence."""
    return [chain[sequence[:t]] if token == 0 else 1 - chain[sequence[:t]] for t, token in enumerate(sequence)]


def test_on_an_enumerated_chain_every_estimator_has_its_exact_expectation() -> None:
    """alpha gives each sequence a multiple of 1/100, so 100 responses are its exact expectation."""
    alpha, policy, exact = [], [], []
    for sequence in product((0, 1), repeat=2):
        a, p = chain_probability(ALPHA_CHAIN, sequence), chain_probability(POLICY_CHAIN, sequence)
        copies = round(100 * math.prod(a))
        assert copies == pytest.approx(100 * math.prod(a), abs=1e-9)
        alpha += a * copies
        policy += p * copies
        exact.append((math.prod(a), math.prod(p)))
    gaps = response_gaps(np.log(policy), np.log(alpha), np.full(100, 2))
    found = pooled(gaps)
    tv = sum(abs(a - p) for a, p in exact) / 2
    # 00 .42/.225, 01 .18/.225, 10 .32/.495, 11 .08/.055
    assert tv == pytest.approx((0.195 + 0.045 + 0.175 + 0.025) / 2)
    assert np.exp(gaps.log_weight).mean() == pytest.approx(1.0, abs=1e-12), "E_alpha[W] = 1"
    assert found.tv_seq == pytest.approx(tv, abs=1e-12)
    assert found.kl_fwd == pytest.approx(sum(a * math.log(a / p) for a, p in exact), abs=1e-12)
    assert found.ess == pytest.approx(1 / sum(p * p / a for a, p in exact), abs=1e-12), "1 / E_alpha[W^2]"
    # |.6 - .45| at the start; behind 0, which has .6, |.7 - .5|; behind 1, which has .4, |.8 - .9|.
    assert found.tv_union == pytest.approx(0.15 + 0.6 * 0.2 + 0.4 * 0.1, abs=1e-12)
    assert found.tv_tok == pytest.approx(found.tv_union / 2, abs=1e-12)
    for bound in (found.tv_union, found.tv_pinsker, found.tv_bh):
        assert bound >= tv


@given(
    steps=st.lists(st.floats(0.05, 0.95), min_size=6, max_size=6),
)
def test_the_union_bound_is_never_below_the_exact_distance_of_a_chain(steps: list[float]) -> None:
    alpha = dict(zip(ALPHA_CHAIN, steps[:3], strict=True))
    policy = dict(zip(ALPHA_CHAIN, steps[3:], strict=True))
    union = tv = kl = 0.0
    for sequence in product((0, 1), repeat=2):
        a, p = chain_probability(alpha, sequence), chain_probability(policy, sequence)
        gaps = response_gaps(np.log(p), np.log(a), np.array([2]))
        union += math.prod(a) * float(gaps.tv_sum[0])
        kl += math.prod(a) * float(gaps.kl_fwd[0])
        tv += abs(math.prod(a) - math.prod(p)) / 2
    assert union >= tv - 1e-12
    assert math.sqrt(-math.expm1(-kl)) >= tv - 1e-12


def test_estimators_are_unbiased_on_a_distribution_that_can_be_enumerated() -> None:
    # alpha = (.5, .3, .2) as 10 one-token responses, so that the mean over responses is the expectation under alpha.
    given = vector("V12.exact_cat")
    alpha, policy = (np.log(np.repeat(given[name], [5, 3, 2])) for name in ("alpha", "pi"))
    found = divergences(policy, alpha, np.ones(10, dtype=int))
    assert found.tv_tok == pytest.approx(given["TV"], abs=1e-12)
    assert found.tv_tok == pytest.approx(given["E_half_abs"], abs=1e-12)
    assert found.kl_fwd == pytest.approx(given["KL_alpha_pi"], abs=1e-6)
    assert found.kl_fwd == pytest.approx(given["E_klf"], abs=1e-6)
    assert found.kl_rev_tok == pytest.approx(given["KL_pi_alpha"], abs=1e-6)
    assert found.kl_rev_tok == pytest.approx(given["E_klr"], abs=1e-6)


@pytest.mark.parametrize("lengths", [[3, 1], [5, 0], []])
def test_lengths_that_do_not_cut_the_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError):
        divergences(POLICY, ALPHA, np.array(lengths, dtype=int))


def test_one_impossible_token_cannot_make_the_estimate_infinite() -> None:
    found = divergences(np.array([0.0]), np.array([-1000.0]), np.array([1]))
    assert found.max_ratio == pytest.approx(math.exp(20))
    assert math.isfinite(found.kl_fwd)


def test_nothing_depends_on_the_order_of_responses_or_on_the_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, size=60)
    alpha = rng.uniform(-3, 0, size=int(lengths.sum())).astype(np.float32)
    policy = (alpha + rng.normal(0, 0.3, size=len(alpha))).astype(np.float32)
    order = rng.permutation(60)
    ends = np.cumsum(lengths)
    places = np.concatenate([np.arange(ends[r] - lengths[r], ends[r]) for r in order])
    whole = response_gaps(policy, alpha, lengths)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 64)
    turned = response_gaps(policy[places], alpha[places], lengths[order])
    for name in ("log_weight", "tv_sum", "kl_fwd", "kl_rev", "rho_sum", "rho_square_sum", "rho_max"):
        np.testing.assert_allclose(getattr(turned, name), getattr(whole, name)[order], rtol=1e-12, err_msg=name)
    assert pooled(turned).ess == pytest.approx(pooled(whole).ess, rel=1e-12)


@given(
    logs=st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=12),
    data=st.data(),
)
def test_divergences_have_their_sign_and_their_order(logs: list[tuple[float, float]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(logs)))
    lengths = np.array([cut] if cut == len(logs) else [cut, len(logs) - cut])
    policy, alpha = (np.array(column) for column in zip(*logs, strict=True))
    found = divergences(policy, alpha, lengths)
    assert found.kl_fwd >= 0
    assert found.kl_rev >= 0
    assert 0 <= found.tv_bh <= 1
    assert found.tv_bh <= math.sqrt(2) * found.tv_pinsker + 1e-9  # 1 - e^-x <= x
    assert 1 / len(lengths) - 1e-9 <= found.ess <= 1 + 1e-9


def test_the_same_policy_has_no_divergence() -> None:
    found = divergences(ALPHA, ALPHA, LENGTHS)
    assert (found.tv_tok, found.tv_union, found.tv_bh, found.kl_rev_tok, found.ess) == (0.0, 0.0, 0.0, 0.0, 1.0)
