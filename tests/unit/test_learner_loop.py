"""The loop in one process, with fakes for its neighbours: Algorithm 1's order, weight files, records, stopping."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from bapo.core.sequences import sequences_of
from bapo.core.types import Batch, Origin, WeightUpdate
from bapo.runtime.file_digest import digest_of
from learner.checkpoint import complete_steps
from learner.distributed.stopping import StopFlag, Stopped
from tests.support.learner import (
    FakeBuffer,
    FakeFleet,
    FakeRecords,
    learner_config,
    make_test_learner,
    random_batch,
    true_logprobs,
)
from tests.support.tiny_model import reference_logprobs

KEYS = {
    "step", "policy_version", "reward_mean", "c2", "c3", "x1", "x2", "x3", "batch_size", "num_bad", "num_high",
    "staleness_x1_mean", "staleness_x1_max", "staleness_x2_mean", "staleness_x2_max", "staleness_x3_mean",
    "staleness_x3_max", "loss", "grad_norm", "entropy", "clip_ratio", "kl", "ratio_max", "lr", "num_tokens",
    "num_updates", "wait_batch_s", "prox_s", "update_s", "diagnostics_s", "sync_s", "checkpoint_s", "step_s",
    "tokens_per_s", "time", "k1", "k2", "k2_on_grid", "k3", "tv_x1", "tv_x2", "tv_x3", "ess_x1", "ess_x2", "ess_x3",
    "delta_x1", "delta_x2", "delta_x3", "divergences", "bounds", "warning",
}  # fmt: skip


def batch_of(step: int) -> Batch:
    return random_batch(step=step, num_groups=4)


def test_the_order_of_a_run_is_that_of_algorithm_1(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(
        model_path,
        run={"num_steps": 5},
        cadence={"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": 0},
        checkpoint={"every": 3},
    )
    buffer, fleet = FakeBuffer(batch_of), FakeFleet()
    fleet.on_update = lambda update: buffer.told.append(("weights", update.version))
    make_test_learner(config, tmp_path, buffer=buffer, fleet=fleet).run(1)
    assert buffer.told == [
        ("weights", 1), ("progress", (1, 1)), ("batch", 1), ("commit", (1, 0)),
        ("weights", 2), ("progress", (2, 2)), ("batch", 2), ("commit", (2, 0)),
        ("progress", (3, 2)), ("batch", 3), ("commit", (3, 3)),
        ("weights", 4), ("progress", (4, 4)), ("batch", 4), ("commit", (4, 3)),
        ("progress", (5, 4)), ("batch", 5), ("commit", (5, 5)),
        ("weights", 6), ("progress", (6, 6)),
    ]  # fmt: skip


def test_a_buffer_that_runs_full_gets_its_checkpoint_before_it_is_due(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, run={"num_steps": 4}, checkpoint={"every": 4})
    buffer = FakeBuffer(batch_of, wants_checkpoint_at=frozenset({2}))
    learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet())
    learner.run(1)
    assert [what for name, what in buffer.told if name == "commit"] == [(1, 0), (2, 0), (2, 2), (3, 2), (4, 4)]
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert learner.checkpoints.newest == 4
    assert isinstance(learner.records, FakeRecords)
    assert learner.records.durable == [[1, 2], [3, 4]]


def test_a_batch_whose_frames_were_all_bad_is_a_step_that_changes_nothing(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, run={"num_steps": 1})
    buffer, fleet = FakeBuffer(lambda step: replace(batch_of(step), entries=())), FakeFleet()
    learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=fleet)
    learner.run(1)
    assert isinstance(learner.records, FakeRecords)
    assert [(row["step"], row["num_tokens"], row["num_updates"]) for row in learner.records.rows] == [(1, 0, 0)]
    assert ("commit", (1, 1)) in buffer.told
    assert fleet.updates[0].digest == fleet.updates[-1].digest


def test_workers_get_files_with_hugging_face_names_a_digest_and_a_canary(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path)
    seen: list[dict[str, Any]] = []
    fleet = FakeFleet()

    def look(update: WeightUpdate) -> None:
        path = Path(update.path)
        assert digest_of(path) == update.digest
        assert path.stat().st_size == update.num_bytes
        assert path.stat().st_mode & 0o444 == 0o444
        seen.append(load_file(path))

    fleet.on_update = look
    make_test_learner(config, tmp_path, buffer=FakeBuffer(batch_of), fleet=fleet).run(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert seen[0].keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(seen[0][name], parameter.detach().numpy())
    for update, tensors in zip(fleet.updates, seen, strict=True):
        model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
        want = reference_logprobs(model, list(update.canary.token_ids)).numpy()
        np.testing.assert_allclose(update.canary.logprobs, want, atol=1e-5)
    tokens = {update.canary.token_ids for update in fleet.updates}
    assert len(tokens) == 1, "the same sequence for the whole run"
    gap = np.abs(np.subtract(fleet.updates[0].canary.logprobs, fleet.updates[-1].canary.logprobs)).max()
    assert gap > fleet.updates[0].canary.tolerance, "stale weights would be noticed"


def test_bfloat16_engines_get_bfloat16_files_and_a_wider_canary(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, model={"dtype": "bfloat16"}, run={"num_steps": 1})
    fleet = FakeFleet()
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(batch_of), fleet=fleet)
    learner.run(1)
    first, last = fleet.updates
    # 88,384 parameters: two bytes each instead of four, and a header.
    assert 2 * 88_384 < last.num_bytes < 2.1 * 88_384
    assert first.canary.tolerance == 0.5
    assert {parameter.dtype for parameter in learner.policy.parameters()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    got = reference_logprobs(model, list(first.canary.token_ids)).numpy()
    assert np.abs(got - first.canary.logprobs).max() < first.canary.tolerance


def test_every_step_leaves_one_row_with_all_keys_and_the_results_of_its_groups(
    model_path: Path, tmp_path: Path
) -> None:
    config = learner_config(model_path, cadence={"weight_sync_interval": 2, "reevaluation_interval": 2})
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(batch_of), fleet=FakeFleet())
    learner.run(1)
    records = learner.records
    assert isinstance(records, FakeRecords)
    assert [row["step"] for row in records.rows] == [1, 2, 3, 4]
    row = records.rows[2]
    assert row.keys() >= KEYS
    # Step 3 runs on version 2; its groups were made by version 1. Of 4 groups, 2 are x1.
    assert (row["policy_version"], row["x1"], row["x2"], row["x3"], row["staleness_x1_max"]) == (2, 2, 1, 1, 2)
    assert row["num_tokens"] == sum(len(entry.group.token_ids) for entry in batch_of(3).entries)
    assert row["step_s"] >= row["update_s"] + row["prox_s"] + row["wait_batch_s"] > 0
    assert [result.group_id for result in records.groups[3]] == [f"g-3-{i}" for i in range(4)]
    shown = learner.telemetry.exposition().decode()
    assert "bapo_learner_step 4.0" in shown
    assert "bapo_learner_steps_total 4.0" in shown
    assert 'bapo_learner_phase_seconds_count{phase="step"} 4.0' in shown
    # Versions 1, 2 and 4; the final one belongs to no step, and step 3 did not sync in 0 s.
    assert 'bapo_learner_phase_seconds_count{phase="sync"} 3.0' in shown
    assert 'bapo_sync_duration_seconds_count{phase="send"} 3.0' in shown


def test_the_row_of_a_step_says_how_far_the_policy_is_from_those_that_sampled(model_path: Path, tmp_path: Path) -> None:
    """Token by token with plain forward passes of the base model, which is theta_1."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    batch = random_batch(model, num_groups=4)
    config = learner_config(model_path, run={"num_steps": 1}, diagnostics={"tv_warn": 0.01})
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(lambda step: batch), fleet=FakeFleet())
    learner.run(1)
    assert isinstance(learner.records, FakeRecords)
    (row,) = learner.records.rows
    distances, weights = [], []
    for entry in batch.entries:
        for response in sequences_of(entry.group) if entry.origin is Origin.X1 else ():
            logp = true_logprobs(model, entry.group.prompt_token_ids, response.token_ids)
            distances += [abs(math.exp(p - a) - 1) / 2 for p, a in zip(logp, response.rollout_logprobs, strict=True)]
            weights.append(math.exp(sum(logp) - sum(response.rollout_logprobs.astype(float))))
    assert row["tv_x1"] == pytest.approx(sum(distances) / len(distances), abs=1e-5)
    assert row["ess_x1"] == pytest.approx(sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)), abs=1e-4)
    # G = 4: the worst group has mu = 1/4, so sigma^2 = 3/16 (and 1e-6).
    assert row["k1"] == pytest.approx(1 / math.sqrt(3 / 16) - 1, abs=1e-5)
    assert {(cell["origin"], cell["num_groups"]) for cell in row["divergences"] if cell["policy"] == "theta_t"} == {
        ("x1", 2), ("x2", 1), ("x3", 1),
    }  # fmt: skip
    # Two groups of X1, 8 responses, are too few to warn of.
    assert row["warning"] is None
    shown = learner.telemetry.exposition().decode()
    assert f'bapo_learner_tv_distance_ratio{{kind="token",origin="x1"}} {row["divergences"][0]["tv_tok"]}' in shown


def test_an_empty_batch_is_recorded_with_nulls_and_the_run_goes_on(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, run={"num_steps": 2})
    buffer = FakeBuffer(lambda step: random_batch(step=step, num_groups=0 if step == 1 else 3))
    learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet())
    learner.run(1)
    assert isinstance(learner.records, FakeRecords)
    first, second = learner.records.rows
    assert (first["loss"], first["num_tokens"], first["num_updates"], first["staleness_x1_max"]) == (None, 0, 0, None)
    assert second["loss"] is not None


def stopping_buffer(action: Callable[[int], None]) -> FakeBuffer:
    def make(step: int) -> Batch:
        action(step)
        return batch_of(step)

    return FakeBuffer(make)


def test_a_signal_while_waiting_for_a_batch_ends_the_wait_at_once(model_path: Path, tmp_path: Path) -> None:
    config, stop = learner_config(model_path), StopFlag()
    previous = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop.install()
    try:
        buffer = stopping_buffer(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None)
        learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet(), stop=stop)
        with pytest.raises(Stopped):
            learner.run(1)
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])
    assert ("commit", (2, 2)) not in buffer.told
