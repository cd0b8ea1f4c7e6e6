"""Reward curves of our `trl-grpo` preset and of TRL's GRPOTrainer with its own defaults, on the same prompts.

    python3.11 -m venv /tmp/trl && /tmp/trl/bin/pip install -r benchmarks/peer_trl/requirements.txt
    python -m benchmarks.peer_trl.curves --trl-python /tmp/trl/bin/python --out curves.json

Each seed trains both from the shipped 0.6 M model on the same prompts in the same order, one update per step in
float32; what is sampled differs. Prints the mean reward per window of steps over the seeds, and the mean over the seeds
of (ours less TRL's) with its 95 % interval (Student's t over the seeds). Finished seeds are in --root and are not run
again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo.algorithms.selectors.uniform import epoch_order, position
from bapo.tasks.countdown import CountdownOptions, CountdownTask
from benchmarks.training import train
from studies.significance import TAIL, student_quantile

CONFIG = "benchmarks/peer_trl/curves.toml"
NUM_TRAIN = 2000
"""Prompts of CONFIG's task."""


def prompts_of(seed: int, steps: int, batch_size: int) -> list[str]:
    """The prompts of every step of a run with this seed, in order."""
    task = CountdownTask(CountdownOptions(num_train=NUM_TRAIN))
    texts = [prompt.text for prompt in task.prompts("train")]
    found = []
    for cursor in range(steps * batch_size):
        epoch, place = position(cursor, NUM_TRAIN, batch_size)
        found.append(texts[epoch_order(seed, epoch, NUM_TRAIN)[place]])
    return found


def our_rewards(seed: int, args: argparse.Namespace) -> list[float]:
    """Mean reward of the fresh responses of every step."""
    overrides = [
        "--run.seed", str(seed), "--run.num_steps", str(args.steps), "--algorithm.batch_size", str(args.batch_size),
        "--learner.lr", str(args.lr),
    ]  # fmt: skip
    return [row["reward_mean"] for row in train(CONFIG, f"ours-{seed}", overrides, root=args.root).metrics]


def trl_rewards(seed: int, args: argparse.Namespace) -> list[float]:
    """The same of TRL, in its own environment."""
    prompts, out = args.root / f"prompts-{seed}.json", args.root / f"trl-{seed}.json"
    prompts.write_text(json.dumps(prompts_of(seed, args.steps, args.batch_size)))
    command = [
        args.trl_python, "-m", "benchmarks.peer_trl.trl_side", "--steps", str(args.steps), "--lr", str(args.lr),
        "--prompts", str(prompts), "--seed", str(seed), "--threads", str(args.threads), "--out", str(out),
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run(command, check=True, env=environment | {"PYTHONPATH": os.getcwd()}, stdout=subprocess.DEVNULL)
    rewards: list[float] = json.loads(out.read_text())["rewards"]
    return rewards


def of_seed(seed: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Both curves of a seed: from an earlier call, or run now."""
    kept: Path = args.root / f"curves-{seed}.json"
    if not kept.exists():
        args.root.mkdir(parents=True, exist_ok=True)
        curves = {"ours": our_rewards(seed, args), "trl": trl_rewards(seed, args)}
        kept.write_text(json.dumps(curves))
    found: dict[str, list[float]] = json.loads(kept.read_text())
    return found


def windows(curves: Sequence[dict[str, list[float]]], width: int) -> list[dict[str, Any]]:
    """One row per window of steps: both means over the seeds, and the difference with its 95 % interval."""
    rows = []
    for start in range(0, min(len(curve) for pair in curves for curve in pair.values()), width):
        means = [
            {side: statistics.fmean(curve[start : start + width]) for side, curve in pair.items()} for pair in curves
        ]
        differences = [mean["ours"] - mean["trl"] for mean in means]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        half = student_quantile(TAIL, len(differences) - 1) * error
        middle = statistics.fmean(differences)
        rows.append(
            {
                "steps": [start + 1, start + width],
                **{side: statistics.fmean(mean[side] for mean in means) for side in ("ours", "trl")},
                "difference": middle,
                "interval": [middle - half, middle + half],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, rewards in %."""
    lines = ["| steps | `trl-grpo` | TRL | difference in points |", "|---|---|---|---|"]
    for row in rows:
        low, high = (100 * bound for bound in row["interval"])
        first, last = row["steps"]
        lines.append(
            f"| {first} to {last} | {100 * row['ours']:.1f} | {100 * row['trl']:.1f} | "
            f"{100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}] |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts per step, of 8 responses each")
    parser.add_argument("--lr", type=float, default=3e-4, help="initial rate; both decrease it linearly to 0")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of TRL; ours has one per process")
    parser.add_argument("--window", type=int, default=10, help="steps per row of the table")
    parser.add_argument("--root", type=Path, default=Path("outputs/peer-curves"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    curves = [of_seed(seed, args) for seed in range(1, args.seeds + 1)]
    rows = windows(curves, args.window)
    args.out.write_text(json.dumps({"rows": rows, "curves": curves}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
