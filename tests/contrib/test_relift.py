"""Cross-entropy on what a composer emits as entries of kind sft."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bapo.core.errors import ConfigError
from learner.update.step import step_inputs
from tests.support.learner import CPU, learner_config, make_updater, random_batch, tiny_policy, with_supervised


def test_entries_of_kind_sft_are_trained_by_cross_entropy_and_by_nothing_else(model_path: Path, tmp_path: Path) -> None:
    relift = {"composer": "relift", "options": {"sft_lr": 1e-3, "sft_entropy_coef": 0.0}}
    config = learner_config(model_path, algorithm=relift, learner={"lr": 1e-9})
    policy, batch = tiny_policy(config), with_supervised(random_batch(), 1, 4)
    updater = make_updater(config, policy, tmp_path)
    with torch.no_grad():
        step = step_inputs(batch, config, CPU)
        assert sorted(group for groups in step.plan for group in groups) == [0, 2, 3, 5, 6, 7]
        responses = step.columns.responses_of([1, 4])
        logprobs = updater.passes.evaluate(lambda micro: policy(micro)[0], step, responses)
    want = -float(logprobs.sum()) / float(step.columns.lengths_R[responses].sum())
    first = updater.run(batch).facts["supervised_loss"]
    assert first == pytest.approx(want, rel=1e-4)
    for number in range(2, 8):
        last = updater.run(dataclasses.replace(batch, step=number)).facts["supervised_loss"]
    assert last < 0.8 * first


def test_entries_that_nothing_trains_are_refused(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path)
    batch = with_supervised(random_batch(), 1)
    with pytest.raises(ConfigError, match="nothing trains them"):
        make_updater(config, tiny_policy(config), tmp_path).run(batch)


def test_a_batch_of_supervised_entries_alone_has_no_policy_update(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, algorithm={"composer": "relift"})
    batch = with_supervised(random_batch(num_groups=2), 0, 1)
    report = make_updater(config, tiny_policy(config), tmp_path).run(batch)
    assert (report.minibatches, sorted(report.facts)) == ((), ["supervised_loss"])
