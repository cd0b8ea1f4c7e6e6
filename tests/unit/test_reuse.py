"""Groups of X3 that are judged by their effective sample size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo.config.tree import Config
from bapo.core.types import Batch, BatchEntry, Group, Origin
from learner.batch.columns import columns_of
from learner.update.reuse import group_ess, response_log_weights, reused_groups, reused_responses, weigh_reused
from learner.update.step import GenerationMemory, Step, StepInputs, step_inputs
from tests.support.factories import make_batch, make_group
from tests.support.learner import CPU, learner_config, make_updater, random_batch, tiny_policy

QUIET = {"kl_coef": 0.0, "entropy_coef": 0.0}


def two_responses(log_weights: tuple[float, float], name: str = "p") -> Group:
    """Two responses of two tokens; pi_theta_t gives 0 to every token, so that log W_j is minus the sum of alpha's."""
    group = make_group(rewards="10", prompt_id=name, lengths=[2, 2])
    logprobs = np.repeat([-w / 2 for w in log_weights], 2).astype(np.float32)
    return replace(group, rollout_logprobs=logprobs)


def batch_of(*groups: tuple[Origin, tuple[float, float]]) -> Batch:
    made = [two_responses(weights, f"p{i}") for i, (_, weights) in enumerate(groups)]
    return make_batch(groups=made, origins=[origin for origin, _ in groups], step=1)


def weighed(config: Config, batch: Batch) -> tuple[StepInputs, dict[str, float]]:
    """As the updater does it, with pi_theta_t(y_t) = 1 everywhere."""
    step = Step.of(step_inputs(batch, config, CPU), GenerationMemory(window=3))
    step.fill_theta_t(reused_responses(step.inputs), torch.zeros_like(step.inputs.rollout_M))
    weigh_reused(step)
    return step.inputs, step.facts


def config_of(**loss: object) -> Config:
    return learner_config(algorithm={"batch_size": 8, "group_size": 2}, loss={**QUIET, **loss})


@pytest.mark.parametrize(
    ("log_weights", "ess"),
    [
        ((0.0, 0.0), 1.0),
        ((5.0, 5.0), 1.0),  # what both have in common says nothing of the group
        ((0.0, math.log(3)), 0.8),  # (1 + 3)^2 / (2 (1 + 9))
        ((0.0, 60.0), 0.5),  # one response alone
    ],
)
def test_the_effective_sample_size_of_a_group(log_weights: tuple[float, float], ess: float) -> None:
    batch, config = batch_of((Origin.X3, log_weights)), config_of()
    columns = columns_of(batch, config)
    theta_t = np.zeros(len(columns.token_ids_M), dtype=np.float32)
    assert group_ess(columns, response_log_weights(columns, theta_t), np.array([0])) == pytest.approx([ess], abs=1e-6)


def test_only_groups_of_x3_are_judged() -> None:
    far = (0.0, math.log(4))
    batch = batch_of((Origin.X1, far), (Origin.X3, far), (Origin.X2, far), (Origin.X3, (0.0, 0.0)))
    step, facts = weighed(config_of(x3_baseline="current"), batch)
    assert reused_groups(step).tolist() == [1, 3]
    # The correct response of a far group has weight 1 of 5: J = 1/5 is lost in X3; X1, X2 do not ask.
    # ess: (1 + 4)^2 / (2 (1 + 16)) = 25/34 and 1
    assert sorted(group for groups in step.plan for group in groups) == [0, 2, 3]
    assert facts == {"x3_group_ess": pytest.approx(59 / 68), "x3_pass_rate": pytest.approx(0.35), "x3_left_out": 1}


def test_a_group_below_the_floor_is_in_no_loss_and_in_no_denominator() -> None:
    far, near = (0.0, 60.0), (0.0, math.log(3))
    batch = batch_of((Origin.X1, far), (Origin.X3, far), (Origin.X3, near), (Origin.X2, far))
    config = config_of(x3_min_ess=0.6)
    step, facts = weighed(config, batch)
    assert facts["x3_left_out"] == 1
    assert sorted(group for groups in step.plan for group in groups) == [0, 2, 3]
    assert len(step.plan) == 1
    weights = Step.of(step, GenerationMemory(window=3)).weights(0)
    assert weights.tolist() == pytest.approx([1 / 12] * 4 + [0] * 4 + [1 / 12] * 8)
    assert step.advantage_M.tolist() == pytest.approx([1, 1, -1, -1] * 4, abs=1e-5), "the floor alone weighs nothing"


