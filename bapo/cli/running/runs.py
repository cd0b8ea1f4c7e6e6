"""`bapo runs` and `bapo status`: list runs, and show the state of one, from their run directories."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from bapo.cli.arguments import RunOrLatest, open_run, started_line
from bapo.cli.buffer.target import AsJson, facts, make_console, print_json, table
from bapo.cli.running.fine_tuning import fine_tuning_lines
from bapo.config.load import load_resolved
from bapo.config.tree import Config, RunConfig
from bapo.core.correctness import ACCURACY, measure_of
from bapo.core.errors import BapoError, ConfigError
from bapo.core.text import count, duration, percent
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.run_directory.best import best_of, scope_of
from bapo.runtime.run_directory.curves import as_compared, base_rows
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory
from bapo.runtime.run_directory.rows import ended_early, last_step, pace_s

STATES = {"finished": "finished", "interrupted": "stopped", "failed": "crashed"}
"""`RunDirectory.status` -> displayed state; other values are shown as they are."""
EXTERNAL_LIVE_S, EXTERNAL_LIVE_STEPS = 300.0, 3
"""A run of separately started processes counts as running when its latest step is not older than the longer of this
time and this many times what that step took."""
EXTERNAL = "its processes were started separately: docker compose ps, docker compose logs -f learner; or kubectl"
ADDRESSES = {"agents_url": "agents", "buffer_url": "buffer", "dashboard_url": "page", "rollout_url": "workers"}
COLORS = {"running": "green", "starting": "green", "stopped": "yellow", "crashed": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One row of `bapo runs`."""

    name: str
    path: str
    state: str
    """created, starting, running, finished, stopped, crashed, or unreadable."""
    step: int = 0
    num_steps: int = 0
    accuracy: float | None = None
    """Mean reward of the latest evaluation, mean of the splits at their own temperature; None before the first. It is
    the accuracy where all rewards are 0 or 1: `measures`. With fewer prompts than the base model's: that plus the
    change (`as_compared`)."""
    accuracies: Mapping[str, float] = field(default_factory=dict)
    """The same of each split."""
    measures: Mapping[str, str] = field(default_factory=dict)
    """Of each split: "accuracy" or "mean reward"."""
    ended: str | None = None
    """Why it ended before its last step (`evaluation.patience`)."""
    best_step: int | None = None
    """Step after which the weights measured best; None if only one was measured. 0: the base model."""
    best_mean: float | None = None
    """Their mean reward on `best_split`, over the prompts that all measurements have."""
    best_scope: str = ""
    """In words, where it is not the accuracy of their own evaluation."""
    best_split: str | None = None
    """By which the best weights are chosen: `evaluation.best_measure`."""
    page: str | None = None
    """URL of the web page of a running run."""
    updated_at: float = 0.0
    """Unix time of the latest record."""


def runs(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Folder of run directories.")] = RunConfig().root,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the paths.")] = False,
) -> None:
    """List the runs of a folder, latest first: state, step, held-out result, web page.

    States: running, finished, stopped (by Ctrl-C or bapo stop) and crashed; a stopped or crashed run can be resumed
    with bapo train --resume RUN, one of bapo sft with bapo sft --resume RUN.

    Examples:

      bapo runs
      bapo runs outputs/study-chain
    """
    if not Path(root).is_dir():
        raise ConfigError(f"folder {root} not found; runs are in run.root, by default {RunConfig().root}")
    found = sorted(map(state_of, run_directories(root)), key=lambda run: run.updated_at, reverse=True)
    if as_json:
        print_json([asdict(run) for run in found])
    elif quiet:
        for run in found:
            typer.echo(run.path)
    elif not found:
        typer.echo(f"no runs in {root}; start one with bapo train")
    else:
        names = ("run", "state", "step", "held-out", "best", "page", "updated")
        make_console().print(table(names, [_row(run) for run in found], ids=("run", "state", "page")))


def status(run: RunOrLatest = "latest", as_json: AsJson = False) -> None:
    """Show the state of a run: step, reward, held-out result, remaining time, processes, URLs and next commands.

    Examples:

      bapo status outputs/demo-001
      bapo status latest --json
    """
    directory = open_run(run)
    state, fields = state_of(directory), directory.read_run()
    metrics = directory.read_metrics()
    if as_json:
        print_json({**asdict(state), "latest": metrics[-1] if metrics else None, "run": fields})
        return
    config = load_resolved(directory.config_path)
    if config.sft is not None:
        lines = fine_tuning_lines(directory, config, state.state, metrics)
    else:
        lines = _status_lines(directory, config, state, fields, metrics)
    make_console().print(facts(list(lines)))


def run_directories(root: str | Path) -> list[RunDirectory]:
    """The runs directly below a folder."""
    return [RunDirectory(path.parent) for path in sorted(Path(root).glob("*/config.toml"))]


def state_of(run: RunDirectory) -> RunState:
    """State of a run from its records; also for a damaged run."""
    try:
        fields, config = run.read_run(), load_resolved(run.config_path)
        metrics, evaluations = run.read_metrics(), run.read_evaluations()
    except BapoError:
        return RunState(name=run.name, path=str(run.path), state="unreadable")
    has_launcher = fields.get("status") is not None
    state = (
        state_name(run, fields) if has_launcher else _external_state(metrics, last_step(metrics, config.run.num_steps))
    )
    latest = [row for row in _compared(evaluations) if row["version"] == evaluations[-1]["version"]]
    own = [row for row in latest if "@" not in row["split"]]
    best = best_of(evaluations, config.evaluation.best_measure)
    return RunState(
        name=run.name,
        path=str(run.path),
        state=state,
        step=int(metrics[-1]["step"]) if metrics else 0,
        num_steps=config.run.num_steps,
        accuracy=sum(row["accuracy"] for row in own) / len(own) if own else None,
        accuracies={row["split"]: row["accuracy"] for row in latest},
        measures={row["split"]: measure_of(evaluations, row["split"]) for row in latest},
        ended=ended_early(metrics) or None,
        best_step=best.step if best else None,
        best_mean=best.mean if best else None,
        best_scope=scope_of(best, evaluations) if best else "",
        best_split=best.split if best else None,
        page=(fields.get("addresses") or {}).get("dashboard_url") if state == "running" else None,
        updated_at=_updated_at(run),
    )


