"""What the theorem meter costs: seconds and CPU seconds with it and without it, in turn, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.diagnostics_cost [--rounds 15] [--out diagnostics_cost.json]

demo: `Updater.run`, the metrics row, its JSON and the gauges, on a batch of the demo's size (32 groups
of 8, its settings, the shipped model), with `diagnostics.every` 1 and 0. `share` is the median over rounds of
with/without - 1. The noise of a whole step is larger than what is looked for, so `diagnostics_share` relates the time
of the added parts alone, measured in the same rounds, to the step without them.
large: columns alone, 256 groups of 8 responses of about 2,000 tokens. No model of that size fits here, so what is
reported is the meter's time and `max_tokens_per_s`: a learner that trains fewer response tokens per second than this
spends less than `target` of its step on the meter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.types import Batch, BatchEntry, Group, GroupResult, Origin, Prompt, Purpose, Timing
from bapo.runtime.metrics.server import Telemetry
from learner.batch.columns import columns_of
from learner.diagnostics.gauges import show_divergences
from learner.diagnostics.off_policy_alarm import alarm_of
from learner.diagnostics.step_report import UpdateReport, metrics_row
from learner.diagnostics.theorem_meter import diagnose
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World
from learner.model.policy import load_policy
from learner.update.update import Updater

TARGET = 0.03
STEP = 20
WORLD = World(rank=0, size=1, device=torch.device("cpu"))
DEMO = "deploy/configs/demo.toml"
AGES = {Origin.X1: 3, Origin.X2: 1, Origin.X3: 3}
"""Number of ages of each subset."""


def make_batch(num_groups: int, lengths: tuple[int, int], vocab_size: int, seed: int = 0) -> Batch:
    """60 % X1, 10 % X2, 30 % X3, of several ages; random tokens."""
    rng = np.random.default_rng(seed)
    origins = [Origin.X1] * 6 + [Origin.X2] + [Origin.X3] * 3
    entries, results = [], []
    for number in range(num_groups):
        origin = origins[number % len(origins)]
        age = int(rng.integers(AGES[origin]))
        group = _group(rng, number, lengths, vocab_size, STEP - age)
        entries.append(BatchEntry(origin=origin, group=group))
        results.append(_result(group, origin, STEP - 1 - age if origin is Origin.X3 else STEP))
    return Batch(step=STEP, entries=tuple(entries), r_tot=0.3, facts={"c2": 0.25, "c3": 0.375}, results=tuple(results))


def _group(rng: np.random.Generator, number: int, lengths: tuple[int, int], vocab_size: int, version: int) -> Group:
    sizes = rng.integers(*lengths, size=8).astype(np.int32)
    tokens = int(sizes.sum())
    return Group(
        group_id=f"g{number}",
        prompt=Prompt(prompt_id=str(number), text="", task="countdown", answer={}),
        purpose=Purpose.FRESH,
        step=version,
        label="",
        worker_id="w",
        prompt_token_ids=rng.integers(4, vocab_size, size=12).astype(np.int32),
        token_ids=rng.integers(4, vocab_size, size=tokens).astype(np.int32),
        rollout_logprobs=-rng.exponential(1.0, size=tokens).astype(np.float32),
        lengths=sizes,
        rewards=np.array([1, 0, 0, 1, 0, 0, 1, 0], dtype=np.float32),
        outcomes=np.zeros(8, dtype=np.uint8),
        versions=np.full((8, 2), version, dtype=np.int32),
        timing=Timing(claimed_at=0.0, sample_s=0.0, grade_s=0.0),
    )


def _result(group: Group, origin: Origin, birth: int) -> GroupResult:
    return GroupResult(
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        purpose=Purpose.FRESH,
        policy_version=group.policy_version,
        rewards=tuple(group.rewards.tolist()),
        origin=origin,
        reason="",
        birth=birth,
    )


class Recorder:
    """What `learner.loop` does behind an update that has to do with the meter."""

    def __init__(self, config: Config, batch: Batch) -> None:
        self._config, self._batch, self._telemetry = config, batch, Telemetry()

    def record(self, report: UpdateReport) -> int:
        """Alarm, row, JSON, gauges; returns the bytes of the row."""
        alarm = alarm_of(STEP, report.diagnosis.cells, self._config.diagnostics)
        row = metrics_row(self._batch, report, policy_version=STEP, config=self._config, seconds={}, alarm=alarm)
        show_divergences(self._telemetry, row)
        return len(json.dumps(row))


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def demo(num_rounds: int) -> dict[str, Any]:
    """The demo's step with the meter and without, alternating."""
    updaters, recorders, bytes_of = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, every in (("with", 1), ("without", 0)):
            config = load_config([DEMO], ["--diagnostics.every", str(every)])
            batch = make_batch(config.algorithm.batch_size, (50, 65), 16)
            policy = load_policy(config.model.path, config, WORLD)
            updaters[name] = Updater(config=config, policy=policy, world=WORLD, stop=StopFlag(), run_path=Path(folder))
            recorders[name] = Recorder(config, batch)

    reports: dict[str, UpdateReport] = {}

    def step(name: str) -> None:
        reports[name] = updaters[name].run(batch)
        bytes_of[name] = recorders[name].record(reports[name])

    rounds: list[dict[str, tuple[float, float]]] = []
    for i in range(num_rounds + 1):
        order = ("with", "without") if i % 2 else ("without", "with")
        found = {name: timed(partial(step, name)) for name in order}
        found["recording"] = timed(partial(recorders["with"].record, reports["with"]))
        found["recording_empty"] = timed(partial(recorders["without"].record, reports["without"]))
        found["meter"] = (reports["with"].seconds["diagnostics"],) * 2
        if i:  # the first round warms up
            rounds.append(found)
    result: dict[str, Any] = {
        "rounds": num_rounds,
        "row_bytes": bytes_of,
        "response_tokens": reports["with"].num_tokens,
    }
    for kind, which in (("wall", 0), ("cpu", 1)):
        medians = {name: statistics.median(found[name][which] for found in rounds) for name in rounds[0]}
        added = medians["meter"] + medians["recording"] - medians["recording_empty"]
        result[kind] = {
            "with_s": round(medians["with"], 5),
            "without_s": round(medians["without"], 5),
            "share": round(statistics.median(f["with"][which] / f["without"][which] for f in rounds) - 1, 4),
            "added_s": round(added, 6),
            "diagnostics_share": round(added / medians["without"], 4),
        }
    return result


