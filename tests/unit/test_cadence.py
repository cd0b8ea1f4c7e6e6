"""When weights are synced and hard prompts asked again, and how a batch is cut: vectors V20."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bapo.algorithms.settings import CadenceConfig
from learner.batch.packing import minibatches, near_equal_split
from tests.support.vectors import vector

PAPER = CadenceConfig(weight_sync_interval=5, reevaluation_interval=5, max_steps_ahead=0)


def test_syncs_lags_and_reevaluations_are_those_of_the_vectors() -> None:
    steps, want = range(1, 16), vector("V20.sched_v5_m5")
    assert [t for t in steps if PAPER.is_sync_step(t)] == [1, *want["alg1_sync"]]  # 1: before the first step
    assert [t - PAPER.synced_version(t) for t in steps] == want["alg1_lag"]
    reevaluations = [t for t in steps if t % PAPER.reevaluation_interval == 0]
    assert reevaluations == want["alg1_reeval"] == want["official_reeval"]
    assert all(PAPER.is_sync_step(t) for t in reevaluations), (
        "each meets fresh weights, which the released order misses"
    )


def test_without_max_steps_ahead_a_group_must_come_from_the_papers_own_version() -> None:
    assert [PAPER.min_version(t) for t in (1, 4, 5, 9, 10)] == [1, 1, 5, 5, 10]
    assert PAPER.max_staleness == 4


def test_max_steps_ahead_admits_groups_that_were_sampled_up_to_so_many_steps_ahead() -> None:
    cadence = CadenceConfig(weight_sync_interval=5, reevaluation_interval=5, max_steps_ahead=2)
    # Step 6 accepts what step 4 would have had: version 1. Step 7 needs what step 5 has: version 5.
    assert [cadence.min_version(t) for t in (1, 2, 5, 6, 7, 11, 12)] == [1, 1, 1, 1, 5, 5, 10]
    assert cadence.max_staleness == 6


@given(v=st.integers(1, 7), periods=st.integers(1, 3), max_steps_ahead=st.integers(0, 9), t=st.integers(1, 60))
def test_staleness_is_never_more_than_promised(v: int, periods: int, max_steps_ahead: int, t: int) -> None:
    cadence = CadenceConfig(weight_sync_interval=v, reevaluation_interval=periods * v, max_steps_ahead=max_steps_ahead)
    assert 0 <= t - cadence.min_version(t) <= cadence.max_staleness
    assert cadence.is_sync_step(cadence.synced_version(t))


def test_v_1_syncs_at_every_step() -> None:
    on_policy = CadenceConfig(weight_sync_interval=1, reevaluation_interval=1, max_steps_ahead=0)
    assert all(on_policy.is_sync_step(t) and on_policy.min_version(t) == t for t in range(1, 9))


def test_reevaluation_must_meet_fresh_weights() -> None:
    with pytest.raises(ValidationError, match="reevaluation_interval = 10"):
        CadenceConfig(weight_sync_interval=5, reevaluation_interval=7)


@pytest.mark.parametrize(("num_groups", "sizes"), [(65, [33, 32]), (1, [1]), (0, [])])
def test_minibatches_are_near_equal(num_groups: int, sizes: list[int]) -> None:
    assert near_equal_split(num_groups, 64) == sizes


def test_minibatches_are_those_of_the_vectors_and_not_verls() -> None:
    want = vector("V20.minibatches")
    assert near_equal_split(256, 64) == want["full"]
    assert near_equal_split(179, 64) == want["n179_even"] != want["n179_verl"]
    assert near_equal_split(40, 64) == want["n40"]


@given(num_groups=st.integers(0, 2000), minibatch_size=st.integers(1, 300))
def test_minibatches_cover_the_batch_and_differ_by_at_most_one(num_groups: int, minibatch_size: int) -> None:
    sizes = near_equal_split(num_groups, minibatch_size)
    assert sum(sizes) == num_groups
    assert len(sizes) == -(-num_groups // minibatch_size)
    assert not sizes or (max(sizes) <= minibatch_size and max(sizes) - min(sizes) <= 1)


@pytest.mark.parametrize("num_groups", [0, 1, 7, 600])
def test_without_a_size_all_groups_are_one_minibatch(num_groups: int) -> None:
    found = minibatches(num_groups, None, seed=1, step=1, epoch=0)
    assert [sorted(chosen) for chosen in found] == ([list(range(num_groups))] if num_groups else [])


@pytest.mark.parametrize(("num_groups", "minibatch_size"), [(-1, 4), (4, 0)])
def test_impossible_cuts_are_refused(num_groups: int, minibatch_size: int) -> None:
    with pytest.raises(ValueError):
        near_equal_split(num_groups, minibatch_size)
