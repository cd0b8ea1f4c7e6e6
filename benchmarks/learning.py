"""Does it learn? Held-out accuracy before and after, for several methods and seeds, by the real pipeline.

    python -m benchmarks.learning --seeds 0 1 2 --methods bapo grpo --out learning.json

Every run trains the same model for the same number of steps and is measured on the same held-out problems.
The interval of a method's change is over all its seeds' problems, paired by problem. Runs that have ended in --root
are not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bapo.statistics import difference, estimate
from benchmarks.training import FinishedRun, ended, train


def accuracies(finished: FinishedRun) -> dict[str, dict[str, list[float]]]:
    """split -> {before, after}: mean reward of each held-out problem; both lists in the order of problem ids."""
    result: dict[str, dict[str, list[float]]] = {}
    for row in finished.run.read_evaluations():
        means = [sum(rewards) / len(rewards) for _, rewards in sorted(row["rewards"].items())]
        split = result.setdefault(row["split"], {"before": means})
        split["after"] = means  # rows are in the order of versions, so the last one stays
    return result


def one_run(method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train once and say what came of it."""
    overrides = ["--run.seed", str(seed), "--task.options.seed", str(seed)]
    if args.steps:
        overrides += ["--run.num_steps", str(args.steps)]
    name = f"{method}-seed{seed}"
    finished = ended(args.root / name) or train(f"deploy/configs/{method}.toml", name, overrides, root=args.root)
    metrics = finished.metrics
    return {
        "method": method,
        "seed": seed,
        "wall_s": round(finished.wall_s, 1),
        "steps": len(metrics),
        "x1": sum(row["x1"] for row in metrics),
        "x2": sum(row["x2"] for row in metrics),
        "x3": sum(row["x3"] for row in metrics),
        "accuracies": accuracies(finished),
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per method and split, all seeds pooled."""
    lines = []
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        for split in own[0]["accuracies"]:
            before = [mean for run in own for mean in run["accuracies"][split]["before"]]
            after = [mean for run in own for mean in run["accuracies"][split]["after"]]
            parts = {"before": estimate(before), "after": estimate(after), "change": difference(before, after)}
            per_seed = [
                round(sum(run["accuracies"][split]["after"]) / len(run["accuracies"][split]["after"]), 4) for run in own
            ]
            line: dict[str, Any] = {"method": method, "split": split, "seeds": len(own), "after_by_seed": per_seed}
            lines.append(line | {k: [round(x, 4) for x in (v.mean, v.low, v.high)] for k, v in parts.items()})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["demo", "demo-grpo"], help="files of deploy/configs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="0: what the configuration says")
    parser.add_argument("--root", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for method in args.methods:
            runs.append(one_run(method, seed, args))
            slim = [{k: v for k, v in run.items() if k != "accuracies"} for run in runs]
            args.out.write_text(json.dumps({"summary": summary(runs), "runs": slim}, indent=1))
    for line in summary(runs):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