def large(num_rounds: int) -> dict[str, Any]:
    """The meter on columns of 256 groups of 8 responses of about 2,000 tokens; a quarter is the last mini-batch."""
    batch = make_batch(256, (1000, 3001), 32000)
    config = load_config([], ["--preset", "bapo"])
    columns = columns_of(batch, config)
    rng = np.random.default_rng(1)
    theta_t_M = (columns.rollout_logprobs_M + rng.normal(0, 0.02, len(columns.token_ids_M))).astype(np.float32)
    newest_M = np.where(np.repeat(columns.group_R % 4 == 0, columns.lengths_R), theta_t_M, np.nan).astype(np.float32)
    recorder = Recorder(config, batch)

    def measure() -> None:
        diagnosis = diagnose(batch, columns, theta_t_M, newest_M, eps=config.loss.advantage_eps)
        recorder.record(UpdateReport(lr=0.0, minibatches=(), num_tokens=0, diagnosis=diagnosis))

    found = [timed(measure) for _ in range(num_rounds + 1)][1:]
    wall, cpu = (statistics.median(pair[which] for pair in found) for which in (0, 1))
    tokens = len(columns.token_ids_M)
    return {
        "rounds": num_rounds,
        "response_tokens": tokens,
        "wall_s": round(wall, 5),
        "cpu_s": round(cpu, 5),
        "max_tokens_per_s": round(TARGET * tokens / wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {"target": TARGET, "demo": demo(args.rounds), "large": large(args.rounds)}
    shares = [found["demo"][kind]["diagnostics_share"] for kind in ("wall", "cpu")]  # type: ignore[index]
    text = json.dumps(found | {"reached": max(shares) <= TARGET}, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
