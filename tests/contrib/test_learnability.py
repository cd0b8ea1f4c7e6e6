"""The selector `learnability`: its prior, what it repeats and what it explores, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bapo.algorithms.reward_levels import expected_variance
from bapo.algorithms.selectors.base import PromptPool
from bapo.core.success_counts import success_counts_of
from contrib.learnability.selector import Learnability, prior

POOL = PromptPool(prompt_ids=tuple(f"p{i}" for i in range(10)))
SETTINGS = Learnability.Settings(decay=0.5, explore=0.5, cooldown=1)


def selector(settings: Learnability.Settings = SETTINGS) -> Learnability:
    return Learnability(settings, POOL, seed=1, batch_size=4)


def test_the_prior_has_the_mean_and_the_expected_variance_of_the_first_visits() -> None:
    # Four first visits with k = 0, 0, 4, 8 of 8: mean 3/8; k (8 - k) / 56 is 0, 0, 16/56, 0: mean 1/14.
    a, b = prior(np.array([4.0, 1.5, 16 / 56]))
    assert a / (a + b) == pytest.approx(3 / 8)
    assert expected_variance(np.array([a]), np.array([b])) == pytest.approx([1 / 14])


def test_without_a_success_or_a_failure_nothing_is_known_of_new_prompts() -> None:
    assert prior(np.array([4.0, 0.0, 0.0])) == (1.0, 1.0)
    assert prior(np.array([4.0, 4.0, 0.0])) == (1.0, 1.0)


def test_half_of_the_batch_repeats_the_most_learnable_prompts_and_half_is_new() -> None:
    chooser = selector()
    first = chooser.propose(1, 10).tolist()
    assert sorted(first) == list(range(10)), "each prompt once"
    seen = first[:4]
    levels = dict(zip(seen, (0, 4, 3, 8), strict=True))
    chooser.observe(success_counts_of(1, [(f"p{i}", k, 8) for i, k in levels.items()]))
    third = chooser.propose(3, 10).tolist()
    assert third[:2] == [seen[1], seen[2]], "4 of 8 before 3 of 8; 0 and 8 of 8 are worth less than a new prompt"
    assert not set(third[2:4]) & set(seen)


def test_a_prompt_rests_after_it_was_proposed() -> None:
    chooser = selector()
    seen = chooser.propose(1, 10).tolist()[:4]
    chooser.observe(success_counts_of(1, [(f"p{i}", 4, 8) for i in seen]))
    assert not set(chooser.propose(2, 10).tolist()[:4]) & set(seen)
    assert set(chooser.propose(3, 10).tolist()[:2]) <= set(seen)


def test_new_evidence_counts_more_than_old() -> None:
    chooser = selector(SETTINGS.model_copy(update={"cooldown": 0}))
    seen = chooser.propose(1, 10).tolist()[:4]
    chooser.observe(success_counts_of(1, [(f"p{i}", k, 8) for i, k in zip(seen, (4, 4, 0, 0), strict=True)]))
    chooser.observe(success_counts_of(2, [(f"p{seen[0]}", 8, 8)]))  # learned: 10 of 12 after decay
    assert chooser.propose(3, 10).tolist()[0] == seen[1]


def test_first_visits_of_a_step_before_count_nine_tenths() -> None:
    chooser = selector()
    chooser.observe(success_counts_of(1, [("p0", 4, 8), ("p1", 0, 8)]))
    # Number, sum of k / G, sum of k (G - k) / (G (G - 1)): 16 / 56 for 4 of 8.
    assert chooser.state()["moments"].tolist() == pytest.approx([2, 0.5, 2 / 7])
    chooser.observe(success_counts_of(2, [("p2", 8, 8), ("p0", 2, 8)]))  # p0 is no first visit
    assert chooser.state()["moments"].tolist() == pytest.approx([0.9 * 2 + 1, 0.9 * 0.5 + 1, 0.9 * 2 / 7])
    # Evidence of p0 decays by the setting, here 1/2: 4/2 + 2 right and 4/2 + 6 wrong.
    assert chooser.state()["correct"].tolist()[:3] == [4, 0, 8]
    assert chooser.state()["incorrect"].tolist()[:3] == [8, 8, 0]


def test_when_no_prompt_is_new_the_others_fill_the_batch() -> None:
    chooser = selector(SETTINGS.model_copy(update={"cooldown": 0}))
    for step in (1, 2, 3):
        proposed = chooser.propose(step, 10).tolist()[:4]
        chooser.observe(success_counts_of(step, [(f"p{i}", 0, 8) for i in proposed]))
    assert sorted(chooser.propose(4, 10).tolist()) == list(range(10))


def test_a_restored_selector_proposes_the_same() -> None:
    chooser = selector()
    seen = chooser.propose(1, 10).tolist()[:4]
    chooser.observe(success_counts_of(1, [(f"p{i}", 4, 8) for i in seen]))
    other = selector()
    other.restore(chooser.state())
    assert other.propose(3, 10).tolist() == chooser.propose(3, 10).tolist()
