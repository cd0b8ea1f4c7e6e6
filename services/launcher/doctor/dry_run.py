"""`bapo train --dry-run`: checks whether this config would start here, what would start, and the estimated time.

the list of checks  ->  the processes  ->  time, from an earlier run of the same size
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError
from bapo.core.text import duration, plain
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import RATE_STEPS
from bapo.runtime.run_directory.set_aside import can_be_replaced
from bapo.transport.endpoints import BUFFER, DASHBOARD, ROLLOUT_SERVER
from services.launcher.doctor.check_list import run_list
from services.launcher.doctor.checks import Check
from services.launcher.doctor.doctor import check_table
from services.launcher.doctor.situation import Situation
from services.launcher.processes import EVALUATOR, LEARNER, SCHEDULER
from services.launcher.supervision.children import REDIS

PROMPT_CHARS = 160
QUIET = ("port", "limit", "disk", "memory", "cores")
"""Names of checks that are not shown unless they say something else than ok."""
MAX_RUNS = 20
"""Earlier runs that an estimate reads, the latest first."""


def dry_run(config: Config, verb: str, console: Console) -> int:
    """Print checks, processes and time; 0 if everything passes, else 2.

    Args:
        verb: train or up.
    """
    with_learner = verb == "train"
    found = []
    for check in listed(Situation(config=config, with_learner=with_learner)):
        found.append(check)
        if check.status == "ok":
            console.print(check_table([check]))
    wrong = [check for check in found if check.status != "ok"]
    if wrong:
        console.print(check_table(wrong))
    failures = [check for check in found if check.status == "fail"]
    if failures:
        number = "1 problem" if len(failures) == 1 else f"{len(failures)} problems"
        console.print(Text(f"error: {number}: this config would not start", "red"), soft_wrap=True)
        return ConfigError.exit_code
    console.print()
    console.print(_plan(config, with_learner=with_learner))
    return 0


def listed(situation: Situation) -> Iterator[Check]:
    """All results of the list that say something, and the first prompt."""
    yield free_name(situation.config)
    has_data = False
    for check in run_list(situation):
        has_data |= check.name == "data" and check.status == "ok"
        if not (check.status == "ok" and check.name.startswith(QUIET)):
            yield check
    if has_data:
        yield first_prompt(situation)


def free_name(config: Config) -> Check:
    """A run of this name must not exist, unless it trained nothing."""
    path = Path(config.run.root) / config.run.name
    if path.exists() and can_be_replaced(RunDirectory(path)):
        return Check(name="run", status="ok", detail=f"{path}, new; the earlier one trained nothing and is moved aside")
    if path.exists():
        detail = f"{path} exists; resume it with bapo train --resume {path}, or choose another --run.name"
        return Check(name="run", status="fail", detail=detail)
    return Check(name="run", status="ok", detail=f"{path}, new")


def first_prompt(situation: Situation) -> Check:
    """The first training prompt as the model reads it, and its answer."""
    first = situation.task.prompts("train")[0]
    answer = ", ".join(f"{key} {value!r}" for key, value in first.answer.items() if key in ("answer", "target"))
    shown = plain(first.text if len(first.text) <= PROMPT_CHARS else f"{first.text[:PROMPT_CHARS]}...")
    detail = f"{shown}" + (f"   -> {plain(answer[:PROMPT_CHARS])}" if answer else "")
    return Check(name="first prompt", status="ok", detail=detail)


def processes(config: Config, *, with_learner: bool) -> Iterator[str]:
    """Descriptions of the processes that would start on this machine."""
    if config.buffer.url is None:
        if config.buffer.redis_url is None:
            yield REDIS
        yield BUFFER
    if config.dashboard.enabled:
        yield f"{DASHBOARD} (web page)"
    workers = config.rollout.num_workers
    yield f"{ROLLOUT_SERVER} ({workers} {config.rollout.engine} worker{'s' if workers > 1 else ''})"
    if config.agents is not None and config.agents.rollout is not None:
        num = config.agents.num_processes
        yield "agents" + (f" ({num} processes)" if num > 1 else "")
    if with_learner:
        yield LEARNER + (f" ({config.learner.num_ranks} ranks)" if config.learner.num_ranks > 1 else "")
    yield SCHEDULER
    yield EVALUATOR


def time_estimate(config: Config) -> str:
    """Estimate from the latest run of the same size in run.root; else how to get one."""
    for run in _latest_runs(Path(config.run.root)):
        try:
            other, metrics = load_resolved(run.config_path), run.read_metrics()
        except BapoError:
            continue
        if metrics and _size(other) == _size(config):
            step_s = statistics.fmean(float(row["step_s"]) for row in metrics[-RATE_STEPS:])
            total = duration(step_s * config.run.num_steps)
            judged = ", and the calls of the judge" if _has_judge(config) and not _has_judge(other) else ""
            return (
                f"about {total} and evaluations{judged}: {step_s:.1f} s per step in {run.path}, "
                f"{config.run.num_steps} steps"
            )
    return (
        f"unknown: {config.run.root} has no run of this size; run a few steps (--run.num_steps 3 --run.name try) and "
        "see the time per step in the live table"
    )


def _latest_runs(root: Path) -> list[RunDirectory]:
    paths = sorted(root.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [RunDirectory(path.parent) for path in paths[:MAX_RUNS]]


def _has_judge(config: Config) -> bool:
    return any(map(config.task.is_judge, config.task.reward_functions))


def _size(config: Config) -> tuple[object, ...]:
    """The settings that dominate the time of a step."""
    algorithm, rollout = config.algorithm, config.rollout
    return (
        config.model.path, config.task.name, algorithm.batch_size, algorithm.group_size, rollout.engine,
        rollout.num_workers, rollout.max_response_tokens,
    )  # fmt: skip


def _plan(config: Config, *, with_learner: bool) -> Table:
    algorithm = config.algorithm
    responses = algorithm.batch_size * algorithm.group_size
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("would start", Text(", ".join(processes(config, with_learner=with_learner))))
    sizes = f"{algorithm.batch_size} prompts x {algorithm.group_size} = {responses} responses"
    table.add_row("would train", Text(f"{config.method}, {config.run.num_steps} steps of {sizes}"))
    table.add_row("time", Text(time_estimate(config)))
    table.add_row("settings", "print them all with bapo config show and the same arguments")
    return table
