"""Distillation: the credit of each token by hand, what it refuses, and the way of the teacher's column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bapo.algorithms.filters import filtered_fresh
from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.batch_items import joined
from bapo.core.codec import frame_problem, pack_group, unpack_group
from bapo.core.errors import ConfigError, ContractError
from bapo.core.frames import frame_digest
from bapo.core.sequences import group_columns, sequences_of
from bapo.core.types import Group
from learner.advantages.base import load_advantage
from learner.advantages.of_batch import token_advantages
from learner.diagnostics.step_report import UpdateReport, metrics_row
from learner.update.step import step_inputs
from services.launcher.display.summary import distillation
from tests.support.factories import make_batch, make_group, make_stat
from tests.support.learner import learner_config

DISTILLED = {"loss": {"advantage": "distillation", "advantage_norm": "center", "kl_coef": 0.0, "entropy_coef": 0.0}}
START = [
    "--distillation.teacher=http://gpu:8000/v1",
    "--loss.advantage=distillation",
    "--loss.advantage_norm=center",
]


def taught(teacher: Sequence[float], rewards: str = "10", lengths: Sequence[int] = (1, 2)) -> Group:
    """Every token was sampled with log-prob -0.5."""
    return replace(make_group(rewards=rewards, lengths=lengths), teacher_logprobs=np.array(teacher, np.float32))


def credits(group: Group, **options: Any) -> list[float]:
    config = learner_config(loss={**DISTILLED["loss"], "advantage_options": options})
    return token_advantages(make_batch(groups=[group]), load_advantage(config.loss), config).tolist()


def test_a_token_is_credited_with_how_much_likelier_the_teacher_finds_it() -> None:
    assert credits(taught([-0.25, -0.5, -2.5])) == [0.25, 0.0, -2.0]


def test_weights_mix_the_teacher_with_the_reward_of_the_group() -> None:
    # 2 x the log-ratio, and 1 x (1 - 1/2) for the first response, 1 x (0 - 1/2) for the second
    assert credits(taught([-0.25, -0.5, -2.5]), teacher_weight=2.0, reward_weight=1.0) == [1.0, -0.5, -4.5]


def test_a_bound_holds_in_both_directions() -> None:
    assert credits(taught([0.0, -0.5, -2.5]), max_gap=0.25) == [0.25, 0.0, -0.25]


def test_groups_with_equal_rewards_train_in_the_learner() -> None:
    config = learner_config(**DISTILLED)
    inputs = step_inputs(make_batch(groups=[taught([-1.0, -0.5, -0.5], rewards="00")]), config, torch.device("cpu"))
    assert inputs.advantage_M.tolist() == [-0.5, 0.0, 0.0]
    assert inputs.active_R.tolist() == [True, False], "the second response has nothing to learn"


def test_groups_with_equal_rewards_pass_the_filter_of_the_shown_settings() -> None:
    config = load_config(["grpo"], START)
    (kept, _) = filtered_fresh(
        config.algorithm, (make_stat(rewards="00000000"), make_stat(rewards="11", prompt_id="q")), None
    )
    assert len(kept) == 2


def test_a_group_without_a_teacher_is_no_zero() -> None:
    with pytest.raises(ContractError, match="sampled without"):
        credits(make_group(rewards="10"))


# -- the column


def test_a_frame_carries_the_teachers_log_probs() -> None:
    group = taught([-0.25, -0.5, -2.5])
    frame = pack_group(group)
    found = unpack_group(frame)
    assert found.teacher_logprobs is not None
    assert found.teacher_logprobs.tolist() == [-0.25, -0.5, -2.5]
    assert frame_problem(frame, len(frame), frame_digest(frame)) == ""
    without = pack_group(make_group(rewards="10", lengths=(1, 2)))
    assert unpack_group(without).teacher_logprobs is None
    assert len(frame) == len(without) + 3 * 4


def test_a_frame_whose_column_is_missing_is_refused() -> None:
    frame = pack_group(taught([-0.25, -0.5, -2.5]))
    with pytest.raises(ContractError):
        unpack_group(frame[:-4])


@pytest.mark.parametrize("teacher", [[-1.0, -1.0], [-1.0, -1.0, float("nan")], [-1.0, -1.0, 0.5], [float("-inf")] * 3])
def test_what_no_teacher_can_say_is_refused(teacher: list[float]) -> None:
    with pytest.raises(ContractError, match="teacher"):
        taught(teacher)


def test_rows_of_a_group_keep_their_teacher() -> None:
    group = taught([-0.25, -0.5, -2.5])
    assert [row.teacher_logprobs.tolist() for row in sequences_of(group)] == [[-0.25], [-0.5, -2.5]]  # type: ignore[union-attr]
    parts = [(group, (1,)), (taught([-1.0, -2.0, -3.0]), (0,))]
    both = joined("item", parts).teacher_logprobs
    assert both is not None
    assert both.tolist() == [-0.5, -2.5, -1.0]
    mixed = [next(sequences_of(group)), next(sequences_of(make_group(rewards="10")))]
    assert group_columns(mixed)["teacher_logprobs"] is None


# -- what is measured


def test_the_row_of_a_step_has_the_mean_reverse_kl_per_token() -> None:
    config = learner_config(**DISTILLED)
    batch = make_batch(groups=[taught([-0.25, -0.5, -2.5]), taught([-0.5, -0.5, -0.5])])
    report = UpdateReport(lr=0.0, minibatches=(), num_tokens=6)
    row = metrics_row(batch, report, policy_version=1, config=config, seconds={})
    assert row["teacher_kl"] == pytest.approx((-0.25 + 2.0) / 6)
    plain = metrics_row(make_batch(), report, policy_version=1, config=config, seconds={})
    assert "teacher_kl" not in plain


def test_the_table_says_how_far_the_teacher_was_and_is() -> None:
    rows = [{"step": 1}, {"step": 2, "teacher_kl": 0.5}, {"step": 3, "teacher_kl": 0.125}]
    assert distillation(rows) == "reverse KL 0.5000 -> 0.1250 nats per token (steps 2 to 3)"
    assert distillation([{"step": 1}]) == ""


# -- what is refused


def test_the_shown_settings_are_accepted() -> None:
    config = load_config(["grpo"], START)
    assert config.distillation is not None
    assert config.distillation.teacher == "http://gpu:8000/v1"
    assert config.loss.advantage_options == {"teacher_weight": 1.0, "reward_weight": 0.0, "max_gap": None}


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("grpo", ["--loss.advantage_norm=pop_var"], "deviation of the rewards"),
        ("grpo", ["--algorithm.online_filter=range"], "online_filter = none"),
        ("grpo", ["--loss.advantage=group"], "does not learn from the teacher"),
        ("grpo", ["--rollout.temperature=0.7"], "compare two temperatures"),
        ("grpo", ["--algorithm.num_experts=1"], "expert's tokens"),
        ("grpo", ["--distillation.teacher=gpu:8000"], "http"),
        ("grpo", ["--agents.num_processes=1", "--rollout.engine=vllm"], "turns of an episode"),
        ("bapo", [], "chooses groups by their rewards"),
        ("dapo", ["--shaping.overlong_cache=8"], "chooses groups by their rewards"),
        ("arpo", [], "chooses groups by their rewards"),
        ("grpo", ["--loss.advantage_batch_norm=true"], "advantage_batch_norm"),
    ],
)
def test_what_would_not_learn_from_the_teacher_is_refused_by_name(
    preset: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([preset], [*START, *overrides])


def test_an_advantage_without_its_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"add \[distillation\] with teacher"):
        load_config(["grpo"], START[1:])


def test_a_run_without_distillation_has_no_teacher() -> None:
    assert Config().distillation is None