def test_a_step_that_is_left_without_groups_changes_nothing(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, loss={**QUIET, "x3_min_ess": 1.0})
    policy = tiny_policy(config)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    batch = random_batch()
    only_x3 = dataclasses.replace(batch, entries=tuple(e for e in batch.entries if e.origin is Origin.X3))
    report = make_updater(config, policy, tmp_path).run(only_x3)
    assert report.minibatches == ()
    assert report.facts["x3_left_out"] == len(only_x3.entries)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_the_update_without_the_dropped_groups_is_the_update_of_a_batch_that_never_had_them(
    model_path: Path, tmp_path: Path
) -> None:
    far = random_batch()  # alpha has nothing to do with the model, so one response of each group outweighs the others
    losses = []
    for entries in (far.entries, tuple(e for e in far.entries if e.origin is not Origin.X3)):
        config = learner_config(model_path, loss={**QUIET, "x3_min_ess": 0.999}, learner={"minibatch_size": 8})
        report = make_updater(config, tiny_policy(config), tmp_path).run(dataclasses.replace(far, entries=entries))
        losses.append([(result.loss, result.grad_norm, result.num_tokens) for result in report.minibatches])
    assert len(losses[0]) == 1
    for first, second in zip(*losses, strict=True):
        assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize(
    ("log_weights", "advantages"),
    [
        ((0.0, 0.0), [1.0, -1.0]),  # J = 1/2, deviation 1/2: eq. 2
        ((math.log(2), 0.0), [1 / math.sqrt(2), -math.sqrt(2)]),  # J = 2/3
        ((math.log(4), 0.0), None),  # J = 4/5 of two responses: more than 1 - 1/(2G) = 3/4, so it is solved
    ],
)
def test_the_baseline_of_today_skips_what_is_learned(
    log_weights: tuple[float, float], advantages: list[float] | None
) -> None:
    step, facts = weighed(config_of(x3_baseline="current"), batch_of((Origin.X3, log_weights)))
    if advantages is None:
        assert facts["x3_left_out"] == 1
        assert step.plan == ()
    else:
        assert facts["x3_left_out"] == 0
        assert step.advantage_M.tolist() == pytest.approx(np.repeat(advantages, 2).tolist(), abs=1e-5)


def test_the_baseline_of_today_is_the_pass_rate_under_the_current_policy() -> None:
    group = make_group(rewards="1000", lengths=[2, 2, 2, 2])
    log_weights = np.repeat([math.log(3) / 2, 0, 0, 0], 2)  # 3 of 6: J = 1/2 where mu = 1/4
    group = replace(group, rollout_logprobs=-log_weights.astype(np.float32))
    batch = make_batch(groups=[group], origins=[Origin.X3], step=1)
    step, facts = weighed(config_of(x3_baseline="current"), batch)
    assert facts["x3_pass_rate"] == pytest.approx(0.5)
    assert step.advantage_M.tolist() == pytest.approx([1, 1, -1, -1, -1, -1, -1, -1], abs=1e-5)
    assert step.columns.advantage_R.tolist() == pytest.approx([1, -1, -1, -1], abs=1e-5)


def three_responses(log_weights: tuple[float, float, float], rewards: tuple[float, float, float]) -> Group:
    """One token each, to which pi_theta_t gives probability 1."""
    return replace(make_group(rewards=rewards, lengths=[1, 1, 1]), rollout_logprobs=alpha_of(log_weights))


def alpha_of(log_weights: Sequence[float]) -> np.ndarray:
    """[G] log-probs of single tokens, at most 0, that give these log W_j but for a constant, which changes nothing."""
    return (min(log_weights) - np.array(log_weights)).astype(np.float32)


def test_a_response_at_the_stored_mean_counts_in_the_baseline_of_today_and_trains_against_it() -> None:
    # r = [0, 1, 1/2]: the stored mean is 1/2, so the stored advantage of the third is 0.
    # W = e^[-.246, .533, -.466] = [.78192, 1.70404, .62751], sum 3.11347
    # J = (1.70404 + .62751 / 2) / 3.11347 = .64809, sqrt(J (1 - J)) = .47757
    # (r - J) / .47757 = [-1.3571, .7369, -.3101], times x3_weight .5 and the entry's .5 = [-.3393, .1842, -.0775]
    # ess = 3.11347^2 / (3 (.61140 + 2.90375 + .39377)) = 9.69370 / 11.72676 = .82663
    group = three_responses((-0.246, 0.533, -0.466), (0.0, 1.0, 0.5))
    entry = BatchEntry(origin=Origin.X3, group=group, weight=0.5)
    batch = replace(make_batch(groups=[group]), entries=(entry,))
    step, facts = weighed(config_of(x3_baseline="current", x3_weight=0.5), batch)
    assert step.columns.advantage_R.tolist() == pytest.approx([-0.3393, 0.1842, -0.0775], abs=1e-4)
    assert step.advantage_M.tolist() == pytest.approx([-0.3393, 0.1842, -0.0775], abs=1e-4)
    assert step.active_R.tolist() == [True, True, True], "the third has an advantage now"
    assert facts["x3_pass_rate"] == pytest.approx(0.64809, abs=1e-5)
    assert facts["x3_group_ess"] == pytest.approx(0.82663, abs=1e-5)


