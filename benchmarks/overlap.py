"""What overlap is worth: wall time of N steps with max_steps_ahead = 0 over 1, alternating in one run.

python -m benchmarks.overlap --steps 30 --rounds 3 --out overlap.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.training import median, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="deploy/configs/demo.toml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count: caches, first batch")
    parser.add_argument("--root", type=Path, default=Path("outputs/overlap"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rounds = []
    for index in range(args.rounds):
        seconds = {}
        for steps_ahead in (0, 1):
            overrides = [
                "--run.num_steps",
                str(args.steps),
                "--cadence.max_steps_ahead",
                str(steps_ahead),
                "--evaluation.every",
                "0",
            ]
            overrides += ["--evaluation.num_prompts_final", "20"]
            finished = train(args.config, f"steps_ahead{steps_ahead}-{index}", overrides, root=args.root)
            seconds[steps_ahead] = sum(finished.step_seconds(args.skip))
        rounds.append({"slack0_s": seconds[0], "slack1_s": seconds[1], "ratio": seconds[0] / seconds[1]})
    result = {"steps": args.steps - args.skip, "rounds": rounds, "ratio": median([r["ratio"] for r in rounds])}
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
