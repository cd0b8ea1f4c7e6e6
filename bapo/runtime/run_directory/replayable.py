"""Which steps of a run the learner can repeat, and from what: a checkpoint before the step, and every batch since.

    checkpoint of step 4  + batches 5, 6, 7  ->  step 7
    (the base model stands before step 1)

What is not there any more was removed with the checkpoints that it belonged to (checkpoint.keep_last).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bapo.core.codec import unpack_batch
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    start: int
    """Step of the checkpoint to begin after; 0: the base model."""
    frames: tuple[Path, ...]
    """Batches of steps start + 1 .. step."""

    @property
    def step(self) -> int:
        return self.start + len(self.frames)


def plan_replay(run: RunDirectory, step: int) -> ReplayPlan:
    """From the newest checkpoint before the step. Raises: ConfigError that names the steps that can be repeated."""
    return _plan(run, step, _last_frame(run, step))


def plan_replay_of(run: RunDirectory, frame: Path) -> ReplayPlan:
    """With this batch instead of the one that the run kept. Raises: ConfigError; ContractError for another file."""
    try:
        data = frame.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {frame}: {error.strerror}") from error
    return _plan(run, unpack_batch(data).step, frame)


def replayable_steps(run: RunDirectory) -> list[int]:
    """Steps that `plan_replay` has a plan for, in order."""
    diverged = (int(path.stem.removeprefix("step-")) for path in (run.path / "diverged").glob("step-*.frame"))
    steps = sorted({*run.batch_steps(), *diverged})
    return [step for step in steps if _start(run, step, _last_frame(run, step)) is not None]


def _plan(run: RunDirectory, step: int, last: Path) -> ReplayPlan:
    start = _start(run, step, last)
    if start is None:
        raise ConfigError(f"step {step} of run {run.path} cannot be replayed: {_why_not(run, step, last)}")
    return ReplayPlan(start=start, frames=(*map(run.batch_path, range(start + 1, step)), last))


def _start(run: RunDirectory, step: int, last: Path) -> int | None:
    """The newest checkpoint before `step` since which no batch is missing."""
    if not last.is_file():
        return None
    kept = set(run.batch_steps())
    starts = [found for found in (0, *run.checkpoint_steps()) if found < step]
    return max((start for start in starts if kept.issuperset(range(start + 1, step))), default=None)


def _last_frame(run: RunDirectory, step: int) -> Path:
    kept = run.batch_path(step)
    return kept if kept.is_file() else run.diverged_path(step)


def _why_not(run: RunDirectory, step: int, last: Path) -> str:
    can = replayable_steps(run)
    listed = f"replayable steps: {ranges(can)}" if can else "no step can be replayed, because no batches are stored"
    what = "its batch is not stored" if not last.is_file() else "batches since the checkpoint before it are missing"
    return (
        f"{what}; {listed}. The learner keeps the batches after its oldest checkpoint while checkpoint.keep_batches "
        "is true; raise checkpoint.keep_last to keep more"
    )


def ranges(steps: Iterable[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
