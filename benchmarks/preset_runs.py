"""Does a preset learn? Short real runs of those that no study has: shipped model, Countdown, vLLM, the demo's sizes.

    python -m benchmarks.preset_runs --out preset_runs.json                     about two minutes for each preset
    python -m benchmarks.preset_runs --only gspo --only areal --steps 40 --out preset_runs.json

For each preset the mean training reward of the first and of the last 10 steps, and their difference with a 95 %
interval (Welch, over steps: each has 32 prompts of its own); and the difference on 1,000 held-out problems before and
after, which sees smaller ones, for it is paired. What a finished run gave is in the file, so the same command again
makes only what is missing, and resumes a run that was cut off. Method and loss are the preset's own; sizes and learning
rates are the model's. Prompts come once, but for `arpo`, and where a selector chooses.

It says whether a method moves the reward up at all, not which one is better: a selector that learns takes easier or
harder prompts than others see (`chosen`), and a gain in reward may be sharpening, for which see the entropy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo.config.layers import preset_names
from bapo.config.load import load_config
from bapo.core.statistics import Estimate, difference, shared_means
from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.training import resume, train
from studies.significance import TAIL, student_quantile

WITHOUT_A_STUDY = (
    "gspo", "cispo", "dr-grpo", "tis", "tis-sequence", "tis-mask", "tis-geometric-mask", "areal", "dppo", "kimi",
    "arpo", "luffy", "relift", "ppo", "ba-ppo", "balanced-clip",
)  # fmt: skip
SIZES: Mapping[str, object] = {
    "model.path": "models/countdown-tiny", "model.dtype": "float32", "task.name": "countdown",
    "task.options": '{num_train = 2000, cd3_share = 0.25, num_held_out = 1000, held_out = ["cd34", "cd4"]}',
    "algorithm.batch_size": 32, "rollout.num_workers": 1, "rollout.max_prompt_tokens": 32,
    "rollout.max_response_tokens": 64, "rollout.max_groups_in_flight": 48, "learner.lr": 1e-4,
    "learner.betas": "[0.9, 0.99]", "learner.weight_decay": 0.0, "learner.minibatch_size": 8,
    "learner.microbatch_tokens": 8192, "checkpoint.every": 20,
    "critic.lr": 1e-3, "supervised.lr": 1e-4,
    "evaluation.every": 0, "evaluation.num_prompts_final": 500, "dashboard.enabled": "false",
    **{f"{section}.port": 0 for section in ("buffer", "scheduler", "learner", "evaluation", "rollout")},
}  # fmt: skip
"""Those of deploy/configs/demo.toml; learning rates are the presets' times 100."""
OWN: Mapping[str, Mapping[str, object]] = {
    "arpo": {"task.options.num_train": 320},  # it injects stored successes of a prompt that comes again
    "ba-ppo": {"algorithm.bad_capacity": 32, "algorithm.max_reevaluated": 16},
    "dapo": {"shaping.overlong_cache": 12},
    "kimi": {"rollout.generation_budget": 16, "shaping.length_warmup_steps": 13},
}
"""What a preset scales with the length of responses, the batch or the run: as many times smaller as those."""
WINDOW = 10


def gain(rewards: Sequence[float], window: int = WINDOW) -> Estimate:
    """Mean of the last `window` values less that of the first, with Welch's 95 % interval.

    Raises: ValueError when both would share a value.
    """
    if len(rewards) < 2 * window:
        raise ValueError(f"{len(rewards)} steps have no first and last {window} that are apart")
    first, last = rewards[:window], rewards[-window:]
    parts = [statistics.variance(part) / window for part in (first, last)]
    mean, variance = statistics.fmean(last) - statistics.fmean(first), sum(parts)
    if variance == 0.0:
        return Estimate(mean, mean, mean)
    freedom = variance**2 * (window - 1) / sum(part**2 for part in parts)
    half = student_quantile(TAIL, freedom) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


def held_out_gain(evaluations: Sequence[Mapping[str, Any]]) -> Estimate:
    """Accuracy of the last measurement less that of the first, over the problems of all splits that both have.

    Raises: ValueError with fewer than two such problems.
    """
    before: list[float] = []
    after: list[float] = []
    for split in dict.fromkeys(row["split"] for row in evaluations):
        rows = sorted((row for row in evaluations if row["split"] == split), key=lambda row: int(row["version"]))
        first, last = shared_means([rows[0]["rewards"], rows[-1]["rewards"]])
        before, after = [*before, *first], [*after, *last]
    return difference(before, after)


def made(name: str, steps: int, root: Path) -> RunDirectory:
    """The finished run of a preset: found, resumed or started. Raises: RuntimeError."""
    path = root / name
    if not (path / "config.toml").is_file():
        settings = {**SIZES, **OWN.get(name, {}), "run.num_steps": steps}
        return train(name, name, [f"--{key}={value}" for key, value in settings.items()], root=root).run
    run = RunDirectory.open(path)
    return run if run.read_run().get("status") == "finished" else resume(name, root=root).run


def summary(name: str, run: RunDirectory) -> dict[str, Any]:
    """What one run gave."""
    rows = run.read_metrics(whole=True)
    rewards, entropies = ([float(row[key]) for row in rows] for key in ("reward_mean", "entropy"))
    found, held_out = gain(rewards), held_out_gain(run.read_evaluations(whole=True))
    return {
        "steps": len(rows),
        "updates": sum(int(row["num_updates"]) for row in rows),
        "chosen": load_config([name], []).algorithm.selector != "uniform",
        "first": statistics.fmean(rewards[:WINDOW]),
        "last": statistics.fmean(rewards[-WINDOW:]),
        "difference": [found.mean, found.low, found.high],
        "held_out": [held_out.mean, held_out.low, held_out.high],
        "entropy": [statistics.fmean(part) for part in (entropies[:WINDOW], entropies[-WINDOW:])],
        "rewards": rewards,
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Rewards in points, one line per preset."""
    lines = [f"{'preset':20} {'steps':>5} {'first':>6} {'last':>6}  {'difference':19} {'held out':19} entropy"]
    for name, row in results.items():
        if "error" in row:
            lines.append(f"{name:20} failed: {row['error'].splitlines()[0]}")
            continue
        before, after = row["entropy"]
        lines.append(
            f"{name:20} {row['steps']:5} {100 * row['first']:6.1f} {100 * row['last']:6.1f}  "
            f"{points(row['difference']):19} {points(row['held_out']):19} {before:.3f} -> {after:.3f}"
            f"{'  chosen' if row['chosen'] else ''}"
        )
    return "\n".join(lines)


def points(found: Sequence[float]) -> str:
    """ "+7.0 [+5.4, +8.5]"."""
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=preset_names(), metavar="NAME", help="may be repeated")
    parser.add_argument("--steps", type=int, default=40, help=f"at least {2 * WINDOW}")
    parser.add_argument("--root", type=Path, default=Path("outputs/preset-runs"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.steps < 2 * WINDOW:
        parser.error(f"--steps {args.steps}: write at least {2 * WINDOW}")
    results: dict[str, dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.only or WITHOUT_A_STUDY:
        if results.get(name, {}).get("steps") == args.steps:
            continue
        try:
            results[name] = summary(name, made(name, args.steps, args.root / f"{args.steps}-steps"))
        except RuntimeError as error:
            results[name] = {"error": str(error)}
        args.out.write_text(json.dumps(results, indent=1))
        print(table({name: results[name]}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
