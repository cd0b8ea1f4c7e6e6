"""One piece of chaos: start a run, inflict faults, demand progress after each, end it, check every invariant."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bapo.core.errors import BapoError
from bapo.runtime.auth.token_store import token_for_run
from bapo.transport.buffer_client import BufferClient
from services.stalls import blocked_on
from tests.full.chaos.aftermath import (
    complaints,
    deaths_of_their_own,
    records_of_other_groups,
    records_with_gaps,
    workers_that_died,
)
from tests.full.chaos.evidence import Evidence
from tests.full.chaos.faults import DISK, EVALUATOR, LEARNER, ROLLOUT_SERVER, SCHEDULER, Fault, inflict
from tests.full.chaos.invariants import violations
from tests.full.chaos.stage import Stage, Tail, commits
from tests.support.plain_loop import algorithm_1

START_S = 120.0
PATIENCE_S = 90.0
"""Longest time without a finished step, whatever happens: a new learner needs ten seconds on an idle machine."""
NEW_STEP_S = 240.0
"""Longest time without one that was never finished before: what a killed learner repeats is no progress."""
PAPER = {"cadence.max_steps_ahead": 0, "cadence.wait_for_reevaluation": "true"}
EAGER = {"cadence.max_steps_ahead": 2, "cadence.wait_for_reevaluation": "false"}
RAY = {"rollout.engine": "scripted_actor"}
"""The workers are Ray actors, on a node of the run's own."""
TEAM = {"learner.num_ranks": 2, "rollout.num_workers": 2}
PIECES: Sequence[Mapping[str, object]] = (PAPER, EAGER | RAY, EAGER | TEAM)
"""Settings of the pieces of a long trial, in turn."""


class StandstillError(AssertionError):
    """The run made no progress, or ended, and should not have."""


