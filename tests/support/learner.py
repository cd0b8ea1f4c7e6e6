"""What tests of the learner share: small configs, batches with true log-probs, and fakes of its neighbours."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bapo.algorithms.methods import LOSS
from bapo.config.tree import Config
from bapo.core.codec import pack_batch
from bapo.core.errors import ContractError
from bapo.core.types import (
    Batch,
    BatchEntry,
    Group,
    GroupResult,
    Origin,
    Outcome,
    Progress,
    WeightTransfer,
    WeightUpdate,
)  # fmt: skip
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.process import Flags
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.rollout_client import WorkerStatus
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World
from learner.loop import Learner
from learner.losses.base import PolicyLoss
from learner.model.policy import Policy, load_policy
from learner.startup import Peers, make_learner
from learner.update.update import Updater
from tests.support.factories import make_batch, make_group
from tests.support.tiny_model import VOCAB_SIZE, reference_logprobs

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)

torch.set_num_threads(1)


def learner_config(path: Path | str = "model", **sections: Mapping[str, Any]) -> Config:
    """A config for a handful of groups; keywords override sections."""
    values: dict[str, dict[str, Any]] = {
        "run": {"num_steps": 4, "seed": 7},
        "model": {"path": str(path)},
        "algorithm": {"batch_size": 8, "group_size": 4},
        "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 2},
        "rollout": {"max_prompt_tokens": 12, "max_response_tokens": 24},
        "learner": {
            "lr": 1e-3,
            "warmup_steps": 0,
            "minibatch_size": 3,
            "microbatch_tokens": 128,
            "logprob_chunk_tokens": 16,
            "device": "cpu",
            "port": 0,
        },
        "checkpoint": {"every": 2, "keep_last": 2, "background": False},
        "diagnostics": {"texts": 0},
    }
    for section, fields in sections.items():
        values.setdefault(section, {}).update(fields)
    return Config.model_validate(values)


def random_group(
    model: PreTrainedModel | None, rng: np.random.Generator, *, name: str, group_size: int = 4, version: int = 1
) -> Group:
    """Random tokens and mixed rewards; rollout log-probs are those of `model` with a little noise."""
    lengths = rng.integers(1, 24, size=group_size)
    prompt = rng.integers(4, VOCAB_SIZE, size=int(rng.integers(1, 12))).astype(np.int32)
    tokens = rng.integers(4, VOCAB_SIZE, size=int(lengths.sum())).astype(np.int32)
    rewards = [float(i < 1 + int(rng.integers(group_size - 1))) for i in range(group_size)]
    group = make_group(rewards=rewards, prompt_id=name, version=version, lengths=lengths.tolist())
    logprobs = rng.uniform(-3.0, -0.1, size=len(tokens))
    if model is not None:
        exact = [true_logprobs(model, prompt, part) for part in np.split(tokens, np.cumsum(lengths)[:-1])]
        logprobs = np.concatenate(exact) + rng.normal(0, 0.1, size=len(tokens))
    return _with_tokens(group, prompt, tokens, logprobs.astype(np.float32))


def true_logprobs(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """[T] log-probs of a response by a plain forward pass of one sequence."""
    whole = reference_logprobs(model, [*prompt.tolist(), *response.tolist()])
    return whole[len(prompt) - 1 :].double().numpy()


def _with_tokens(group: Group, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> Group:
    return dataclasses.replace(group, prompt_token_ids=prompt, token_ids=tokens, rollout_logprobs=logprobs)


def random_batch(
    model: PreTrainedModel | None = None, *, num_groups: int = 8, step: int = 1, seed: int = 0, version: int = 1
) -> Batch:
    """Groups of all three origins, in turn."""
    rng = np.random.default_rng(1000 * seed + step)
    groups = [random_group(model, rng, name=f"{step}-{i}", version=version) for i in range(num_groups)]
    return make_batch(groups=groups, origins=[list(Origin)[i % 3] for i in range(num_groups)], step=step)


def with_groups(batch: Batch, groups: Sequence[Group], origin: Origin, step: int) -> Batch:
    """Another step's batch that holds these groups."""
    entries = tuple(BatchEntry(origin=origin, group=group) for group in groups)
    return dataclasses.replace(batch, step=step, entries=entries)


