"""When to evaluate which policy version: pure rules over the learner's progress and past evaluations.

base    version 1, before training changes it        num_prompts_final per split, at all temperatures
during  the first published version after each multiple of `every` steps        num_prompts
        (with checkpoint.keep_best not a later one: it would have no checkpoint)
budget  the first published version after each of `at_responses`                as base
final   the last version: T + 1, or less if the run ended early     as base; then the evaluator exits
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bapo.algorithms.settings import CadenceConfig
from bapo.config.tree import EvaluationConfig, SplitConfig
from bapo.core.types import SAMPLING, Progress, Prompt, Purpose, RolloutRequest

BASE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    version: int
    num_prompts: int
    """Per split, if the split has as many."""
    is_full: bool = True
    """At all temperatures."""
    budget: int | None = None
    """The one of `at_responses` that is due."""

    @property
    def step(self) -> int:
        """Number of learner steps of these weights."""
        return self.version - 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """One split, sampled in one way."""

    name: str
    """As in the rows: the split, or `SPLIT@TEMPERATURE`."""
    split: str
    settings: SplitConfig


def next_target(
    progress: Progress,
    measured: Collection[int],
    *,
    num_steps: int,
    settings: EvaluationConfig,
    cadence: CadenceConfig,
    budget: int | None = None,
    skips_late: bool = False,
) -> Target | None:
    """What to evaluate now; None to wait.

    Args:
        measured: versions that already have rows.
        cadence: when versions are published. After a resume the progress is the step of the checkpoint, and the
            workers get an older version.
        budget: one of `at_responses` that has been sampled and not been measured.
        skips_late: during the run only versions that have a checkpoint with `checkpoint.keep_best`.
    A missed base (version 2 is already published) is not evaluated: its weights are gone.
    """
    final = final_version(progress, num_steps)
    if progress.policy_version <= BASE_VERSION and progress.step <= num_steps:
        due = BASE_VERSION
    elif final is not None:
        due = final
    elif budget is not None:
        version = cadence.synced_version(progress.policy_version)
        return Target(version=version, num_prompts=settings.num_prompts_final, budget=budget)
    else:
        due = _during(cadence.synced_version(progress.policy_version), measured, settings.every)
        if due and skips_late and not cadence.is_first_after(due, settings.every):
            return None
    if due == 0 or due in measured:
        return None
    if due in (BASE_VERSION, final):
        return Target(version=due, num_prompts=settings.num_prompts_final)
    return Target(version=due, num_prompts=settings.num_prompts, is_full=False)


def final_version(progress: Progress, num_steps: int) -> int | None:
    """Version of the last weights, once the learner has reported the end of the run as step T + 1; None before."""
    return progress.policy_version if progress.step > num_steps else None


def due_budget(at_responses: Sequence[int], sampled: int, measured: Collection[int]) -> int | None:
    """The largest number of `at_responses` that has been sampled, unless it or a larger one has been measured."""
    due = max((budget for budget in at_responses if budget <= sampled), default=0)
    return due if due > max(measured, default=0) else None


def measurements_of(
    splits: Sequence[str], settings: EvaluationConfig, *, temperature: float, is_full: bool
) -> dict[str, Measurement]:
    """What is measured of some weights, by name: at additional temperatures only if it `is_full`, except what the best
    weights are chosen by. `temperature`: of a split without one."""
    found, always = settings.measurements(splits, temperature), {*splits, settings.best_measure}
    return {name: Measurement(name, *found[name]) for name in found if is_full or name in always}


def label_of(name: str, version: int) -> str:
    """Label of a measurement in the buffer."""
    return f"{name}@{version}"


def parts_of(label: str) -> tuple[str, int]:
    """(name, version) of a label; version 0 for a label of another client."""
    name, _, version = label.rpartition("@")
    return name, int(version) if version.isdecimal() else 0


def requests_of(
    target: Target, measurement: Measurement, prompts: list[Prompt], settings: EvaluationConfig
) -> list[RolloutRequest]:
    """One request per prompt; asking twice asks once."""
    own = measurement.settings
    return [
        RolloutRequest(
            request_id=f"evaluate-{target.version:06d}-{measurement.name}-{index:05d}",
            prompt=prompt,
            group_size=own.num_samples or settings.num_samples,
            purpose=Purpose.EVALUATE,
            step=target.version,
            min_version=target.version,
            label=label_of(measurement.name, target.version),
            **{name: getattr(own, name) for name in SAMPLING},
        )
        for index, prompt in enumerate(prompts)
    ]


def _during(version: int, measured: Collection[int], every: int) -> int:
    """`version` if it is the first one after a multiple of `every` steps, else 0."""
    if every == 0:
        return 0
    passed = (version - 1) // every
    return version if passed > max(((old - 1) // every for old in measured), default=0) else 0
