"""The numbers of one step: gaps per origin, staleness per origin, means over mini-batches, the row of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bapo.core.sequences import group_columns, sequences_of
from bapo.core.types import Origin, Outcome
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.shortfall import shortfall
from learner.diagnostics.episode_report import (
    MAX_TOOLS,
    EpisodeReport,
    calls_per_episode,
    episode_fields,
    episodes_of,
)
from learner.diagnostics.gauges import OF_EPISODES, PromptsSeen, show, show_groups
from learner.diagnostics.off_policy_alarm import Alarm
from learner.diagnostics.step_report import Meter, MinibatchResult, UpdateReport, metrics_row
from learner.diagnostics.theorem_meter import Diagnosis
from learner.losses.objective import TokenLosses
from tests.support.factories import make_batch, make_group
from tests.support.learner import ALONE, learner_config
from tests.unit.test_turns import episodes


def result(loss: float, num_tokens: int, ratio_max: float = 1.0) -> MinibatchResult:
    return MinibatchResult(
        loss=loss,
        grad_norm=2 * loss,
        num_tokens=num_tokens,
        num_active=num_tokens,
        entropy=3 * loss,
        clip_ratio=0.0,
        kl=0.0,
        ratio_max=ratio_max,
        stop=False,
    )


def test_a_row_says_how_many_groups_with_rewards_that_differ_trained_and_why_the_others_did_not() -> None:
    config = learner_config(algorithm={"batch_size": 4, "group_size": 2}, learner={"minibatch_size": 4})
    batch = make_batch(groups=[make_group(rewards="10", lengths=[1, 1])], origins=[Origin.X1], step=10)
    seen = replace(batch.results[0], birth=10)
    none = {"origin": None, "birth": 10}
    results = (
        replace(seen, group_id="a", rewards=(0.0, 0.1)),
        replace(seen, group_id="a", rewards=(0.0, 0.1)),  # in two items of the batch
        replace(seen, group_id="b", rewards=(0.1, 0.1), reason="no_variance", **none),
        replace(seen, group_id="c", rewards=(0.3, 0.3 + 3e-8), reason="no_variance", **none),  # rounding
        replace(seen, group_id="d", rewards=(0.1, 1.0), reason="filtered", **none),
        replace(seen, group_id="e", rewards=(0.0, 1.0), reason="filtered", **none),
        replace(seen, group_id="f", rewards=(0.0, 1.0), reason="stale", **none),
        replace(seen, group_id="h", rewards=(0.0, 1.0), birth=9),  # counted in step 9
        replace(seen, group_id="i", rewards=(0.1, 1.0), outcomes=bytes([Outcome.GRADED, Outcome.EXPERT]), origin=None),
    )
    report = UpdateReport(lr=1e-4, minibatches=(), num_tokens=0)
    row = metrics_row(replace(batch, results=results), report, policy_version=9, config=config, seconds={"step": 1.0})
    assert (row["num_informative"], row["num_informative_trained"]) == (4, 1)
    assert row["informative_left_out"] == {"filtered": 2, "stale": 1}


def test_a_group_that_differs_by_its_experts_row_alone_trains_and_is_no_shortfall() -> None:
    """LUFFY, B = 4: in each group the sampled responses are wrong and the expert's solution is right."""
    config = learner_config(algorithm={"batch_size": 4, "group_size": 2}, learner={"minibatch_size": 4})
    groups = [make_group(rewards="01", lengths=[1, 1], prompt_id=name, experts=[1]) for name in "abcd"]
    batch = make_batch(groups=groups, step=10)
    expert = bytes([Outcome.GRADED, Outcome.EXPERT])
    batch = replace(batch, results=tuple(replace(result, birth=10, outcomes=expert) for result in batch.results))
    report = UpdateReport(lr=1e-4, minibatches=(), num_tokens=0)
    row = metrics_row(batch, report, policy_version=9, config=config, seconds={"step": 1.0})
    assert (row["num_informative"], row["num_informative_trained"], row["informative_left_out"]) == (4, 4, {})
    assert shortfall([row] * 5) == ""