def loss_settings(name: str) -> dict[str, Any]:
    """The least that a registered loss needs beside its name."""
    fields: dict[str, Any] = {"name": name, "kl_coef": 0.0}
    loss: type[PolicyLoss] = LOSS.find(name)
    if not loss.takes_weight:
        fields["importance_level"] = "none"
    if "decoupled" not in loss.ratio_modes:
        fields["ratio_mode"] = loss.ratio_modes[0]
    return fields


def with_experts(batch: Batch) -> Batch:
    """The last row of every second group is an expert's, and the first of every third was sampled before."""
    entries = []
    for number, entry in enumerate(batch.entries):
        group, size = entry.group, entry.group.size
        if number % 2 == 0:
            logprobs = group.rollout_logprobs.copy()
            logprobs[-int(group.lengths[-1]) :] = 0.0
            outcomes = np.array([Outcome.GRADED] * (size - 1) + [Outcome.EXPERT], dtype=np.uint8)
            group = dataclasses.replace(group, rollout_logprobs=logprobs, outcomes=outcomes)
        replayed = np.arange(size) < (number % 3 == 0)
        entries.append(BatchEntry(origin=entry.origin, group=group, replayed=replayed))
    return dataclasses.replace(batch, entries=tuple(entries))


def with_strangers(batch: Batch, *numbers: int) -> Batch:
    """In these groups one token of the first row was much likelier for who sampled it, one of the third much less."""
    entries = list(batch.entries)
    for number in numbers:
        group = entries[number].group
        logprobs, starts = group.rollout_logprobs.copy(), np.cumsum(group.lengths) - group.lengths
        logprobs[starts[0]] /= 2
        logprobs[starts[2]] *= 2
        group = dataclasses.replace(group, rollout_logprobs=logprobs)
        entries[number] = dataclasses.replace(entries[number], group=group)
    return dataclasses.replace(batch, entries=tuple(entries))


def with_truncated(batch: Batch) -> Batch:
    """The second row of every second group reached the limit."""
    entries = list(batch.entries)
    for number in range(0, len(entries), 2):
        group = entries[number].group
        outcomes = group.outcomes.copy()
        outcomes[1] = Outcome.TRUNCATED
        group = dataclasses.replace(group, outcomes=outcomes)
        entries[number] = dataclasses.replace(entries[number], group=group)
    return dataclasses.replace(batch, entries=tuple(entries))


def with_one_token(batch: Batch, every: int) -> Batch:
    """Every `every`-th response ends after its first token, and every other group has a prompt of one token."""
    entries = []
    for number, entry in enumerate(batch.entries):
        group = entry.group
        ends = np.cumsum(group.lengths)
        lengths = np.where(np.arange(group.size) % every == 0, 1, group.lengths).astype(np.int32)
        kept = np.concatenate(
            [np.arange(end - old, end)[:new] for end, old, new in zip(ends, group.lengths, lengths, strict=True)]
        )
        group = dataclasses.replace(
            group,
            prompt_token_ids=group.prompt_token_ids[:1] if number % 2 else group.prompt_token_ids,
            token_ids=group.token_ids[kept],
            rollout_logprobs=group.rollout_logprobs[kept],
            lengths=lengths,
        )
        entries.append(dataclasses.replace(entry, group=group))
    return dataclasses.replace(batch, entries=tuple(entries))


def with_supervised(batch: Batch, *numbers: int) -> Batch:
    """These entries become of kind sft, with an expert's only response."""
    entries = list(batch.entries)
    for number in numbers:
        group = entries[number].group
        length = int(group.lengths[0])
        group = dataclasses.replace(
            group,
            token_ids=group.token_ids[:length],
            rollout_logprobs=np.zeros(length, np.float32),
            lengths=group.lengths[:1],
            rewards=np.ones(1, np.float32),
            outcomes=np.array([Outcome.EXPERT], np.uint8),
            versions=group.versions[:1],
        )
        entries[number] = BatchEntry(origin=entries[number].origin, group=group, kind="sft")
    return dataclasses.replace(batch, entries=tuple(entries))


