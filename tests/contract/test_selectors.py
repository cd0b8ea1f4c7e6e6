"""What every prompt selector promises: found by name from the folder, so that a new file is tested without an edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.algorithms.methods import SELECTOR
from bapo.algorithms.selectors.base import PromptPool, PromptSelector, pack_state, unpack_state
from bapo.algorithms.selectors.registry import learns, load_selector
from bapo.core.errors import ConfigError, ContractError
from bapo.core.success_counts import SuccessCounts, success_counts_of
from contrib.kimi.selector import failure_rates
from contrib.mopps.selector import by_fitness
from tests.support.methods import options_for

B = 4
NAMES = st.sampled_from(SELECTOR.names())
NUM_PROMPTS = st.integers(B, 40)
Settings = dict[str, Any]
SETTINGS = st.fixed_dictionaries(
    {
        "pool_ratio": st.sampled_from([1.0, 2.0, 16.0]),
        "mode": st.sampled_from(["topk", "threshold"]),
        "decay": st.sampled_from([0.5, 1.0]),
        "curriculum_steps": st.sampled_from([0, 5]),
    }
)
"""Of all selectors; each takes its own."""
SEEDS = st.integers(0, 1000)


def make(name: str, config: Settings, num: int, seed: int = 3) -> PromptSelector:
    pool = PromptPool(prompt_ids=tuple(f"p{i}" for i in range(num)), levels=np.arange(num) % 3.0)
    return load_selector(name, options_for(SELECTOR, name, **config), pool, seed=seed, batch_size=B)


def answers(step: int, indices: Sequence[int], *, lost: int = 0) -> SuccessCounts:
    """Of a policy that does not change: prompt i has i mod 9 of 8 right. The first `lost` groups never came."""
    return success_counts_of(step, ((f"p{i}", float(i % 9), 8) for i in indices[lost:]))


def step_of(selector: PromptSelector, step: int, *, lost: int = 0) -> list[int]:
    """One step of a run that waits for its success counts; returns its prompts."""
    chosen = selector.propose(step, B).tolist()
    selector.observe(answers(step, chosen, lost=lost))
    return [int(i) for i in chosen]


@settings(max_examples=60, deadline=None)
@given(name=NAMES, config=SETTINGS, num=NUM_PROMPTS, seed=SEEDS, step=st.integers(1, 50), n=st.integers(1, 50))
def test_a_proposal_has_different_prompts_of_the_pool_and_a_longer_one_begins_with_it(
    name: str, config: Settings, num: int, seed: int, step: int, n: int
) -> None:
    selector = make(name, config, num, seed)
    short, all_of_them = selector.propose(step, n).tolist(), selector.propose(step, num).tolist()
    assert sorted(all_of_them) == list(range(num))
    assert short == all_of_them[:n]


@settings(max_examples=40, deadline=None)
@given(name=NAMES, config=SETTINGS, num=NUM_PROMPTS, seed=SEEDS, cut=st.integers(1, 8))
def test_a_selector_that_was_saved_and_taken_back_goes_on_as_if_nothing_had_happened(
    name: str, config: Settings, num: int, seed: int, cut: int
) -> None:
    whole, first = make(name, config, num, seed), make(name, config, num, seed)
    expected = [step_of(whole, step) for step in range(1, 13)]
    got = [step_of(first, step) for step in range(1, cut + 1)]
    second = make(name, config, num, seed)
    second.restore(unpack_state(name, pack_state(name, first.state())))
    got += [step_of(second, step) for step in range(cut + 1, 13)]
    assert got == expected


@settings(max_examples=30, deadline=None)
@given(name=NAMES, config=SETTINGS, num=NUM_PROMPTS, lost=st.integers(1, B))
def test_groups_that_failed_for_good_are_no_obstacle(name: str, config: Settings, num: int, lost: int) -> None:
    selector = make(name, config, num)
    for step in range(1, 9):
        assert len(set(step_of(selector, step, lost=lost))) == B


@pytest.mark.parametrize("name", SELECTOR.names())
def test_another_seed_or_step_gives_another_proposal(name: str) -> None:
    def first(seed: int, step: int) -> list[int]:
        return [int(i) for i in make(name, {}, 40, seed).propose(step, B)]

    assert first(1, 1) == first(1, 1)
    assert len({tuple(first(seed, step)) for seed in (1, 2) for step in (1, 2)}) > 1


@pytest.mark.parametrize("name", [name for name in SELECTOR.names() if learns(name)])
def test_what_other_data_or_another_selector_left_behind_is_refused(name: str) -> None:
    selector = make(name, {}, 40)
    step_of(selector, 1)
    with pytest.raises(ConfigError, match="other data"):
        make(name, {}, 41).restore(selector.state())
    with pytest.raises(ConfigError, match=f"uses selector '{name}', but algorithm.selector is 'other'"):
        unpack_state("other", pack_state(name, selector.state()))
    with pytest.raises(ContractError):
        unpack_state(name, b"\x93")


def test_a_misspelt_selector_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"mops.*did you mean 'mopps'.*use one of "):
        load_selector("mops", {}, PromptPool(prompt_ids=()), seed=1, batch_size=B)


def test_a_band_takes_any_candidate_inside_it_and_then_the_nearest() -> None:
    rates = np.array([0.1, 0.45, 0.75, 0.62, 0.5])
    # Inside [0.3, 0.7]: 1, 3, 4, in the order of the (shuffled) candidates; then 0.75, then 0.1.
    assert by_fitness(rates, 0.5, (0.3, 0.7)).tolist() == [1, 3, 4, 2, 0]


def test_the_failure_rate_of_a_prompt_that_was_never_sampled_is_one() -> None:
    rates = failure_rates(np.array([0.0, 2.0, 16.0]), np.array([0.0, 8.0, 16.0]))
    assert rates.tolist() == [1.0, 0.75, 0.0]