def test_gauges_count_correct_responses_without_those_of_an_expert() -> None:
    telemetry = Telemetry(Process.LEARNER)
    batch = make_batch(groups=[make_group(rewards="001", experts=[2])], step=10)
    expert = bytes([Outcome.GRADED] * 2 + [Outcome.EXPERT])
    batch = replace(batch, results=tuple(replace(result, birth=10, outcomes=expert) for result in batch.results))
    show_groups(telemetry, batch)
    bins = [{"bin": str(k), "purpose": "fresh"} for k in range(4)]
    found = [telemetry.registry.get_sample_value("bapo_group_accuracy_groups", labels) for labels in bins]
    assert found == [1.0, 0.0, 0.0, None]
    PromptsSeen(telemetry).count(batch.results)
    assert telemetry.registry.get_sample_value("bapo_prompts_unsolved") == 1.0


def test_the_row_of_a_step_by_hand() -> None:
    groups = [
        make_group(rewards="10", prompt_id="a", lengths=[1, 1], version=9),
        make_group(rewards="10", prompt_id="b", lengths=[1, 1], version=6),
        make_group(rewards="10", prompt_id="c", lengths=[1, 1], version=4),
    ]
    batch = make_batch(groups=groups, origins=[Origin.X1, Origin.X1, Origin.X3], step=10, r_tot=0.4, num_bad=7)
    report = UpdateReport(
        lr=1e-4,
        minibatches=(result(1.0, 30, 1.5), result(2.0, 10, 1.25)),
        num_tokens=40,
        seconds={"prox": 0.5, "update": 1.0, "diagnostics": 0.25},
    )
    config = learner_config(algorithm={"batch_size": 4, "group_size": 2}, learner={"minibatch_size": 4})
    seconds = {"wait_batch": 2.0, "step": 4.0}
    alarm = Alarm(step=10, origin=Origin.X3, text="x3 of age 2: far")
    truncated = replace(batch.results[0], birth=10, outcomes=bytes([Outcome.TRUNCATED, Outcome.GRADED]))
    stored = replace(batch.results[1], birth=9)  # of an earlier step, as a stored success; counted there
    luffy = replace(batch.results[1], group_id="g-d", birth=10, outcomes=bytes([Outcome.GRADED, Outcome.EXPERT]))
    reused = replace(batch.results[2], birth=9, outcomes=bytes([Outcome.TRUNCATED] * 2))
    batch = replace(batch, results=(truncated, truncated, stored, luffy, reused))
    row = metrics_row(batch, report, policy_version=9, config=config, seconds=seconds, alarm=alarm)
    assert (row["num_responses"], row["num_truncated"]) == (3, 1)  # an expert's row is not sampled
    want = {
        "step": 10, "policy_version": 9, "reward_mean": 0.4, "x1": 2, "x2": 0, "x3": 1, "batch_size": 4, "num_bad": 7,
        "staleness_x1_mean": 2.5, "staleness_x1_max": 4, "staleness_x2_mean": None, "staleness_x2_max": None,
        "staleness_x3_mean": 6.0, "staleness_x3_max": 6, "loss": 1.25, "grad_norm": 2.5, "entropy": 3.75,
        "ratio_max": 1.5, "first_ratio_max": 1.5, "tv_x1": None, "divergences": [], "bounds": [],
        "warning": "x3 of age 2: far", "diagnostics_s": 0.25, "lr": 1e-4, "num_tokens": 40,
        "num_updates": 2, "wait_batch_s": 2.0, "prox_s": 0.5, "update_s": 1.0, "sync_s": 0.0, "checkpoint_s": 0.0,
        "step_s": 4.0, "tokens_per_s": 10.0,
    }  # fmt: skip
    assert {key: row[key] for key in want} == want