def make_updater(config: Config, policy: Policy, run_path: Path, world: World = ALONE) -> Updater:
    """Nobody stops it."""
    return Updater(config=config, policy=policy, world=world, stop=StopFlag(), run_path=run_path)


def tiny_policy(config: Config) -> Policy:
    """The model of the config on the CPU."""
    return load_policy(config.model.path, config, ALONE)


@dataclass
class FakeBuffer:
    """Hands out batches made by a function of the step; notes what it is told."""

    make: Callable[[int], Batch]
    told: list[tuple[str, Any]] = field(default_factory=list)
    wants_checkpoint_at: frozenset[int] = frozenset()
    not_trained: dict[int, list[Group]] = field(default_factory=dict)
    lost: bool = False
    """The buffer holds nothing: a learner must restore a snapshot."""

    def wait_ready(self, timeout_s: float) -> None:
        return

    def batch_frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        self.told.append(("batch", step))
        return pack_batch(self.make(step))

    def untrained(self, step: int) -> list[Group]:
        return list(self.not_trained.get(step, ()))

    def commit(self, step: int, *, checkpointed: int) -> bool:
        self.told.append(("commit", (step, checkpointed)))
        return step in self.wants_checkpoint_at and checkpointed < step

    def report_progress(self, progress: Progress) -> None:
        self.told.append(("progress", (progress.step, progress.policy_version)))

    def snapshot(self) -> bytes:
        return b"snapshot of the buffer"

    def restore(self, data: bytes) -> None:
        self.lost = False
        self.told.append(("restore", data))

    def resume(self, step: int) -> None:
        self.told.append(("resume", step))
        if self.lost:
            raise ContractError(f"batches after {step} are not retained")


@dataclass
class FakeFleet:
    """Reads each weight file as a worker would, and keeps the updates."""

    updates: list[WeightUpdate] = field(default_factory=list)
    rollbacks: list[bool] = field(default_factory=list)
    on_update: Callable[[WeightUpdate], None] = lambda update: None

    def wait_ready(self, timeout_s: float) -> None:
        return

    def update_weights(self, update: WeightUpdate, *, timeout_s: float, rollback: bool = False) -> dict[str, float]:
        self.updates.append(update)
        self.rollbacks.append(rollback)
        self.on_update(update)
        return {"worker-0": 0.01}

    def workers(self) -> list[WorkerStatus]:
        return []

    def transfer_weights(self, transfer: WeightTransfer, *, timeout_s: float) -> dict[str, float]:
        raise AssertionError("no worker is ready")


@dataclass
class FakeRecords:
    """Keeps rows in memory."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[int, list[GroupResult]] = field(default_factory=dict)
    batches: dict[int, bytes] = field(default_factory=dict)
    durable: list[list[int]] = field(default_factory=list)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def write_groups(self, step: int, results: Sequence[GroupResult]) -> None:
        self.groups[step] = list(results)

    def make_durable(self, steps: Iterable[int]) -> None:
        self.durable.append(list(steps))

    def write_batch(self, step: int, frame: bytes) -> None:
        self.batches[step] = frame

    def forget_batches(self, through: int) -> None:
        self.batches = {step: frame for step, frame in self.batches.items() if step > through}


def make_test_learner(
    config: Config,
    run_path: Path,
    *,
    buffer: FakeBuffer,
    fleet: FakeFleet,
    resume: bool = False,
    stop: StopFlag | None = None,
    world: World = ALONE,
) -> Learner:
    """The parts as `__main__` joins them, with fakes for the neighbours; records are a FakeRecords."""
    flags = Flags(
        config=config,
        run=RunDirectory(run_path),
        extra=argparse.Namespace(buffer_url="http://unused:1", rollout_url="http://unused:1", resume=resume),
    )
    peers = Peers(buffer=buffer, fleet=fleet) if world.leads else None
    learner = make_learner(flags, world, stop or StopFlag(), Telemetry(), peers)
    learner.records = FakeRecords()
    return learner
