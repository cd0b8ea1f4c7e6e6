"""Run directories with records small enough to check by eye: what reports and comparisons are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo.config.load import dump_toml, load_config
from bapo.core.types import GroupResult, Origin
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.factories import make_result

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_response_tokens": 64}


def metrics_row(step: int, **fields: Any) -> dict[str, Any]:
    """One learner step with every column that comparisons read."""
    row = {
        "step": step, "reward_mean": 0.25, "x1": 2, "x2": 0, "x3": 0, "batch_size": 4, "grad_norm": 0.5, "entropy": 0.4,
        "staleness_x1_mean": 1.0, "staleness_x2_mean": None, "staleness_x3_mean": None, "num_updates": 2,
        "step_s": 2.0, "checkpoint_s": 0.5, "time": 1000.0 + 3 * step,
    }  # fmt: skip
    return row | fields


def evaluation_row(split: str, version: int, right: Mapping[str, str], **fields: Any) -> dict[str, Any]:
    """One measurement; `right` is prompt id -> "1000", one character per response."""
    rewards = {prompt: [float(mark) for mark in marks] for prompt, marks in right.items()}
    every = [reward for own in rewards.values() for reward in own]
    row = {
        "split": split, "version": version, "step": version - 1, "accuracy": sum(every) / len(every), "low": 0.0,
        "high": 1.0, "interval": "95% wilson, clustered by prompt", "num_prompts": len(rewards), "num_dropped": 0,
        "num_samples": len(next(iter(right.values()))), "truncated_share": 0.0, "mean_tokens": 10.0,
        "sampling": SAMPLING, "rewards": rewards,
    }  # fmt: skip
    return row | fields


def write_run(
    path: Path,
    *,
    seed: int = 1,
    preset: str = "bapo",
    overrides: Sequence[str] = (),
    metrics: Sequence[Mapping[str, Any]] = (),
    groups: Mapping[int, Sequence[GroupResult]] | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
    status: str = "finished",
) -> RunDirectory:
    """A run directory with these records; two steps and no groups unless they are given."""
    name = ["--run.name", path.name, "--run.root", str(path.parent), "--run.seed", str(seed)]
    sizes = ["--algorithm.batch_size", "4", "--learner.minibatch_size", "2", "--algorithm.group_size", "4"]
    rows = list(metrics) or [metrics_row(1), metrics_row(2)]
    steps = ["--run.num_steps", str(len(rows)), "--evaluation.num_samples", "4", "--learner.microbatch_tokens", "20000"]
    run = RunDirectory.create(path, dump_toml(load_config([preset], [*name, *sizes, *steps, *overrides])))
    for row in rows:
        run.append_metrics(row)
    for step, results in (groups or {}).items():
        run.write_groups(step, results)
    for evaluation in evaluations:
        run.append_evaluation(evaluation)
    run.update_run(status=status, started_at=1000.0, ended_at=1100.0)
    return run


def result(prompt: str, rewards: str, *, step: int, origin: Origin | None = None, **fields: Any) -> GroupResult:
    """A group of a prompt whose id says when it was sampled."""
    group_id = fields.pop("group_id", f"{prompt}@{step}{fields.get('purpose', '')}")
    return make_result(group_id=group_id, prompt_id=prompt, rewards=rewards, origin=origin, num_tokens=40, **fields)