def test_the_mean_reward_is_that_of_the_step_where_r_tot_is_a_moving_average() -> None:
    groups = [make_group(rewards=rewards, prompt_id=rewards) for rewards in ("11", "10", "00")]
    batch = make_batch(groups=groups, step=10, r_tot=0.3)
    new, expert, stale = (replace(result, birth=10) for result in batch.results)
    expert = replace(expert, outcomes=bytes([Outcome.GRADED, Outcome.EXPERT]))  # 1 sampled, right
    batch = replace(batch, results=(new, expert, replace(stale, reason="stale")))
    report, config = UpdateReport(lr=1e-4, minibatches=(), num_tokens=0), learner_config(algorithm={"r_tot_decay": 0.9})
    row = metrics_row(batch, report, policy_version=9, config=config, seconds={})
    assert (row["reward_mean"], row["r_tot"]) == (1.0, 0.3)
    row = metrics_row(batch, report, policy_version=9, config=learner_config(), seconds={})
    assert (row["reward_mean"], "r_tot" in row) == (0.3, False)


def test_staleness_over_tokens_is_recorded_where_a_response_has_tokens_of_several_versions() -> None:
    group = make_group(rewards="10", lengths=[3, 1], version=6)
    spans, pairs = np.array([[2, 6], [1, 9], [1, 6]], np.int32), np.array([[6, 9], [6, 6]], np.int32)
    config = learner_config(algorithm={"batch_size": 4, "group_size": 2}, learner={"minibatch_size": 4})
    report = UpdateReport(lr=1e-4, minibatches=(result(1.0, 4),), num_tokens=4)
    for groups, want in ([group], None), ([replace(group, spans=spans, versions=pairs)], 13 / 4):
        row = metrics_row(make_batch(groups=groups, step=10), report, policy_version=9, config=config, seconds={})
        assert row.get("staleness_tokens_mean") == want  # 4 + 4 + 1 + 4 over 4 tokens
        assert row["staleness_x1_max"] == 4


def test_stored_rows_that_join_a_fresh_group_do_not_make_it_stale() -> None:
    config, telemetry = learner_config(), Telemetry(Process.LEARNER)
    versions = np.array([[9, 9], [8, 9], [2, 2]], np.int32)
    joined = replace(make_group(rewards="001", version=9), versions=versions)
    batch = make_batch(groups=[joined, make_group(prompt_id="q", version=6)], step=10)
    replay, plain = batch.entries
    batch = replace(batch, entries=(replace(replay, replayed=np.array([False, False, True])), plain))
    report = UpdateReport(lr=1e-4, minibatches=(), num_tokens=0)
    row = metrics_row(batch, report, policy_version=9, config=config, seconds={})
    assert (row["staleness_x1_mean"], row["staleness_x1_max"]) == (3.0, 4), "of versions 8 and 6"
    show(telemetry, batch, row, Diagnosis(), {}, config)
    assert telemetry.registry.get_sample_value("bapo_learner_staleness_max_steps", {"origin": "x1"}) == 4
    batch = replace(batch, entries=(replace(replay, replayed=np.array([False, False, False])),))
    row = metrics_row(batch, report, policy_version=9, config=config, seconds={})
    assert row["staleness_x1_max"] == 8, "a fresh row of version 2 breaks the contract"


TEXTS = {
    30: '<tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call>',
    31: ' <tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>',
    32: '<tool_call>{"name": "get", "arguments": {"key":',  # cut
    33: '<tool_call>{"arguments": {"name": "never"}, "name": "later"}</tool_call> {"name": "get"}',
    34: '<tool_call>{"name": "get <b>", "arguments": {}}</tool_call>',
    40: "get",
    41: '<tool_call>{"name": "get"}</tool_call>',
}