@dataclass
class Trial:
    """What happened, for the record."""

    seed: int
    overrides: Mapping[str, object]
    faults: list[Fault] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """When each was over."""
    missed: list[str] = field(default_factory=list)
    """Those of them that found nobody: what they should have befallen was gone."""
    committed_at: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    evidence: Evidence | None = None

    def recoveries(self) -> dict[str, list[float]]:
        """Kind of fault -> seconds from its end to the next finished step."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for fault, at in zip(self.faults, self.at, strict=True):
            found[fault.kind].append(
                round(min((c for c in self.committed_at if c > at), default=at + PATIENCE_S) - at, 3)
            )
        return dict(found)

    def line(self) -> dict[str, Any]:
        """One piece of chaos.json."""
        evidence = self.evidence
        assert evidence is not None
        return {
            "seed": self.seed,
            "settings": {key: str(value) for key, value in self.overrides.items()},
            "first": self.faults[0].number if self.faults else None,
            "faults": dict(Counter(fault.kind for fault in self.faults)),
            "missed": self.missed,
            "seconds": round(self.seconds, 1),
            "steps": len(evidence.batches),
            "batches_asked": len(evidence.of("batch")),
            "batches_straight": sum(bool(line["straight"]) for line in evidence.of("batch")),
            "acknowledged": len(evidence.acknowledged),
            "sent": sum(len(groups) for groups in evidence.sent.values()),
            "resumes": len(evidence.of("resume")),
            "restores": len(evidence.of("restore")),
            "recovery_s": self.recoveries(),
            "longest_pause_s": round(longest_pause(self.committed_at), 2),
            "violations": self.violations,
        }


def run_trial(
    folder: Path,
    faults: Sequence[Fault],
    *,
    seed: int,
    overrides: Mapping[str, object],
    limit_s: float = 1e9,
    num_steps: int = 2,
    sabotage: str = "",
    disk: Path | None = None,
) -> Trial:
    """Inflict as many of the faults as fit into `limit_s`.

    Args:
        num_steps: steps to be finished behind the last fault.
        sabotage: what is broken in the buffer service on purpose (`tests.full.chaos.sabotage`).
        disk: a small file system that faults may fill.
    Raises: StandstillError.
    """
    trial = Trial(seed=seed, overrides=overrides)
    began = time.monotonic()
    stage = Stage(folder, overrides, sabotage=sabotage, disk=disk)
    try:
        stage.start()
        watch = Watch(stage, trial)
        watch.wait_for_commits(2, START_S)
        for fault in faults:
            if time.monotonic() - began > limit_s:
                break
            watch.wait(fault.gap_s)
            if fault.whom.startswith(LEARNER) and fault.what == "kill":
                watch.wait_for_new_step(NEW_STEP_S)
            if not inflict(fault, stage):
                trial.missed.append(fault.kind)
            trial.faults.append(fault)
            trial.at.append(time.monotonic())
            if fault.whom == DISK:  # the run may have ended by it, and is resumed by whoever looks
                watch.wait_for_commits(1, PATIENCE_S)
                watch.wait_until_ready({SCHEDULER, EVALUATOR}, START_S)
        watch.wait_for_commits(num_steps, PATIENCE_S)
        twins = stage.twins()
        code = stage.end()
        if code != 130:
            raise StandstillError(f"the launcher ended with {code}:\n{stage.last_words}")
        trial.evidence = stage.evidence()
        trial.violations = violations(trial.evidence) + twins
        if left := stage.leases_that_stay():
            trial.violations.append(f"leases that do not return: {left}")
        trial.violations += left_behind(stage, trial)
        if stage.config.cadence.max_steps_ahead == 0:
            trial.violations += differences_to_the_plain_loop(trial.evidence)
    finally:
        stage.close()
    trial.seconds = time.monotonic() - began
    return trial


class Watch:
    """Demands progress."""

    def __init__(self, stage: Stage, trial: Trial) -> None:
        self._stage, self._trial = stage, trial
        self._tail = Tail(stage)
        self._since = self._new_since = time.monotonic()
        self._furthest = self._reached = 0

    def poll(self) -> int:
        """Steps that were finished since the last look. Raises: StandstillError."""
        lines = self._tail.read()
        new = commits(lines)
        self._trial.committed_at += new
        self._since = max([self._since, *new])
        furthest = max((line["step"] for line in lines if line["event"] == "commit"), default=0)
        if furthest > self._furthest:
            self._furthest, self._new_since = furthest, self._since
        if self._stage.resumed_on_free_disk():
            self._since = time.monotonic()
        if self._stage.exit_code is not None:
            raise StandstillError(f"the run ended with {self._stage.exit_code}:\n{self._stage.last_words}")
        if time.monotonic() - self._since > max(PATIENCE_S, START_S if not self._trial.committed_at else 0.0):
            raise StandstillError(f"no step for {time.monotonic() - self._since:.0f} s: {self._why()}")
        if time.monotonic() - self._new_since > NEW_STEP_S:
            raise StandstillError(f"no step behind {self._furthest} for {NEW_STEP_S:.0f} s: {self._why()}")
        return len(new)

    def wait(self, seconds: float) -> None:
        """Let the run go on."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            time.sleep(min(0.1, seconds))

    def wait_for_new_step(self, timeout_s: float) -> None:
        """Return when a step is finished that was not when this last returned.

        A learner that never came back could hide behind the next kill; and one that is killed behind every step before
        its checkpoint is written repeats this step for ever, by the trial's own doing.
        """
        deadline = time.monotonic() + timeout_s
        while self._furthest <= self._reached:
            self.wait_for_commits(1, max(0.0, deadline - time.monotonic()))
        self._reached = self._furthest

    def wait_for_commits(self, num: int, timeout_s: float) -> None:
        """Return after so many further finished steps."""
        self.poll()
        deadline = time.monotonic() + timeout_s
        while num > 0:
            num -= self.poll()
            if time.monotonic() > deadline:
                raise StandstillError(f"{num} steps did not come within {timeout_s:.0f} s: {self._why()}")
            time.sleep(0.05)

    def wait_until_ready(self, parts: Collection[str], timeout_s: float) -> None:
        """Return when the launcher has called all of them ready, which it does not wait for to train."""
        deadline = time.monotonic() + timeout_s
        while lacking := set(parts) - self._stage.ready_parts:
            self.poll()
            if time.monotonic() > deadline:
                raise StandstillError(f"{', '.join(sorted(lacking))} not ready after {timeout_s:.0f} s: {self._why()}")
            time.sleep(0.1)

    def _why(self) -> str:
        config, last = self._stage.config, self._trial.faults[-3:]
        try:
            url, token = f"http://127.0.0.1:{config.buffer.port}", token_for_run(self._stage.run.path)
            status = BufferClient(url, timeout_s=3.0, retry_s=0.0, token=token).status()
            reason = blocked_on(status, config.algorithm.batch_size, config.run.num_steps)
        except BapoError as error:
            reason = str(error)
        return f"{reason}; the last faults: {[fault.kind for fault in last]}\n{self._stage.last_words}"


def left_behind(stage: Stage, trial: Trial) -> list[str]:
    """Violations by what lies in the run directory and in what the launcher has said."""
    assert trial.evidence is not None
    last_commit = max((line["step"] for line in trial.evidence.of("commit")), default=0)
    return [
        *records_with_gaps(stage.run, last_commit),
        *records_of_other_groups(stage.run, trial.evidence.batches),
        *(f"error in a log: {sentence}" for sentence in complaints(stage.logs(), trial.faults)),
        *deaths_of_their_own(stage.words, trial.faults),
        *workers_that_died(stage.run.log_path(ROLLOUT_SERVER).read_text(errors="replace"), trial.faults),
    ]


def longest_pause(times: Sequence[float]) -> float:
    """Between two finished steps."""
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def differences_to_the_plain_loop(found: Evidence) -> list[str]:
    """With max_steps_ahead = 0 nothing is left to chance: every batch must be that of Algorithm 1 run in one loop."""
    num_steps = len(found.batches)
    run = found.config.run.model_copy(update={"num_steps": num_steps})
    plain = algorithm_1(found.config.model_copy(update={"run": run}))
    sentences = []
    for (step, batch), want in zip(found.batches.items(), plain, strict=True):
        prompts = {result["id"]: result["prompt"] for result in batch["results"]}
        got = [
            sorted(prompts[key] for key, name, _ in batch["trained"] if name == origin) for origin in ("x1", "x2", "x3")
        ]
        if got != [want.x1, want.x2, want.x3]:
            sentences.append(f"step {step} is not that of the plain loop: {got} instead of {want}")
    return sentences