def test_a_response_at_the_baseline_of_today_needs_no_pass() -> None:
    # W = [1, 2, 1]: J = (0 + 2 / 2 + 1) / 4 = 1/2, the reward of the second, whose advantage was stored as 0 too.
    group = three_responses((0.0, math.log(2), 0.0), (0.0, 0.5, 1.0))
    step, _ = weighed(config_of(x3_baseline="current"), make_batch(groups=[group], origins=[Origin.X3]))
    assert step.columns.advantage_R.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    # W = [1, 1, 2]: J = (1/2 + 2) / 4 = 5/8; sqrt(15/64) = .48412: [-1.2910, -.2582, .7746]
    group = three_responses((0.0, 0.0, math.log(2)), (0.0, 0.5, 1.0))
    step, _ = weighed(config_of(x3_baseline="current"), make_batch(groups=[group], origins=[Origin.X3]))
    assert step.columns.advantage_R.tolist() == pytest.approx([-1.2910, -0.2582, 0.7746], abs=1e-4)


def test_a_response_that_the_policy_has_left_counts_e_to_the_minus_5_of_the_likeliest() -> None:
    # J = e^-5 / (1 + e^-5) = .0066929; without the floor it would be e^-60.
    _, facts = weighed(config_of(x3_baseline="current"), batch_of((Origin.X3, (0.0, 60.0))))
    assert facts["x3_pass_rate"] == pytest.approx(0.0066929, abs=1e-6)
    # The effective sample size has no floor: (1 + e^-60)^2 / (2 (1 + e^-120)) = 1/2
    assert facts["x3_group_ess"] == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "rate", "is_dropped"),
    [
        ("1000", 0.12, True),  # below 1/2G = 1/8
        ("1000", 0.13, False),
        ("1110", 0.87, False),
        ("1110", 0.88, True),  # above 1 - 1/2G = 7/8
    ],
)
def test_groups_less_than_half_a_response_from_all_wrong_or_all_right_are_dropped(
    rewards: str, rate: float, is_dropped: bool
) -> None:
    # The response that stands alone has weight W, the three others 1: its share is W / (W + 3).
    share = rate if rewards == "1000" else 1 - rate
    alone = math.log(3 * share / (1 - share))
    log_weights = [alone, 0.0, 0.0, 0.0] if rewards == "1000" else [0.0, 0.0, 0.0, alone]
    group = make_group(rewards=rewards, lengths=[1, 1, 1, 1])
    group = replace(group, rollout_logprobs=alpha_of(log_weights))
    step, facts = weighed(config_of(x3_baseline="current"), make_batch(groups=[group], origins=[Origin.X3]))
    assert facts["x3_pass_rate"] == pytest.approx(rate, abs=1e-6)
    assert (facts["x3_left_out"], len(step.plan)) == ((1, 0) if is_dropped else (0, 1))


def test_the_floor_of_the_effective_sample_size_is_inclusive() -> None:
    alike = batch_of((Origin.X3, (0.0, 0.0)))  # ess = 1
    assert weighed(config_of(x3_min_ess=1.0), alike)[1]["x3_left_out"] == 0
    # (1 + 3)^2 / (2 (1 + 9)) = .8
    for floor, left_out in ((0.79, 0), (0.81, 1)):
        step = weighed(config_of(x3_min_ess=floor), batch_of((Origin.X3, (0.0, math.log(3)))))
        assert step[1]["x3_left_out"] == left_out


def test_the_deviation_of_today_is_smoothed_as_that_of_eq_2() -> None:
    # J = 1/2: 1/2 / sqrt(1/4 + 1/100) = .98058
    config = config_of(x3_baseline="current", advantage_eps=0.01)
    step, _ = weighed(config, batch_of((Origin.X3, (0.0, 0.0))))
    assert step.columns.advantage_R.tolist() == pytest.approx([0.98058, -0.98058], abs=1e-5)
