"""`python -m learner.replay --config RUN/config.toml --run-dir RUN --step N`: repeat a step without any rollout worker.

    checkpoint before N (or the base model) --batches since, as they were kept--> theta_N --batch N--> theta_{N+1}

Every step that is redone is compared with its row of metrics.jsonl, and the weights with the checkpoint of step N where
there is one. On the CPU, with as many threads and one rank, all of it is equal to the last bit. Nothing in the run
directory is changed, but for token records when they are asked for.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from bapo.config.tree import Config
from bapo.errors import ConfigError, DivergenceError
from bapo.process import Flags, run_process
from bapo.records import RunDirectory
from bapo.telemetry import Telemetry
from bapo.types import Fate
from bapo.whatif.replayable import ReplayPlan, plan_replay, plan_replay_of
from bapo.wire import unpack_batch
from learner.checkpoint import open_checkpoint
from learner.diagnostics import Stopwatch
from learner.distributed import World, pick_device
from learner.loop import Learner
from learner.rank import make_learner
from learner.replay_text import RepeatedStep, Replay, as_json, as_text
from learner.resume import load_state
from learner.stopping import StopFlag
from learner.token_records import TokenRecorder
from learner.weights import gather_weights

log = logging.getLogger("learner.replay")

RECORDS_S = 600.0
"""Longest wait for token records that were asked for."""


def main(flags: Flags) -> None:
    """Repeat, compare and print."""
    if (flags.extra.step is None) == (flags.extra.frame is None):
        raise ConfigError("name the step with --step N, or a batch with --frame FILE")
    plan = (
        plan_replay_of(flags.run, flags.extra.frame) if flags.extra.frame else plan_replay(flags.run, flags.extra.step)
    )
    disable_progress_bar()
    torch.set_num_threads(flags.config.learner.num_threads)
    found = replay(flags, plan, token_records=flags.extra.token_records)
    sys.stdout.write((as_json(found) if flags.extra.json else as_text(found, flags.config)) + "\n")


def replay(flags: Flags, plan: ReplayPlan, *, token_records: bool = False) -> Replay:
    """Redo the steps of a plan. Raises: DivergenceError when one of them diverges (again).

    Args:
        token_records: write them into the run, for the steps that are repeated.
    """
    if token_records:
        flags = replace(flags, config=_recording_every_step(flags.config))
    with tempfile.TemporaryDirectory(prefix="bapo-replay-") as scratch:
        learner = _learner_at(flags, plan.start, Path(scratch))
        if token_records:
            learner.token_records = TokenRecorder(flags.config, flags.run.token_files)
        recorded = {row["step"]: row for row in flags.run.read_metrics()}
        try:
            steps = tuple(_repeat(learner, frame, recorded) for frame in plan.frames)
        except DivergenceError as error:
            # The learner wrote the batch where it was told to keep its files, which goes away with the replay.
            message = str(error).replace(scratch, str(flags.run.path))
            raise DivergenceError(f"in the replay from step {plan.start} on: {message}") from error
        finally:
            if learner.token_records is not None:
                learner.token_records.close(RECORDS_S)
    return Replay(
        run=flags.run.name,
        start=plan.start,
        steps=steps,
        weights_differ_by=_weights_difference(learner, flags.run, plan.step),
    )


def _learner_at(flags: Flags, step: int, scratch: Path) -> Learner:
    """All parts of a learner that has no neighbours, behind `step`; what it would write goes to `scratch`."""
    checkpoint = open_checkpoint(flags.run.path / "checkpoints", step) if step else None
    alone = replace(flags, run=RunDirectory(scratch), extra=argparse.Namespace(resume=False))
    world = World(rank=0, size=1, device=pick_device(flags.config.learner.device))
    learner = make_learner(alone, world, StopFlag(), Telemetry(), None, checkpoint)
    if checkpoint:
        load_state(learner, checkpoint)
    return learner


def _repeat(learner: Learner, frame: Path, recorded: Mapping[int, Mapping[str, Any]]) -> RepeatedStep:
    batch = unpack_batch(frame.read_bytes())
    log.info("step %d: %d groups from %s", batch.step, len(batch.entries), frame)
    watch = Stopwatch()
    with watch.phase("step"):
        report = learner.updater.run(batch)
    # The learner's own way to a row, so that a replay has every value that the run has.
    rows = OnlyRows()
    learner.records = rows
    learner.record(batch, report, watch)
    return RepeatedStep(
        step=batch.step, row=rows.newest, recorded=recorded.get(batch.step), minibatches=report.minibatches
    )


class OnlyRows:
    """Records that keep the newest row of metrics and write nothing."""

    def __init__(self) -> None:
        self.newest: Mapping[str, Any] = {}

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        # As it would be read back: a tuple is a list there.
        self.newest = json.loads(json.dumps(row))

    def write_groups(self, step: int, fates: Sequence[Fate]) -> None:
        return

    def make_durable(self, steps: Iterable[int]) -> None:
        return

    def write_batch(self, step: int, frame: bytes | memoryview) -> None:
        return

    def forget_batches(self, through: int) -> None:
        return


def _recording_every_step(config: Config) -> Config:
    """The run's configuration, but for what is measured beside the training: the numbers stay the same."""
    return config.model_copy(update={"diagnostics": config.diagnostics.model_copy(update={"token_records": 1})})


def _weights_difference(learner: Learner, run: RunDirectory, step: int) -> float | None:
    """Largest difference of any weight from the checkpoint of `step`; None without one."""
    path = run.checkpoint_dir(step) / "hf" / "model.safetensors"
    if step not in run.checkpoint_steps():
        return None
    stored, mine = load_file(path), gather_weights(learner.policy, torch.float32)
    return max(float((mine[name] - stored[name]).abs().max()) for name in stored)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, help="the step to repeat")
    parser.add_argument("--frame", type=Path, help="a batch to repeat, for example RUN/diverged/step-000012.frame")
    parser.add_argument("--token-records", action="store_true", help="write RUN/token_records of these steps")
    parser.add_argument("--json", action="store_true", help="for programs")


if __name__ == "__main__":
    run_process("learner.replay", main, add_flags=_add_flags)
