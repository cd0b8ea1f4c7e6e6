"""`python -m learner.replay --config RUN/config.toml --run-dir RUN --step N`: replay a step without rollout workers.

    checkpoint before N (or the base model) --recorded batches since--> theta_N --batch N--> theta_{N+1}

Every replayed step is compared with its row of metrics.jsonl, and the weights with the checkpoint of step N if there is
one. On the CPU with one rank and the same number of threads, results are bitwise identical. The run directory is not
changed, except for token records on request.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from bapo.config.learner import LearnerConfig
from bapo.config.tree import Config
from bapo.core.codec import unpack_batch
from bapo.core.errors import ConfigError, DivergenceError
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.process import Flags, run_process
from bapo.runtime.progress import progress
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.replayable import ReplayPlan, plan_replay, plan_replay_of
from learner.checkpoint import open_checkpoint
from learner.diagnostics.response_recorder import ResponseRecorder
from learner.diagnostics.step_report import MinibatchResult, Stopwatch
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World, pick_device
from learner.loop import Learner
from learner.publish_weights import gather_weights
from learner.stale_tokens import with_stale_as_context
from learner.startup import make_learner

log = logging.getLogger("learner.replay")

RECORDS_S = 600.0
"""Maximum wait for requested token records."""


def main(flags: Flags) -> None:
    """Replay, compare and print."""
    if (flags.extra.step is None) == (flags.extra.frame is None):
        raise ConfigError("pass a step with --step N, or a batch with --frame FILE")
    plan = (
        plan_replay_of(flags.run, flags.extra.frame) if flags.extra.frame else plan_replay(flags.run, flags.extra.step)
    )
    disable_progress_bar()
    torch.set_num_threads(flags.config.learner.num_threads)
    with progress(f"replaying step {plan.step} of {flags.run.name}"):
        found = replay(flags, plan, token_records=flags.extra.token_records)
    sys.stdout.write((as_json(found) if flags.extra.json else as_text(found, flags.config.learner)) + "\n")


def replay(flags: Flags, plan: ReplayPlan, *, token_records: bool = False) -> Replay:
    """Replay the steps of a plan. Raises: DivergenceError if one of them diverges (again).

    Args:
        token_records: write them into the run, for the replayed steps.
    """
    if token_records:
        flags = replace(flags, config=_recording_every_step(flags.config))
    with tempfile.TemporaryDirectory(prefix="bapo-replay-") as scratch:
        learner = _learner_at(flags, plan.start, Path(scratch))
        if token_records:
            learner.token_records = ResponseRecorder(flags.config, flags.run.token_files)
        recorded = {row["step"]: row for row in flags.run.read_metrics()}
        try:
            steps = tuple(_repeat(learner, RunDirectory(Path(scratch)), frame, recorded) for frame in plan.frames)
        except DivergenceError as error:
            # The learner wrote the batch into its scratch folder, which is removed after the replay.
            message = str(error).replace(scratch, str(flags.run.path))
            raise DivergenceError(f"in the replay from step {plan.start}: {message}") from error
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
    """A learner without services after `step`; it writes to `scratch`."""
    checkpoint = open_checkpoint(flags.run.path / "checkpoints", step) if step else None
    alone = replace(flags, run=RunDirectory(scratch), extra=argparse.Namespace(resume=False))
    world = World(rank=0, size=1, device=pick_device(flags.config.learner.device))
    learner = make_learner(alone, world, StopFlag(), Telemetry(), None, images=flags.run.images)
    if checkpoint:
        checkpoint.require_adapter_of(flags.config.model)
        checkpoint.load(learner.updater)
    return learner


def _repeat(
    learner: Learner, scratch: RunDirectory, frame: Path, recorded: Mapping[int, Mapping[str, Any]]
) -> RepeatedStep:
    sampled = unpack_batch(frame.read_bytes())
    batch = with_stale_as_context(sampled, learner.config)
    log.info("step %d: %d groups from %s", batch.step, len(batch.entries), frame)
    watch = Stopwatch()
    with watch.phase("step"):
        report = learner.updater.run(batch)
    # Uses the learner's code for rows, so that a replay has every value of the run.
    learner.record(batch, report, watch, sampled)
    row = scratch.read_metrics()[-1]
    return RepeatedStep(step=batch.step, row=row, recorded=recorded.get(batch.step), minibatches=report.minibatches)


def _recording_every_step(config: Config) -> Config:
    """The run's config with token records in every step, which do not affect results."""
    return config.model_copy(update={"diagnostics": config.diagnostics.model_copy(update={"token_records": 1})})


def _weights_difference(learner: Learner, run: RunDirectory, step: int) -> float | None:
    """Largest difference of any weight from the checkpoint of `step`; None if there is none."""
    if step not in run.checkpoint_steps():
        return None
    stored = open_checkpoint(run.path / "checkpoints", step).weights
    mine = gather_weights(learner.policy, torch.float32)
    return max(float((mine[name] - other).abs().max()) for piece in stored.whole() for name, other in piece.items())


