"""What `bapo study` says: the plan before it starts, one line while it goes on, the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bapo.analysis.study.plan import Study
from bapo.analysis.study.runner import Outcome, StudyProgress
from bapo.analysis.study.schedule import Estimates, provisional, rest_s
from bapo.analysis.study.state import Found, State
from bapo.core.text import duration


def plan_lines(study: Study, found: Sequence[Found], estimates: Estimates, parallel: int) -> Iterator[str]:
    """What is going to be run: methods, seeds, steps, what there is already, how long it takes."""
    yield f"study {study.path}: {len(found)} runs, {parallel} at a time"
    for method in dict.fromkeys(one.run.method for one in found):
        own = [one for one in found if one.run.method == method]
        settings = study.file.methods[method]
        states = Counter(one.state for one in own)
        words = ", ".join(f"{states[state]} {WORDS[state]}" for state in State if states[state])
        seeds = " ".join(str(one.run.seed) for one in own)
        each = estimates.by_method.get(method)
        measured = f", {each:.0f} s each (measured)" if each is not None else ""
        yield (
            f"  {method:<20} preset {settings.preset}, seeds {seeds}, {own[0].run.config.run.num_steps} steps: "
            f"{words}{measured}"
        )
        for key in settings.may_differ:
            yield f"  {'':<20} {key} differs from the other methods, as the file says it may"
    waiting = [one for one in found if one.state is not State.FINISHED]
    yield f"time for the {len(waiting)} that are left: {remaining(waiting, estimates, parallel)}"


def remaining(waiting: Sequence[Found], estimates: Estimates, parallel: int) -> str:
    """In words."""
    if not waiting:
        return "none"
    seconds = rest_s(waiting, (), estimates, parallel)
    return "unknown: no run of this study was measured yet" if seconds is None else f"about {duration(seconds)}"


def progress_line(look: StudyProgress) -> str:
    """One line: what is done, what goes on, how much longer."""
    running = ", ".join(f"{found.run.name} {step}/{found.run.config.run.num_steps}" for found, step, _ in look.running)
    estimates = provisional(look.estimates, look.running)
    seconds = rest_s(look.waiting, [(found, age_s) for found, _, age_s in look.running], estimates, look.parallel)
    failed = f", {look.failed} failed" if look.failed else ""
    eta = "ETA unknown yet" if seconds is None else f"ETA {duration(seconds)}"
    return f"{look.finished}/{look.num_runs} finished{failed} | {running} | {duration(look.elapsed_s)} | {eta}"


def end_lines(study: Study, outcome: Outcome, source: str) -> Iterator[str]:
    """How it ended, what failed and why, and how to go on."""
    for row in outcome.failed:
        yield f"{row['run']} failed with exit code {row['exit_code']}: {row['reason']}"
    if outcome.failed:
        yield f"{len(outcome.failed)} of {len(study.runs)} runs failed; their output is in {study.path / 'logs'}"
    if outcome.interrupted:
        yield f"ended by the user: {', '.join(outcome.interrupted)}"
    if outcome.left:
        yield f"not started: {', '.join(outcome.left)}"
    if outcome.failed or outcome.interrupted or outcome.left:
        yield f"go on with the same command; finished runs are kept: bapo study {source}"
    else:
        yield f"all {len(study.runs)} runs are finished; look at them with: bapo report {study.path}"


WORDS = {
    State.NEW: "to be made",
    State.RESUME: "to be continued from a checkpoint",
    State.ANEW: "to be started anew",
    State.FINISHED: "finished",
}
