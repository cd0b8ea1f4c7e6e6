"""Balanced clipping, the other BAPO: its search and its metrics against V6."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError

from contrib.balanced_clip.loss import SearchSettings, balance, search
from learner.losses.base import load_loss
from learner.losses.objective import Objective
from tests.support.losses import NEW, OLD, doubles, inputs, run, settings
from tests.support.vectors import vector

# V6: ratios, advantages and sampling probabilities of eight tokens.
V6_RATIO = doubles(vector("V6.code_target1.0")["ratio"])
V6_ADVANTAGE = doubles(vector("V6.code_target1.0")["A"])
V6_ROLLOUT = doubles(vector("V6.paper_rho0_0.4")["pi_rollout"])
CODE = {"metric": "code", "low": (0.6, 0.8, 0.05), "high": (1.2, 2.0, 0.05)}


def searched(**fields: object) -> SearchSettings:
    return SearchSettings.model_validate(fields)


@pytest.mark.parametrize(
    ("name", "target", "fields"),
    [
        ("V6.code_target0.6", 0.6, CODE),
        ("V6.code_target1.0", 1.0, CODE),
        ("V6.paper_rho0_0.32", 0.32, {}),
        ("V6.paper_rho0_0.4", 0.4, {}),
    ],
)
def test_v6_the_search_widens_the_bounds_until_positive_tokens_contribute_enough(
    name: str, target: float, fields: dict[str, object]
) -> None:
    want = vector(name)
    if not fields:
        assert want["pi_rollout"] == V6_ROLLOUT.tolist()
    # A target that the start has reached leaves the bounds where they begin.
    reached = want["start"][2] - 1e-3
    for aim, place, evaluations in ((reached, want["start"], 1), (target, want["final"], want["n_evals"])):
        config = searched(target=aim, **fields)
        found = search(V6_RATIO, V6_ADVANTAGE, V6_ROLLOUT, config)
        assert (found.low, found.high, found.metric) == pytest.approx(place, abs=1e-6)
        assert found.num_evaluations == evaluations


@pytest.mark.parametrize(
    ("metric", "lows", "high", "key"),
    [
        ("code", [0.6, 0.7, 0.8, 0.95], 1.2, "code_posneg_at_clow"),
        ("paper", [0.6, 0.7, 0.8, 0.95], 1.2, "paper_rho_at_clow"),
        ("gradient", [0.4, 0.6, 0.8, 0.95], 1.3, "gradient_only_rho_at_clow"),
    ],
)
def test_v6_raising_the_lower_bound_works_against_both_published_metrics_and_for_the_gradient(
    metric: str, lows: list[float], high: float, key: str
) -> None:
    found = [balance(metric, V6_RATIO, V6_ADVANTAGE, V6_ROLLOUT, low, high) for low in lows]
    assert found == pytest.approx(vector("V6.metric_direction")[key], abs=1e-6)


def test_v6_raising_the_upper_bound_always_works_for_the_released_metric() -> None:
    highs = [1.2, 1.5, 2.0, 3.0]
    found = [balance("code", V6_RATIO, V6_ADVANTAGE, V6_ROLLOUT, 0.6, high) for high in highs]
    assert found == pytest.approx(vector("V6.metric_direction", "code_posneg_at_chigh"), abs=1e-6)


HALF = (doubles([1.0, 1.0]), doubles([1.0, -1.0]), doubles([0.4, 0.6]))
"""Ratios, advantages and sampling probabilities of a correct and an incorrect token that no bound touches: the
contribution of the first is .4 / (.4 + .6) for `paper`, 1 / 2 for `gradient` and 1 / 1 for `code`, at all bounds."""


@pytest.mark.parametrize(("metric", "target"), [("paper", 0.4), ("gradient", 0.5)])
def test_a_target_that_is_met_exactly_is_met(metric: str, target: float) -> None:
    found = search(*HALF, searched(metric=metric, target=target))
    assert (found.low, found.high, found.num_evaluations) == (0.6, 1.2, 1)


def test_the_paper_searches_only_as_long_as_the_lower_bound_can_be_raised() -> None:
    fixed = {"low": (0.7, 0.7, 0.02), "high": (1.2, 1.3, 0.05), "target": 0.9}
    paper = search(*HALF, searched(metric="paper", **fixed))
    assert (paper.low, paper.high, paper.num_evaluations) == (0.7, 1.2, 1)
    gradient = search(*HALF, searched(metric="gradient", **fixed))
    assert (gradient.low, gradient.high, gradient.num_evaluations) == (0.7, 1.3, 3)


def test_the_released_search_tries_the_end_of_a_range_that_its_steps_pass() -> None:
    ranges = {"low": (0.6, 0.9, 0.2), "high": (1.2, 1.5, 0.2), "target": 2.0}
    # .6, .8, .9 at 1.2, then 1.4 and 1.5 at .9.
    code = search(*HALF, searched(metric="code", **ranges))
    assert (code.low, code.high, code.num_evaluations) == (0.9, 1.5, 5)
    # 1.2, 1.4 at .6, then .8 at 1.4: the paper's steps stay within the range.
    paper = search(*HALF, searched(metric="paper", **ranges))
    assert (paper.low, paper.high, paper.num_evaluations) == (0.8, 1.4, 3)


def test_balanced_clip_is_ppo_within_the_bounds_that_were_found() -> None:
    config = settings("balanced_clip", dual_clip=3.0, options={"low": [0.7, 0.7, 0.1], "high": [1.5, 1.5, 0.1]})
    fitted = load_loss(config).fitted(NEW, OLD, inputs(OLD, OLD))
    losses = Objective(config, fitted).token_losses(NEW, inputs(OLD, OLD))
    ppo = run(settings(clip_low=0.3, clip_high=0.5, dual_clip=3.0))
    torch.testing.assert_close(losses.surrogate_M, ppo.surrogate_M)
    assert {name: fitted.facts[name] for name in ("clip_low", "clip_high")} == {"clip_low": 0.7, "clip_high": 1.5}


def test_a_minibatch_without_wrong_responses_is_balanced() -> None:
    ones = torch.ones(2)
    assert [balance(metric, ones, ones, ones, 0.6, 1.2) for metric in ("paper", "gradient", "code")] == [1, 1, math.inf]
    assert balance("paper", ones, torch.zeros(2), ones, 0.6, 1.2) == 1.0
    config = settings("balanced_clip", options=CODE)
    given = dataclasses.replace(inputs(OLD, OLD), advantage_M=torch.ones(5))
    assert load_loss(config).fitted(NEW, OLD, given).facts == {"clip_low": 0.6, "clip_high": 1.2}, "no infinite record"


@pytest.mark.parametrize(
    ("fields", "advice"),
    [({"low": (0.9, 0.6, 0.1)}, r"must be \[from, to, step\]"), ({"high": (1.2, 3.0, 0.0)}, "step > 0")],
)
def test_bounds_that_cannot_move_are_refused(fields: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        searched(**fields)