NOT_COMPARED = ("time", "tokens_per_s", "mfu", "mfu_update", "policy_version")
"""Fields that depend on the clock or on the workers, in addition to those ending in _s."""
SHOWN = ("loss", "grad_norm", "entropy", "clip_ratio", "kl", "ratio_max", "num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value that differs between run and replay."""

    name: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """One replayed step."""

    step: int
    row: Mapping[str, Any]
    """Row of the replay."""
    recorded: Mapping[str, Any] | None
    """Row of the run; None if it was never written, as for a diverged step."""
    minibatches: Sequence[MinibatchResult]

    @property
    def compared(self) -> list[str]:
        """Fields that are in both rows and should be equal."""
        both = [name for name in self.row if self.recorded is not None and name in self.recorded]
        return [name for name in both if name not in NOT_COMPARED and not name.endswith("_s")]

    @property
    def differences(self) -> list[Difference]:
        """Fields that are not bitwise equal."""
        recorded = self.recorded or {}
        pairs = ((name, recorded[name], self.row[name]) for name in self.compared)
        return [
            Difference(name=name, recorded=then, replayed=now) for name, then, now in pairs if not _equal(then, now)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The replayed steps; the requested one is last."""

    run: str
    start: int
    steps: Sequence[RepeatedStep]
    weights_differ_by: float | None
    """Largest difference of any weight from the checkpoint of the last step; None if there is none."""

    @property
    def exact(self) -> bool:
        """Whether everything that could be compared is bitwise equal."""
        return not any(step.differences for step in self.steps) and not self.weights_differ_by


def as_json(found: Replay) -> str:
    """The replay as a JSON document."""
    steps = [
        {
            "step": step.step,
            "compared": len(step.compared),
            "differences": [asdict(difference) for difference in step.differences],
            "row": dict(step.row),
            "minibatches": [asdict(result) for result in step.minibatches],
        }
        for step in found.steps
    ]
    document = {"run": found.run, "start": found.start, "exact": found.exact, "steps": steps}
    return json.dumps({**document, "weights_differ_by": found.weights_differ_by}, indent=2)


def as_text(found: Replay, learner: LearnerConfig) -> str:
    """The requested step in full, earlier ones in one line each."""
    return "\n".join(_lines(found, learner))


def _lines(found: Replay, learner: LearnerConfig) -> Iterator[str]:
    last = found.steps[-1]
    origin = f"the checkpoint of step {found.start}" if found.start else "the base model"
    yield f"run {found.run}, step {last.step}, replayed from {origin} with recorded batches of {len(found.steps)} steps"
    yield from (_line(step) for step in found.steps[:-1])
    yield ""
    yield f"{'':<16}{'recorded':>16}{'replayed':>16}{'difference':>14}"
    recorded = last.recorded or {}
    numbers = [value.name for value in last.differences if isinstance(value.replayed, int | float)]
    for name in dict.fromkeys([*SHOWN, *numbers]):
        cells = f"{_shown(recorded.get(name)):>16}{_shown(last.row.get(name)):>16}{_gap(recorded, last, name):>14}"
        yield f"{name:<16}{cells}"
    yield ""
    yield from _minibatch_lines(last.minibatches)
    yield ""
    yield _line(last)
    if found.weights_differ_by is not None:
        equal = not found.weights_differ_by
        how = "are bitwise equal to" if equal else f"differ by at most {found.weights_differ_by:.3g} from"
        yield f"weights after it {how} the checkpoint of step {last.step}"
    yield from _notes(found, learner)


def _line(step: RepeatedStep) -> str:
    if step.recorded is None:
        return f"step {step.step}: the run has no row for this step to compare with"
    num, different = len(step.compared), step.differences
    text = f"step {step.step}: {num - len(different)} of {num} values are equal to metrics.jsonl"
    return f"{text}; different: {', '.join(difference.name for difference in different)}" if different else text


def _minibatch_lines(results: Sequence[MinibatchResult]) -> Iterator[str]:
    yield f"{'mini-batch':<12}{'loss':>14}{'grad_norm':>14}{'entropy':>12}{'kl':>14}{'ratio_max':>12}{'tokens':>10}"
    for number, result in enumerate(results, start=1):
        yield (
            f"{number:<12}{result.loss:>14.6g}{result.grad_norm:>14.6g}{result.entropy:>12.5g}{result.kl:>14.5g}"
            f"{result.ratio_max:>12.5g}{result.num_tokens:>10}"
        )


def _notes(found: Replay, learner: LearnerConfig) -> Iterator[str]:
    """Why the replay may not be exact."""
    if found.exact:
        return
    if learner.num_ranks > 1:
        yield f"the run had {learner.num_ranks} ranks and the replay has one: the order of sums differs"
    if learner.device != "cpu":
        yield "on a GPU the order of sums is nondeterministic; on the CPU a replay is exact"
    yield "a different torch version, processor or number of threads also changes the last bits"


def _gap(recorded: Mapping[str, Any], step: RepeatedStep, name: str) -> str:
    then, now = recorded.get(name), step.row.get(name)
    if then is None or now is None:
        return "-"
    return "0" if _equal(then, now) else f"{now - then:.3g}"


def _equal(then: Any, now: Any) -> bool:
    """Bitwise equality; NaN equals NaN."""
    return json.dumps(then, sort_keys=True) == json.dumps(now, sort_keys=True)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.8g}" if isinstance(value, float) else str(value)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, help="step to replay")
    parser.add_argument("--frame", type=Path, help="batch to replay, for example RUN/diverged/step-000012.frame")
    parser.add_argument("--token-records", action="store_true", help="write RUN/token_records of these steps")
    parser.add_argument("--json", action="store_true", help="print JSON")


if __name__ == "__main__":
    run_process("learner.replay", main, add_flags=_add_flags)
