"""What there is of each run of a study already.

NEW ----start----> (goes on) ----> FINISHED      kept, never made again
                       |
                       +--broken--> RESUME       it has a checkpoint: continued from there
                                    ANEW         it has none: begun again at step 1, in the same directory
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from bapo.analysis.study.plan import PlannedRun
from bapo.config.load import diff, load_resolved
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory

FINISHED = "finished"
MOVED = ("run.root", "rollout.sync_timeout_s", "learner.batch_timeout_s", "buffer.max_memory_mb")
"""Settings that may differ from those on disk: where a study lies says nothing of it, nor does when a run gives up."""


class State(StrEnum):
    """What has to be done for a run."""

    NEW = "new"
    RESUME = "resume"
    ANEW = "anew"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A planned run and what there is of it."""

    run: PlannedRun
    state: State
    step: int = 0
    """Of its newest checkpoint."""
    before: str = ""
    """How the last attempt ended, as run.json says it."""

    @property
    def share_left(self) -> float:
        """Of its steps."""
        return 0.0 if self.state is State.FINISHED else 1.0 - self.step / self.run.config.run.num_steps

    def __str__(self) -> str:
        """What is going to happen, plainly."""
        was = f" (it was {self.before})" if self.before else ""
        if self.state is State.RESUME:
            return f"{self.run.name}: continued from its checkpoint after step {self.step}{was}"
        if self.state is State.ANEW:
            return f"{self.run.name}: started anew at step 1, it had no checkpoint yet{was}"
        return f"{self.run.name}: {'finished, kept' if self.state is State.FINISHED else 'started'}"


def look(run: PlannedRun) -> Found:
    """What there is of one run."""
    if not (run.path / "config.toml").is_file():
        return Found(run=run, state=State.NEW)
    directory = RunDirectory.open(run.path)
    fields = directory.read_run()
    step = directory.latest_checkpoint() or 0
    if fields.get("status") == FINISHED:
        return Found(run=run, state=State.FINISHED, step=step)
    # A status like `running` of a process that is gone was true until it was killed.
    before = "" if not fields else str(fields.get("status", "killed"))
    before = before if before in ("failed", "interrupted") else "cut off" if fields else ""
    return Found(run=run, state=State.RESUME if step else State.ANEW, step=step, before=before)


def changed(runs: Iterable[PlannedRun]) -> None:
    """Refuse runs on disk that were made with other settings than the file says now: they would be compared as one.

    Raises: ConfigError with one line per run.
    """
    problems = []
    for run in runs:
        path = run.path / "config.toml"
        if not path.is_file():
            continue
        lines = [line for line in diff(load_resolved(path), run.config) if line.partition(":")[0] not in MOVED]
        if lines:
            problems.append(
                f"{run.path} was made with other settings than the study has now: {'; '.join(lines)}; put them back, "
                "give the study another name, or remove that run"
            )
    if problems:
        raise ConfigError("\n".join(problems))
