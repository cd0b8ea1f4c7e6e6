"""`rollout.stale_tokens = "mask"`: tokens that are older than the lag allows are read, and not trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo.config.tree import Config
from bapo.core.token_arrays import runs_of
from bapo.core.types import Batch, Group, Origin
from learner.advantages.of_batch import left_out, row_advantages
from learner.diagnostics.step_report import TokenValues, staleness_of
from learner.stale_tokens import masked_fields, with_stale_as_context
from tests.support.episodes import histories_of
from tests.support.factories import make_batch, make_group
from tests.support.learner import FakeBuffer, FakeFleet, learner_config, make_test_learner

STEP = 9
"""With v = 1 and one step ahead: tokens of version 8 and younger are not stale."""


def config_of(stale_tokens: str = "mask", model: Path | str = "model") -> Config:
    return learner_config(
        model,
        run={"num_steps": STEP + 1},
        agents={},
        diagnostics={"token_records": 1},
        rollout={"engine": "vllm", "stale_tokens": stale_tokens},
        cadence={"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 1},
    )


def episodes(versions: list[int], turns: list[list[int]], context_ids: list[int]) -> Group:
    """Two responses to the prompt 10 11, of 5 and 2 tokens: 30 to 34, 40 and 41; the second is of version 9."""
    versions_T = np.array([*versions, 9, 9], np.int32)
    return replace(
        make_group(rewards="10", lengths=[5, 2]),
        prompt_token_ids=np.array([10, 11], np.int32),
        token_ids=np.array([30, 31, 32, 33, 34, 40, 41], np.int32),
        rollout_logprobs=np.array([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7], np.float32),
        versions=np.array([[min(versions), max(versions)], [9, 9]], np.int32),
        spans=runs_of(versions_T),
        turns=np.array([*turns, [1, -1, 0, 2]], np.int32),
        context_ids=np.array(context_ids, np.int32),
    )


def batch_of(group: Group, origin: Origin = Origin.X1) -> Batch:
    batch = make_batch(groups=[group], step=STEP)
    return replace(batch, entries=tuple(replace(entry, origin=origin) for entry in batch.entries))


def masked(group: Group) -> Group:
    return with_stale_as_context(batch_of(group), config_of()).entries[0].group


CHAIN = [[0, -1, 1, 2], [0, 0, 1, 3]]


def test_a_call_that_spans_an_update_keeps_the_tokens_behind_it() -> None:
    found = masked(episodes([6, 6, 7, 8, 9], CHAIN, [20, 21]))
    assert histories_of(found, 0) == [([10, 11, 20, 30, 31, 21, 32], [33, 34])]
    assert histories_of(found, 1) == [([10, 11], [40, 41])]
    assert found.lengths.tolist() == [2, 2]
    np.testing.assert_allclose(found.rollout_logprobs, [-0.4, -0.5, -0.6, -0.7])
    assert found.versions.tolist() == [[8, 9], [9, 9]]
    assert found.rewards.tolist() == [1.0, 0.0]


def test_all_that_continue_a_stale_call_read_it() -> None:
    fork = [[0, -1, 1, 2], [0, 0, 1, 1], [0, 0, 2, 2]]
    found = masked(episodes([7, 7, 8, 9, 9], fork, [20, 21, 22, 23]))
    assert histories_of(found, 0) == [([10, 11, 20, 30, 31, 21], [32]), ([10, 11, 20, 30, 31, 22, 23], [33, 34])]


def test_a_stale_call_that_none_continues_is_left_away() -> None:
    from_nothing = [[0, -1, 1, 2], [0, -2, 2, 3]]
    found = masked(episodes([7, 7, 8, 8, 8], from_nothing, [20, 21, 22]))
    assert histories_of(found, 0) == [([21, 22], [32, 33, 34])]


def test_an_episode_without_a_young_token_stays_in_the_baseline_and_out_of_the_loss() -> None:
    batch, config = batch_of(episodes([6, 6, 7, 7, 7], CHAIN, [20, 21])), config_of()
    assert with_stale_as_context(batch, config) is batch
    assert left_out(batch, config).tolist() == [True, False]
    assert row_advantages(batch, config)[1] < 0  # worse than the mean of both
    assert staleness_of(batch, Origin.X1, config) == [0], "of the response of version 9, the only one that trains"


@pytest.mark.parametrize("origin", [Origin.X2, Origin.X3])
def test_groups_that_are_old_on_purpose_are_left_as_they_are(origin: Origin) -> None:
    batch = batch_of(episodes([1, 1, 2, 2, 2], CHAIN, [20, 21]), origin)
    assert with_stale_as_context(batch, config_of()) is batch
    assert not left_out(batch, config_of()).any()


class Records:
    """Where a learner puts the values of its tokens."""

    def __init__(self) -> None:
        self.found: list[tuple[Batch, TokenValues]] = []

    def expect(self, step: int) -> None:
        return

    def put(self, batch: Batch, values: TokenValues, advantage_M: object) -> None:
        self.found.append((batch, values))


def test_a_step_reports_what_its_episodes_did_and_how_much_of_it_did_not_train(
    model_path: Path, tmp_path: Path
) -> None:
    batch, records = batch_of(episodes([6, 6, 7, 8, 9], CHAIN, [20, 21])), Records()
    learner = make_test_learner(
        config_of(model=model_path), tmp_path, buffer=FakeBuffer(lambda _: batch), fleet=FakeFleet()
    )
    learner.token_records = records  # type: ignore[assignment]
    learner.run_step(STEP)
    (row,) = learner.records.rows  # type: ignore[attr-defined]
    assert (row["num_episodes"], row["episode_turns_mean"], row["episode_context_tokens_mean"]) == (2, 1.5, 1.0)
    assert row["episode_masked_share"] == 0.428571, "3 of 7 tokens"
    assert row["num_tokens"] == 4
    ((recorded, values),) = records.found
    assert histories_of(recorded.entries[0].group, 0)[0] == ([10, 11, 20], [30, 31])
    for each in (values.logprobs_M, values.ratio_M, values.advantage_M):
        assert np.isnan(each).tolist() == [True, True, True, False, False, False, False]


def test_the_tokens_of_an_episode_without_a_young_one_count_as_masked() -> None:
    batch = batch_of(episodes([6, 6, 7, 7, 7], CHAIN, [20, 21]))
    assert masked_fields(batch, config_of()) == {"episode_masked_share": 0.714286}  # 5 of 7
    assert masked_fields(batch, config_of("drop")) == {}


def test_without_the_setting_nothing_is_masked() -> None:
    batch = batch_of(episodes([6, 6, 7, 8, 9], CHAIN, [20, 21]))
    assert with_stale_as_context(batch, config_of("drop")) is batch


def test_masking_is_for_episodes() -> None:
    with pytest.raises(ValueError, match="for episodes"):
        learner_config(rollout={"stale_tokens": "mask"})
