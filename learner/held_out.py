"""What the learner does with held-out measurements: which checkpoints it keeps, and when it ends a run early.

    step t trained -> checkpoint t, if version t + 1 will be measured -> ... -> the evaluator writes its row
                      kept until then, and after that while it is one of the best

Measurements arrive steps after their weights, and an evaluator that is still busy leaves some out: then a checkpoint
waits until a later version is measured.
"""

from __future__ import annotations

from collections.abc import Collection

from bapo.config.tree import Config
from bapo.core.text import percent
from bapo.runtime.run_directory.best import Measured, best_steps, last_improvement, measured
from bapo.runtime.run_directory.layout import RunDirectory


class HeldOut:
    """The measurements of a run, as its learner sees them; rank 0 reads them."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        self._config = config
        self._run = run

    def will_be_measured(self, step: int) -> bool:
        """Whether the weights after a step are measured during the run, and may be kept for it."""
        every = self._config.evaluation.every
        return self._config.checkpoint.keep_best > 0 and self._config.cadence.is_first_after(step + 1, every)

    def kept(self, steps: Collection[int]) -> set[int]:
        """Of the checkpoints after these steps: those that measured best, and those that may be measured yet.

        Raises: RecordError, StorageError.
        """
        number = self._config.checkpoint.keep_best
        if number == 0:
            return set()
        found = self._found()
        newest = max((one.step for one in found), default=0)
        return best_steps(found, steps, number) | {
            step for step in steps if step > newest and self.will_be_measured(step)
        }

    def reason_to_end(self, step: int) -> str:
        """Why the run ends after this step, before its last one: by `evaluation.patience`; empty if it does not.

        Raises: RecordError, StorageError.
        """
        settings = self._config.evaluation
        if settings.patience is None or step >= self._config.run.num_steps:
            return ""
        # A restarted learner has trained less than was measured.
        found = [one for one in self._found() if one.step <= step]
        last = last_improvement(found, settings.min_improvement)
        since = len(found) - 1 - last
        if since < settings.patience:
            return ""
        best = found[last]
        more = f" of more than {settings.min_improvement:g}" if settings.min_improvement else ""
        return (
            f"no improvement{more} in {since} measurements of {best.split} since step {best.step} "
            f"({percent(best.mean)})"
        )

    def _found(self) -> list[Measured]:
        return measured(self._run.read_evaluations(), self._config.evaluation.best_measure)
