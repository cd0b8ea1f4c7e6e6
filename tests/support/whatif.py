"""Recorded runs written by hand, for tests of what-if questions: vector V10 as a run directory, and single cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo.analysis.whatif.recording import RecordedStep, Recording
from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.core.types import Fate, Origin, Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.factories import make_fate

G = 8
FRESH = [
    {"a": 0, "b": 2, "c": 8, "d": 1, "e": 4, "f": 7},
    {"g": 0, "h": 0, "i": 8, "j": 3, "k": 8, "l": 8},
    {"m": 4, "n": 0, "o": 8, "p": 8, "q": 2, "r": 6},
    {"s": 8, "u": 8, "v": 0, "w": 5, "x": 8, "y": 8},
]
"""V10: prompt -> right answers of its fresh group, step by step."""
AGAIN = [{}, {"a": 3, "d": 1}, {}, {"d": 2, "g": 0, "h": 8, "n": 5}]
"""V10: the same of the re-evaluations, whose groups arrive in the step that asked."""
BATCHES = [("bdef", "", ""), ("j", "a", "be"), ("mqr", "", "bej"), ("w", "dn", None)]
"""V10: prompts of X1, X2, X3; the last X3 is a draw of 3 from bejmq, and not recorded here."""
R_TOT = [22 / 48, 27 / 48, 28 / 48, 37 / 48]
TABLES = [(2, 2), (3, 3), (4, 5), (2, 3)]
"""V10: sizes of B_bad and B_high after each step."""


def trace_config(**algorithm: Any) -> Config:
    """The settings of V10: v = m = 2, M = 4, S = 3, c1 = 1/8, fixed window [2/8, 4/8]."""
    settings = {
        "batch_size": 6,
        "c2_range": (2 / 8, 2 / 8),
        "c3_range": (4 / 8, 4 / 8),
        "threshold_schedule": "fixed",
        "max_reevaluated": 4,
    }
    return Config.model_validate(
        {
            "run": {"num_steps": 4, "seed": 7, "name": "trace"},
            "algorithm": settings | algorithm,
            "cadence": {"v": 2, "m": 2},
            "learner": {"minibatch_size": 3},
        }
    )


def rewards(k: int, size: int = G) -> str:
    """3 -> "11100000"."""
    return "1" * k + "0" * (size - k)


def fresh_fate(prompt: str, k: int, step: int, reason: str, origin: Origin | None = None) -> Fate:
    """A fresh group that the assembly of `step` looked at."""
    return make_fate(
        group_id=f"fresh-{step}-{prompt}",
        prompt_id=prompt,
        origin=origin,
        reason=reason,
        rewards=rewards(k),
        version=step,
        birth=step,
    )


def again_fate(
    prompt: str, k: int, step: int, reason: str, origin: Origin | None = None, asked: int | None = None
) -> Fate:
    """A re-evaluated group that arrived for `step`."""
    name = f"reevaluate-{asked or step:06d}-{prompt}"
    fate = fresh_fate(prompt, k, step, reason, origin)
    return replace(fate, group_id=name, purpose=Purpose.REEVALUATE, policy_version=asked or step)


def trace_fates(step: int) -> list[Fate]:
    """The records of one step of V10; the reused groups of step 4 are left out."""
    fresh, again, (x1, x2, x3) = FRESH[step - 1], AGAIN[step - 1], BATCHES[step - 1]
    words = {0: "all_wrong", G: "all_right"}
    fates = [
        fresh_fate(p, k, step, words.get(k, "informative"), Origin.X1 if p in x1 else None) for p, k in fresh.items()
    ]
    for p, k in again.items():
        reason = "solved" if k == G else "still_hard" if k <= 1 else "improved"
        fates.append(again_fate(p, k, step, reason, Origin.X2 if p in x2 else None))
    born = {p: (t, k) for t, groups in enumerate(FRESH, start=1) for p, k in groups.items()}
    return fates + [fresh_fate(p, born[p][1], born[p][0], "reused", Origin.X3) for p in x3 or ""]


def write_trace(path: Path, *, num_steps: int = 3, fates: Mapping[int, Sequence[Fate]] | None = None) -> RunDirectory:
    """A run directory with the records of V10, or with other ones."""
    run = RunDirectory.create(path, dump_toml(trace_config()))
    for step in range(1, num_steps + 1):
        run.write_groups(step, (fates or {}).get(step, trace_fates(step)))
        num_bad, num_high = TABLES[step - 1]
        values = {"reward_mean": R_TOT[step - 1], "c2": 0.25, "c3": 0.5, "num_bad": num_bad, "num_high": num_high}
        run.append_metrics({"step": step, **values})
    return run


def recording_of(steps: Sequence[Sequence[Fate]], config: Config | None = None) -> Recording:
    """Steps 1, 2, ... with these groups."""
    made = (RecordedStep(step=step, fates=tuple(fates)) for step, fates in enumerate(steps, start=1))
    return Recording(name="trace", config=config or trace_config(), steps=tuple(made))