def state_name(run: RunDirectory, fields: Mapping[str, Any]) -> str:
    """The state of a run in one word."""
    recorded = fields.get("status")
    if recorded in UNDER_WAY:
        recorded = run.status
    return "created" if recorded is None else STATES.get(str(recorded), str(recorded))


def _external_state(metrics: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    """The state of a run whose processes were started separately, as in containers: from its records alone."""
    if not metrics:
        return "created"
    if metrics[-1]["step"] >= num_steps:
        return "finished"
    limit_s = max(EXTERNAL_LIVE_S, EXTERNAL_LIVE_STEPS * (metrics[-1].get("step_s") or 0.0))
    return "running" if time.time() - metrics[-1]["time"] < limit_s else "stopped"


def _updated_at(run: RunDirectory) -> float:
    files = [run.path / name for name in ("metrics.jsonl", "evaluations.jsonl", "run.json", "config.toml")]
    return max(path.stat().st_mtime for path in files if path.exists())


def _row(run: RunState) -> dict[str, Any]:
    return {
        "run": run.path,
        "state": run.state,
        "step": f"{run.step}/{run.num_steps}{', ended early' if run.ended else ''}" if run.num_steps else None,
        "held-out": ", ".join(_measured(run, split) for split in run.accuracies) or None,
        "best": None if run.best_mean is None else f"{percent(run.best_mean)} at step {run.best_step}{run.best_scope}",
        "page": run.page,
        "updated": f"{duration(time.time() - run.updated_at)} ago" if run.updated_at else None,
    }


def _measured(run: RunState, split: str) -> str:
    """`cd34 34.2 %`, or `cd34 mean reward 10.8 %`."""
    named = "" if run.measures[split] == ACCURACY else f"{run.measures[split]} "
    return f"{split} {named}{percent(run.accuracies[split])}"


def _status_lines(
    run: RunDirectory,
    config: Config,
    state: RunState,
    fields: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, str]]:
    yield "run", started_line(run).removeprefix("run ")
    message = str(fields.get("message") or "").splitlines()
    yield "state", state.state + (f": {message[0]}" if message and state.state == "crashed" else "")
    yield "trains", f"{config.model.path} on {config.task.name} with {config.method}"
    step_s = pace_s(metrics, fields.get("started_at") or 0.0) if state.state == "running" else None
    left = "" if step_s is None else f", about {duration((state.num_steps - state.step) * step_s)} left"
    yield "step", f"{state.step} of {state.num_steps}{left}"
    if metrics:
        latest = metrics[-1]
        yield "reward", f"{latest['reward_mean']:.3f} (mean of the latest batch)"
        yield "speed", f"{latest['step_s']:.2f} s per step, {count(latest['tokens_per_s'])} tokens/s"
        if latest.get("warning"):
            yield "warning", str(latest["warning"])
    if state.ended:
        yield "ended", f"after step {state.step}: {state.ended}"
    if state.best_mean is not None:
        yield "best", f"{state.best_split} after step {state.best_step}: {percent(state.best_mean)}{state.best_scope}"
    yield from _held_out(run.read_evaluations())
    if state.state in ("running", "starting"):
        for name, address in sorted((fields.get("addresses") or {}).items()):
            yield ADDRESSES.get(name, name), f"{address}/v1" if name == "agents_url" else address
        token = set_of_run(run.path).path_of(Role.OPERATOR)
        if config.security.tokens != "off" and token.exists():
            yield "token", f"{token} (the page asks for it; bapo view {run.path} needs none)"
        yield "processes", ", ".join(fields.get("processes") or {}) or "starting"
    if state.state == "running" and config.agents is not None and config.agents.rollout is None:
        yield "agents", f"run yours with bapo agent {run.path} -- PROGRAM"
    yield "next", EXTERNAL if fields.get("status") is None and metrics else _next(run, state)


def _compared(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with accuracies that stand next to the base model's."""
    bases = base_rows(evaluations)
    return [as_compared(row, bases.get(row["split"])) for row in evaluations]


def _held_out(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The latest measurement of each split."""
    bases = base_rows(evaluations)
    for row in {row["split"]: row for row in _compared(evaluations)}.values():
        split, base = row["split"], bases.get(row["split"], row)
        few = (row.get("num_prompts") or 0) < (base.get("num_prompts") or 0)
        mean, step = f"{measure_of(evaluations, split)} {percent(row['accuracy'])}", f"after step {row['step']}"
        how = f" (base model {percent(base['accuracy'])}; the change is of {row['num_prompts']} prompts)" if few else ""
        yield "held-out", f"{split} {mean} {step}{how}"


def _next(run: RunDirectory, state: RunState) -> str:
    path = run.path
    if state.state in ("running", "starting"):
        return f"bapo watch {path}   bapo logs -f {path}   bapo stop {path}"
    if state.state == "finished":
        return f"bapo report {path}   bapo eval {path}"
    if state.state == "created":
        return f"bapo train --resume {path}"
    return run.how_to_resume
