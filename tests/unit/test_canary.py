"""Which differences between an engine and the learner a worker accepts after a weight update."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bapo.config.tree import Config
from bapo.core.errors import ContractError, WeightMismatchError
from bapo.core.types import Canary
from learner.canary import NUM_TOKENS, canary_tokens
from rollout_server.weights.canary import Agreement
from tests.support.tiny_model import write_tokenizer

LEARNER = np.linspace(-3.0, -0.1, 63, dtype=np.float32)
NOISE = np.where(np.arange(63) % 2, 0.02, -0.02).astype(np.float32)
"""Of bfloat16: root mean square and largest value are 0.02 nats."""
UPDATE = np.where(np.arange(63) % 3, 0.1, -0.1).astype(np.float32)
"""What an update of the weights changes."""


def canary(logprobs: np.ndarray = LEARNER, tolerance: float = 0.5) -> Canary:
    return Canary(token_ids=tuple(range(64)), logprobs=tuple(logprobs.tolist()), tolerance=tolerance)


def test_weights_one_update_old_are_noticed_where_the_update_is_larger_than_the_noise() -> None:
    agreement = Agreement()
    assert agreement.check(canary(), LEARNER + NOISE, 1) == pytest.approx(0.02, rel=1e-4)
    agreement.check(canary(LEARNER + UPDATE), LEARNER + UPDATE - NOISE, 2)
    with pytest.raises(WeightMismatchError, match="to version 3"):
        agreement.check(canary(LEARNER + 2 * UPDATE), LEARNER + UPDATE - NOISE, 3)


def test_one_token_that_is_far_off_is_noticed_although_the_mean_is_small() -> None:
    agreement = Agreement()
    agreement.check(canary(), LEARNER + NOISE, 1)
    # 0.3 nats on one of 63 tokens: 0.04 in root mean square, within 3 x 0.02.
    agreement.check(canary(), LEARNER + NOISE, 2)
    off = LEARNER + NOISE
    off[7] += 0.3
    with pytest.raises(WeightMismatchError, match=r"at most 0\.32"):
        agreement.check(canary(), off, 3)


def test_the_first_update_is_measured_against_the_bound_of_the_precision() -> None:
    for off, tolerance in ((0.4, 0.5), (0.001, 0.002)):
        Agreement().check(canary(tolerance=tolerance), LEARNER + np.float32(off), 1)
    for off, tolerance in ((0.6, 0.5), (0.01, 0.002), (np.nan, 0.5)):
        with pytest.raises(WeightMismatchError):
            Agreement().check(canary(tolerance=tolerance), LEARNER + np.float32(off), 1)


def test_noise_that_grows_slowly_ends_no_healthy_worker_and_never_passes_the_bound() -> None:
    agreement = Agreement()
    for times in (0.0, 1.0, 2.5, 6.0, 15.0, 24.0):
        agreement.check(canary(), LEARNER + np.float32(times) * NOISE, 1)
    with pytest.raises(WeightMismatchError):
        agreement.check(canary(), LEARNER + 26 * NOISE, 2)


def test_an_engine_without_the_adapter_is_noticed_before_its_distance_is() -> None:
    """0.015 nats per token, less than the noise of 0.02; |effect| = 0.119, six times that of one token."""
    effect = np.where(np.arange(63) % 3, 0.016, -0.016).astype(np.float32)
    adapted = dataclasses.replace(canary(LEARNER + effect), base_logprobs=tuple(LEARNER.tolist()))
    agreement = Agreement()
    agreement.check(canary(), LEARNER + NOISE, 1)
    agreement.check(adapted, LEARNER + effect + NOISE, 2)
    with pytest.raises(WeightMismatchError, match="base model"):
        agreement.check(adapted, LEARNER + NOISE, 3)
    nearly_none = dataclasses.replace(canary(LEARNER + effect / 4), base_logprobs=tuple(LEARNER.tolist()))
    agreement.check(nearly_none, LEARNER + NOISE, 4)  # nothing can be said


def test_an_engine_without_weights_agrees_and_an_inconsistent_canary_is_refused() -> None:
    assert Agreement().check(canary(), None, 1) == 0.0
    with pytest.raises(ContractError):
        Agreement().check(canary(), LEARNER[1:], 1)


def test_the_canary_is_a_prompt_of_the_task_with_its_answer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = Config.model_validate({"model": {"path": str(tmp_path)}})
    tokens = canary_tokens(config, range(218))
    assert 16 <= len(tokens) <= NUM_TOKENS
    assert tokens == canary_tokens(config, range(218))
    other = canary_tokens(config.model_copy(update={"run": config.run.model_copy(update={"seed": 7})}), range(218))
    assert tokens == other, "it is the task's text: no seed changes it"


def test_without_a_task_the_canary_is_random_and_fits_into_the_engine(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "task": {"name": "no_such.module:task"},
            "rollout": {"max_prompt_tokens": 4, "max_response_tokens": 8},
        }
    )
    tokens = canary_tokens(config, range(5, 218))
    assert len(tokens) == 11
    assert min(tokens) >= 5
