"""`bapo train --dry-run`: checks whether this config would start here, what would start, and the estimated time.

    checks that take seconds  ->  the processes  ->  time, from an earlier run of the same size

Does not check whether model and data fit into memory, or the rewards of rows after the first: use `bapo doctor`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError
from bapo.core.text import duration, plain
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import RATE_STEPS
from bapo.tasks.base import Task
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.grading.trial import try_first
from bapo.tasks.registry import load_task
from bapo.transport.endpoints import BUFFER, DASHBOARD, ROLLOUT_SERVER
from services.launcher.doctor import checks
from services.launcher.doctor.checks import Check
from services.launcher.doctor.doctor import Step, check_table, run_steps, versions
from services.launcher.gpus.devices import visible_here
from services.launcher.gpus.plan import share_gpus
from services.launcher.processes import EVALUATOR, LEARNER, SCHEDULER
from services.launcher.supervision.children import REDIS

PROMPT_CHARS = 160
MAX_RUNS = 20
"""Earlier runs that an estimate reads, the latest first."""


def dry_run(config: Config, verb: str, console: Console) -> int:
    """Print checks, processes and time; 0 if everything passes, else 2.

    Args:
        verb: train or up.
    """
    with_learner = verb == "train"
    found = []
    for check in run_steps(steps(config, with_learner=with_learner)):
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


def steps(config: Config, *, with_learner: bool) -> Iterator[Step]:
    """Checks by name, each taking seconds."""
    yield "the run's name", lambda: [free_name(config)]
    yield "versions", lambda: [versions(config)]
    yield "the engine", lambda: [checks.engine(config), checks.sampling(config)]
    yield "GPUs", lambda: [gpus(config, with_learner=with_learner)]
    yield "ports", lambda: [check for check in checks.ports(config, with_learner=with_learner) if check.status != "ok"]
    yield "Redis", lambda: [checks.redis(config)]
    yield "trackers", lambda: checks.trackers(config)
    yield f"model {config.model.path}", lambda: [checks.model_files(config)]
    yield f"data and reward of task {config.task.name}", lambda: data_and_reward(config)


def free_name(config: Config) -> Check:
    """A run of this name must not exist."""
    path = Path(config.run.root) / config.run.name
    if path.exists():
        detail = f"{path} exists; resume it with bapo train --resume {path}, or choose another --run.name"
        return Check(name="run", status="fail", detail=detail)
    return Check(name="run", status="ok", detail=f"{path}, new")


def gpus(config: Config, *, with_learner: bool) -> Check:
    """GPUs as the launcher would assign them."""
    try:
        plan = share_gpus(config, visible_here(), with_learner=with_learner, is_cluster="RAY_ADDRESS" in os.environ)
    except ConfigError as error:
        return Check(name="gpus", status="fail", detail=str(error))
    return Check(name="gpus", status="ok", detail=plan.sentence())


def data_and_reward(config: Config) -> list[Check]:
    """The task loads, its prompts fill a batch, and the reward grades the first gold answer; shows the first prompt."""
    check = checks.data(config)
    if check.status == "fail":
        return [check, *checks.reward(config)]
    try:
        task = load_task(config.task.name, config.task.options, tokenizer=config.model.path, reward=config.task.reward)
        first = task.prompts("train")[0]
    except BapoError as error:  # the file may change meanwhile
        return [Check(name="data", status="fail", detail=str(error))]
    answer = ", ".join(f"{key} {value!r}" for key, value in first.answer.items() if key in ("answer", "target"))
    shown = plain(first.text if len(first.text) <= PROMPT_CHARS else f"{first.text[:PROMPT_CHARS]}...")
    detail = f"{shown}" + (f"   -> {plain(answer[:PROMPT_CHARS])}" if answer else "")
    return [check, Check(name="first prompt", status="ok", detail=detail), *reward(config, task)]


def reward(config: Config, task: Task) -> Iterator[Check]:
    """A user's reward gives 1 to the gold answer of the first row, in a grading process."""
    name = config.task.reward or config.task.options.get("reward")
    if name is None:
        return
    try:
        with closing(GraderPool(config.task, num_children=1)) as graders:
            failed, trouble = try_first(graders, task)
    except BapoError as error:
        failed, trouble = True, str(error)
    status: Literal["ok", "warn", "fail"] = "fail" if failed else "warn" if trouble else "ok"
    yield Check(name="reward", status=status, detail=trouble or f"{name} grades the gold answer of the first row")


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
            return f"about {total} and evaluations: {step_s:.1f} s per step in {run.path}, {config.run.num_steps} steps"
    return (
        f"unknown: {config.run.root} has no run of this size; run a few steps (--run.num_steps 3 --run.name try) and "
        "see the time per step in the live table"
    )


def _latest_runs(root: Path) -> list[RunDirectory]:
    paths = sorted(root.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [RunDirectory(path.parent) for path in paths[:MAX_RUNS]]


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
    table.add_row("would train", Text(f"{config.preset or algorithm.name}, {config.run.num_steps} steps of {sizes}"))
    table.add_row("time", Text(time_estimate(config)))
    table.add_row("settings", "print them all with bapo config show and the same arguments")
    return table
