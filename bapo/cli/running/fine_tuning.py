"""What `bapo status` says of a run of `bapo sft`, whose learner is the only process: it has neither task nor reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bapo.config.tree import Config
from bapo.core.text import count, duration
from bapo.runtime.run_directory.layout import RunDirectory


def fine_tuning_lines(
    run: RunDirectory, config: Config, state: str, metrics: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """(title, text) of each line.

    Args:
        state: created, running, stopped or finished, as its records say.
        metrics: rows of metrics.jsonl.
    """
    assert config.sft is not None
    yield "run", str(run.path)
    yield "state", state
    yield "trains", f"{config.model.path} on conversations ({config.sft.data}) with bapo sft"
    step, num_steps = int(metrics[-1]["step"]) if metrics else 0, config.run.num_steps
    left = f", about {duration((num_steps - step) * metrics[-1]['step_s'])} left" if state == "running" else ""
    yield "step", f"{step} of {num_steps}, of {config.algorithm.batch_size} conversations each{left}"
    if metrics:
        latest = metrics[-1]
        if latest.get("loss") is not None:
            yield "loss", f"{latest['loss']:.4f} nats per token (mean of the latest batch)"
        yield "speed", f"{latest['step_s']:.2f} s per step, {count(latest['tokens_per_s'])} tokens/s"
        if latest.get("warning"):
            yield "warning", str(latest["warning"])
    yield "next", _next(run, config, state)


def _next(run: RunDirectory, config: Config, state: str) -> str:
    if state == "finished":
        merged = "" if config.model.lora is None else " --merged"
        return f"bapo export {run.path}{merged}   bapo train CONFIG --model.path FOLDER"
    again = f"bapo sft --resume {run.path}"
    if state == "running":
        return f"Ctrl-C in its terminal stops it; then {again}"
    return again if state == "created" else f"Resume {run.resume_point}: {again}"