def decoded(token_ids: Sequence[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids)


def test_the_row_of_a_step_with_episodes_by_hand() -> None:
    """Of `episodes`: three turns with 4 context tokens and a fork, with 2 calls; and one turn, with 1."""
    batch = make_batch(groups=[episodes(), make_group()])
    found = episode_fields(list(episodes_of(batch)), decoded)
    assert found == {
        "num_episodes": 2,
        "episode_turns_mean": 2.0,
        "episode_context_tokens_mean": 2.0,
        "episode_forked_share": 0.5,
        "episode_calls_mean": {"get": 1.0, "calc": 0.5},
    }
    report = UpdateReport(lr=1e-4, minibatches=(), num_tokens=0)
    row = metrics_row(batch, report, policy_version=1, config=learner_config(), seconds={}, episodes=found)
    assert found.items() <= row.items()
    assert EpisodeReport("no model").fields(make_batch(groups=[make_group()])) == {}  # nothing is loaded for it


def test_calls_are_unknown_without_a_tokenizer_and_the_rest_is_known(caplog: pytest.LogCaptureFixture) -> None:
    found = EpisodeReport("/no/such/model").fields(make_batch(groups=[episodes()]))
    assert (found["episode_calls_mean"], found["episode_turns_mean"]) == (None, 2.0)
    assert "calls of tools are not counted" in caplog.text


def test_names_beyond_the_most_frequent_are_counted_together() -> None:
    def invented(token_ids: Sequence[int]) -> str:
        names = ["get", "get", *(f"tool-{number}" for number in range(MAX_TOOLS + 2))]
        return "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in names)

    group = replace(episodes(), **group_columns([next(sequences_of(episodes(), [1]))] * 2))
    found = calls_per_episode(list(sequences_of(group)), invented)
    assert len(found) == MAX_TOOLS + 1
    assert (found["get"], found["tool-0"], found["(others)"]) == (2.0, 1.0, 3.0)


def test_gauges_of_episodes_are_unknown_in_a_step_without_any() -> None:
    telemetry = Telemetry(Process.LEARNER)
    batch, report = make_batch(groups=[episodes()]), UpdateReport(lr=1e-4, minibatches=(), num_tokens=0)
    config, names = learner_config(), [*OF_EPISODES, "bapo_learner_episode_tool_calls"]
    for fields, want in (
        (
            episode_fields(list(episodes_of(batch)), decoded) | {"episode_masked_share": 0.25},
            [2.0, 2.0, 0.5, 0.25, 1.5],
        ),
        ({}, [math.nan] * 5),
    ):
        row = metrics_row(batch, report, policy_version=1, config=config, seconds={}, episodes=fields)
        show(telemetry, batch, row, Diagnosis(), {}, config)
        found = [telemetry.registry.get_sample_value(name) for name in names]
        np.testing.assert_array_equal(np.array(found, float), want)


def test_a_meter_adds_microbatches_and_divides_by_the_tokens_of_the_whole_minibatch() -> None:
    meter = Meter(ALONE)
    for loss, ratios, clipped in ((0.25, [0.5, 1.5], [0.0, 1.0]), (0.5, [3.0], [1.0])):
        losses = TokenLosses(
            surrogate_M=torch.zeros(len(ratios)),
            kl_M=torch.full((len(ratios),), 0.2),
            ratio_M=torch.tensor(ratios),
            clipped_M=torch.tensor(clipped),
        )
        meter.add(torch.tensor(loss), losses, torch.full((len(ratios),), 2.0))
    idle = TokenLosses(
        surrogate_M=torch.zeros(0), kl_M=torch.zeros(0), ratio_M=torch.zeros(0), clipped_M=torch.zeros(0)
    )
    meter.add(torch.tensor(0.0), idle, torch.zeros(0))
    found = meter.result(torch.tensor(7.0), num_tokens=9, num_active=4, stop=True, facts={})
    assert (found.loss, found.grad_norm, found.entropy, found.clip_ratio) == (0.75, 7.0, 1.5, 0.5)
    assert found.kl == pytest.approx(0.15)
    assert (found.ratio_max, found.stop) == (3.0, True)


def test_a_loss_that_is_not_a_number_is_reported_as_it_is() -> None:
    meter = Meter(ALONE)
    losses = TokenLosses(
        surrogate_M=torch.zeros(1), kl_M=torch.zeros(1), ratio_M=torch.ones(1), clipped_M=torch.zeros(1)
    )
    meter.add(torch.tensor(math.nan), losses, torch.zeros(1))
    assert math.isnan(meter.result(torch.tensor(1.0), num_tokens=1, num_active=1, stop=False, facts={}).loss)
