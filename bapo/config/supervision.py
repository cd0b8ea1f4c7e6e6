"""What happens when a process of a run dies, and when nothing moves."""

from __future__ import annotations

from pydantic import Field

from bapo.algorithms.settings import MOST_SECONDS, Frozen


class SupervisionConfig(Frozen):
    """Processes that die, and runs that stand still."""

    max_restarts: int = Field(5, ge=0)
    """A process that was killed or crashed is started again, so often within `window_s`; its next death ends the run.
    Nothing that was acknowledged is lost by that. 0: the first death ends the run."""
    window_s: float = Field(600.0, gt=0, le=MOST_SECONDS)
    """Restarts that are longer ago are forgiven; those of the learner only when it has saved a checkpoint since."""
    first_pause_s: float = Field(0.5, ge=0, le=MOST_SECONDS)
    """Seconds before the first restart; each further one within the window waits twice as long, up to 30 s."""
    stall_s: float = Field(900.0, ge=0, le=MOST_SECONDS)
    """When nothing has moved for so long, one message says who waits for whom; 0: never. It must be longer than a
    learner step and than the start of an engine."""
    stall_ends_run: bool = False
    """true: a run that stands still for `stall_s` ends with exit code 5 instead of waiting on."""
