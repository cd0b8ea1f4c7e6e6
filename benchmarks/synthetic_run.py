"""A run directory of any size without a model: made-up rewards, real batches.

    python -m benchmarks.synthetic_run FOLDER [--steps 1000] [--batch-size 100] [--prompts 4000]

Each prompt has an ability that grows with the steps; the responses of its groups are coins with that bias. What trains,
what is in B_bad and B_high and what the thresholds are is decided by the real composer, so every rule that holds for
the records of a run holds here. Curves of the learner (loss, entropy, phases, distances) are made up.

Default: 1,000 steps with 100 fresh groups each, so 10^5 groups and the re-evaluated ones on top.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from bapo.config.load import dump_toml, load_config
from bapo.config.tree import Config
from bapo.core.statistics import INTERVAL, estimate
from bapo.core.types import GroupResult, Origin, Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.recording import RecordedStep
from bapo.whatif.simulation import SimulatedStep, replayed

HELD_OUT = ("easy", "hard")
NUM_HELD_OUT, NUM_SAMPLES = 64, 8


class SyntheticRun:
    """Step by step what a run would have recorded."""

    def __init__(self, config: Config, *, num_prompts: int, seed: int = 1) -> None:
        self._config, self._rng, self._num_prompts = config, Random(seed), num_prompts
        self._abilities = [self._rng.betavariate(0.7, 1.6) for _ in range(num_prompts)]
        self._number = 0
        self._asked: RecordedStep | None = None
        self._replay = replayed(self._coming(), config)
        self._last: SimulatedStep | None = None
        self._kept: dict[str, GroupResult] = {}
        """Groups that B_high holds."""

    def step(self) -> tuple[dict[str, Any], list[GroupResult]]:
        """(row of metrics.jsonl, every group that the assembly looked at) of the next step."""
        self._number += 1
        new = [*self._fresh(), *self._reevaluated()]
        self._asked = RecordedStep(step=self._number, results=tuple(new))
        self._last = found = next(self._replay)
        origins = found.decision.origins
        results = [
            replace(result, origin=origins.get(result.group_id), reason=_reason(found, result)) for result in new
        ]
        again = [self._kept[name] for name, origin in origins.items() if origin is Origin.X3 and name in self._kept]
        results += [replace(result, origin=Origin.X3, reason="reused") for result in again]
        known = self._kept | {result.group_id: result for result in new}
        self._kept = {stat.group_id: known[stat.group_id] for stat in found.decision.high}
        return self._row(found, results), results

    def evaluations(self) -> list[dict[str, Any]]:
        """Rows of evaluations.jsonl for the weights after the newest step."""
        return [self._evaluation(split, 0.25 if split == "hard" else 0.0) for split in HELD_OUT]

    def _coming(self) -> Iterator[RecordedStep]:
        while self._asked is not None:
            yield self._asked

    def _fresh(self) -> Iterator[GroupResult]:
        size = self._config.algorithm.batch_size
        version = (
            self._number - self._number % self._config.cadence.weight_sync_interval
            if self._number >= self._config.cadence.weight_sync_interval
            else 1
        )
        for place in range(size):
            prompt = ((self._number - 1) * size + place) % self._num_prompts
            yield self._group(f"fresh-{(self._number - 1) * size + place:08d}", prompt, version, Purpose.FRESH)

    def _reevaluated(self) -> Iterator[GroupResult]:
        """B_bad, asked again with this step's weights, every m steps."""
        if self._last is None or self._number % self._config.cadence.reevaluation_interval:
            return
        fresh = {((self._number - 1) * self._config.algorithm.batch_size + i) % self._num_prompts
                 for i in range(self._config.algorithm.batch_size)}  # fmt: skip
        for entry in self._last.decision.bad:
            prompt = int(entry.prompt_id.removeprefix("prompt-"))
            if prompt not in fresh:
                name = f"reevaluate-{self._number}-{entry.prompt_id}"
                yield self._group(name, prompt, self._number, Purpose.REEVALUATE)

    def _group(self, name: str, prompt: int, version: int, purpose: Purpose) -> GroupResult:
        size, chance = self._config.algorithm.group_size, self._chance(self._abilities[prompt])
        rewards = tuple(float(self._rng.random() < chance) for _ in range(size))
        return GroupResult(
            group_id=name, prompt_id=f"prompt-{prompt:06d}", purpose=purpose, policy_version=version, rewards=rewards,
            origin=None, reason="", birth=self._number, worker_id=f"worker-{prompt % 4}", num_tokens=40 * size,
            sample_s=self._rng.uniform(0.5, 2.0), grade_s=self._rng.uniform(0.001, 0.01),
            claimed_at=1000.0 + 4.0 * self._number,
        )  # fmt: skip

    def _chance(self, ability: float) -> float:
        return min(0.98, ability + 0.35 * self._number / (self._number + 400))

    def _row(self, found: SimulatedStep, results: list[GroupResult]) -> dict[str, Any]:
        rng, decision, number = self._rng, found.decision, self._number
        row: dict[str, Any] = {
            "step": number, "policy_version": number, "reward_mean": decision.r_tot, **decision.reported,
            "batch_size": self._config.algorithm.batch_size, "loss": rng.gauss(0.0, 0.02),
            "grad_norm": rng.lognormvariate(0.0, 0.3),
            "entropy": 0.45 - 0.1 * number / (number + 300) + rng.gauss(0.0, 0.01), "clip_ratio": rng.uniform(0, 0.01),
            "kl": rng.uniform(0.0, 0.05), "ratio_max": 1.0 + rng.expovariate(1.0), "k1": 2.02, "k2": 2.02, "k3": 1.3,
            "lr": 1e-5, "num_tokens": 320 * len(results), "num_active_tokens": 320 * len(results), "num_updates": 4,
            "prox_s": rng.uniform(0.2, 0.4), "update_s": rng.uniform(1.0, 1.6), "diagnostics_s": 0.01,
            "sync_s": 0.5 if number % self._config.cadence.weight_sync_interval == 0 else 0.0, "checkpoint_s": 0.0,
            "wait_batch_s": rng.expovariate(1.0), "tokens_per_s": 2000.0, "time": 1000.0 + 4.0 * number,
            "divergences": [], "bounds": [], "warning": None,
        }  # fmt: skip
        row["step_s"] = 0.1 + sum(row[f"{phase}_s"] for phase in ("prox", "update", "sync", "wait_batch"))
        for origin in Origin:
            self._add_subset(row, origin, [result for result in results if result.origin is origin])
        return row

    def _add_subset(self, row: dict[str, Any], origin: Origin, results: list[GroupResult]) -> None:
        """Columns of one subset; its cells of the theorem meter have one age only."""
        stale = [self._number - result.policy_version for result in results]
        name = origin.value
        row[name] = len(results)
        row[f"staleness_{name}_mean"] = sum(stale) / len(stale) if stale else None
        row[f"staleness_{name}_max"] = max(stale, default=None)
        tv = 0.008 * (1 + max(stale, default=0)) * self._rng.uniform(0.7, 1.3)
        numbers = {"tv_tok": tv, "ess": max(0.05, 1 - 10 * tv), "delta_max": min(1.0, 12 * tv)}
        for short, long in (("tv", "tv_tok"), ("ess", "ess"), ("delta", "delta_max")):
            row[f"{short}_{name}"] = numbers[long] if results else None
        if results:
            cell = {"policy": "theta_t", "origin": name, "num_groups": len(results), **numbers}
            row["divergences"] += [cell | {"age": None}, cell | {"age": min(stale)}]
            row["bounds"].append({
                "origin": name, "num_groups": len(results), "gain": tv, "penalty_theta": 5 * tv, "penalty_current": tv,
                "paper": -11 * tv, "paper_vacuous": True, "tight": -5 * tv, "tight_vacuous": True,
            })  # fmt: skip

    def _evaluation(self, split: str, harder: float) -> dict[str, Any]:
        rewards = {
            f"{split}-{index}": [
                float(self._rng.random() < self._chance(max(0.0, index / NUM_HELD_OUT / 2 - harder)))
                for _ in range(NUM_SAMPLES)
            ]
            for index in range(NUM_HELD_OUT)
        }
        found = estimate([sum(own) / len(own) for own in rewards.values()])
        return {
            "split": split, "version": self._number + 1, "step": self._number, "accuracy": found.mean,
            "low": found.low, "high": found.high, "interval": INTERVAL, "num_prompts": NUM_HELD_OUT, "num_dropped": 0,
            "num_samples": NUM_SAMPLES, "truncated_share": 0.0, "mean_tokens": 40.0, "rewards": rewards,
        }  # fmt: skip


