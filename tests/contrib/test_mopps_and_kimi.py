"""The selectors `mopps` and `kimi` by hand, and the vectors of MoPPS."""

from __future__ import annotations

import numpy as np
import pytest

from bapo.algorithms.selectors.base import PromptPool, first_by_weight
from bapo.core.errors import ConfigError
from bapo.core.success_counts import success_counts_of
from contrib.kimi.selector import Kimi, admitted
from contrib.mopps.selector import Mopps, by_fitness, updated
from tests.support.vectors import vector


def pool_of(num: int, *, levels: list[float] | None = None) -> PromptPool:
    return PromptPool(
        prompt_ids=tuple(f"p{i}" for i in range(num)), levels=None if levels is None else np.array(levels)
    )


# -- MoPPS (B.9)


@pytest.mark.parametrize(("decay", "key"), [(0.5, "lam0_5"), (1.0, "lam1_0")])
def test_v16_a_posterior_counts_right_and_wrong_answers_and_forgets_towards_its_prior(decay: float, key: str) -> None:
    given = vector("V16.mopps")
    alpha, beta, seen = 1.0, 1.0, []
    for k in given["k_seq"]:
        alpha, beta = updated(alpha, beta, k, 8, decay)
        seen.append([alpha, beta, alpha / (alpha + beta)])
    # Without forgetting the vectors have the last posterior alone.
    want = given[key] if decay < 1 else [given[key]]
    assert np.array(seen[-len(want) :]) == pytest.approx(np.array(want), abs=1e-6)


def test_v16_the_candidates_nearest_to_the_target_are_picked() -> None:
    given = vector("V16.mopps", "topk")
    assert by_fitness(np.array(given["gamma_hat"]), given["target"], None)[:3].tolist() == given["pick3"]


def test_an_observed_group_moves_the_posterior_of_its_prompt_alone() -> None:
    mopps = Mopps(Mopps.Settings(decay=0.5), pool_of(3), seed=1, batch_size=1)
    mopps.observe(success_counts_of(1, [("p1", 2.0, 8)]))
    assert mopps.state()["alpha"].tolist() == [1, 3, 1]
    assert mopps.state()["beta"].tolist() == [1, 7, 1]


def test_mopps_comes_to_sample_prompts_of_medium_difficulty_from_a_pool_that_has_few_of_them() -> None:
    """500 prompts: every tenth is right 4 of 8 times, the others never or always (with a noiseless policy).

    The uniform order would take 10 % of such prompts. A prompt that gave 0 or 8 of 8 once has the posterior Beta(1, 9)
    or Beta(9, 1): its samples lie within 0.1 of 1/2 with probability .010, those of Beta(5, 5) with about .47, of
    a new prompt with .2. So each of the 50 is found once all have been seen, and then nothing else is better.
    """
    rate = {f"p{i}": 4.0 if i % 10 == 0 else 8.0 * (i % 2) for i in range(500)}
    pool = pool_of(500)
    mopps = Mopps(Mopps.Settings(pool_ratio=16.0), pool, seed=1, batch_size=16)
    shares = []
    for step in range(1, 101):
        chosen = [pool.prompt_ids[i] for i in mopps.propose(step, 16)]
        shares.append(sum(rate[name] == 4.0 for name in chosen) / 16)
        mopps.observe(success_counts_of(step, ((name, rate[name], 8) for name in chosen)))
    assert np.mean(shares[:5]) < 0.3
    assert np.mean(shares[-20:]) > 0.9


def test_a_policy_that_improves_is_followed_when_old_evidence_is_forgotten() -> None:
    """A prompt that was never right for 30 groups, and then is right half of the time: the mean after 4 more groups.

    lambda = 1: (1 + 16) / (2 + 272) = .062. lambda = 1/2: the evidence of 0 of 8 settles at beta = 17, and four groups
    of 4 of 8 give alpha = 1 + 4 (1 + 1/2 + 1/4 + 1/8) = 8.5, beta = 1 + 16 / 16 + 7.5 = 9.5.
    """
    means = []
    for decay in (1.0, 0.5):
        mopps = Mopps(Mopps.Settings(decay=decay), pool_of(1), seed=1, batch_size=1)
        for step, k in enumerate([0.0] * 30 + [4.0] * 4, start=1):
            mopps.observe(success_counts_of(step, [("p0", k, 8)]))
        state = mopps.state()
        means.append(float(state["alpha"][0] / (state["alpha"][0] + state["beta"][0])))
    assert means == pytest.approx([17 / 274, 8.5 / 18], abs=1e-4)


# -- Kimi k1.5 (B.14)


def test_prompts_are_drawn_in_proportion_to_how_often_they_fail() -> None:
    """Failure rates 1, .5, .5 and 0: the first prompt drawn is p0 half of the time, p1 and p2 a quarter each."""
    kimi = Kimi(Kimi.Settings(), pool_of(4), seed=3, batch_size=1)
    kimi.observe(success_counts_of(1, [("p0", 0.0, 8), ("p1", 4.0, 8), ("p2", 4.0, 8), ("p3", 8.0, 8)]))
    first = np.bincount([kimi.propose(step, 1)[0] for step in range(4000)], minlength=4) / 4000
    # The standard deviation of such a share is at most .008.
    assert first.tolist() == pytest.approx([0.5, 0.25, 0.25, 0.0], abs=0.03)


def test_a_draw_without_replacement_follows_the_weights_at_every_place() -> None:
    """Weights 2, 1, 1: the second is p1 if p0 was first (1/2, then 1/2) or p2 was (1/4, then 1/3): 1/3."""
    rng = np.random.default_rng(0)
    weights = np.log(np.array([2.0, 1.0, 1.0]))
    second = np.bincount([first_by_weight(weights, 2, rng)[1] for _ in range(6000)], minlength=3) / 6000
    assert second.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3], abs=0.025)


def test_a_curriculum_admits_the_easiest_levels_first_and_each_of_them_whole() -> None:
    levels = np.array([3.0, 1.0, 2.0, 1.0, 3.0])
    assert admitted(levels, 0.2).tolist() == [False, True, False, True, False]
    assert admitted(levels, 0.6).tolist() == [False, True, True, True, False]
    assert admitted(levels, 0.61).tolist() == [True] * 5
    assert admitted(levels, 7.0).tolist() == [True] * 5
    kimi = Kimi(Kimi.Settings(curriculum_steps=5), pool_of(5, levels=levels.tolist()), seed=3, batch_size=1)
    assert set(kimi.propose(1, 2).tolist()) == {1, 3}
    assert set(kimi.propose(3, 3).tolist()) == {1, 2, 3}
    assert len(set(kimi.propose(1, 4).tolist()) - {1, 3}) == 2, "a batch is full although too few are admitted"


def test_a_curriculum_over_a_task_without_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"selector.curriculum_steps = 5, but the task has no levels; set it to 0"):
        Kimi(Kimi.Settings(curriculum_steps=5), pool_of(5), seed=3, batch_size=1)