def _reason(found: SimulatedStep, result: GroupResult) -> str:
    return found.decision.reasons[result.group_id]


def create(path: Path, *, num_steps: int, batch_size: int, group_size: int = 8) -> tuple[RunDirectory, Config]:
    """A run directory without steps."""
    settings = {
        "run.name": path.name, "run.root": str(path.parent), "run.num_steps": num_steps,
        "algorithm.batch_size": batch_size, "algorithm.group_size": group_size, "learner.minibatch_size": batch_size,
        "algorithm.bad_capacity": batch_size, "rollout.num_workers": 1, "learner.microbatch_tokens": 20000,
    }  # fmt: skip
    config = load_config(["bapo"], [part for key, value in settings.items() for part in (f"--{key}", str(value))])
    return RunDirectory.create(path, dump_toml(config)), config


def extend(run: RunDirectory, made: SyntheticRun, num_steps: int, *, measure_every: int = 50) -> None:
    """Append steps, and a measurement now and then, as the learner and the evaluator would."""
    for _ in range(num_steps):
        row, results = made.step()
        run.write_groups(row["step"], results)
        run.append_metrics(row)
        if row["step"] % measure_every == 0:
            for measured in made.evaluations():
                run.append_evaluation(measured)


def main() -> None:
    """Write a finished run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=4000)
    flags = parser.parse_args()
    run, config = create(flags.folder, num_steps=flags.steps, batch_size=flags.batch_size)
    made = SyntheticRun(config, num_prompts=flags.prompts)
    for measured in made.evaluations():
        run.append_evaluation(measured)
    extend(run, made, flags.steps)
    run.update_run(status="finished", started_at=1000.0, ended_at=1000.0 + 4.0 * flags.steps)
    print(f"{run.path}: {flags.steps} steps")


if __name__ == "__main__":
    main()
