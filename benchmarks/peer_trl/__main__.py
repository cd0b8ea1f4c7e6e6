"""Our `grpo` preset against TRL's GRPOTrainer on the same work, alternating on one machine.

    python3.11 -m venv /tmp/trl && /tmp/trl/bin/pip install -r benchmarks/peer_trl/requirements.txt
    python -m benchmarks.peer_trl --trl-python /tmp/trl/bin/python --steps 100 --rounds 2 --out peer.json

Work per step: 32 prompts x 8 responses of at most 64 tokens, 4 updates, fp32, the shipped 0.6 M model. TRL runs as its
documentation says for CPUs, with two threads; ours has one thread in the engine and one in the learner. With --device
cuda both use bfloat16 and vLLM on one GPU.
Steady state: median seconds per step behind the first ten.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.training import median, train

WARM_STEPS = 10
RESPONSES = 256
ON_ONE_GPU = [
    "--learner.device", "cuda", "--learner.gpus", "[0]", "--rollout.gpus", "[0]", "--model.dtype", "bfloat16",
    "--rollout.engine_options", "{ gpu_memory_utilization = 0.4, kv_cache_memory_bytes = 4294967296 }",
]  # fmt: skip
"""Our side on a GPU: learner and engine share the first one, as TRL's colocated vLLM does."""


def line(step_ends: list[float], total_s: float) -> dict[str, Any]:
    """Figures of one side. `step_ends`: seconds since the command was given."""
    steps = [after - before for before, after in zip(step_ends[WARM_STEPS:], step_ends[WARM_STEPS + 1 :], strict=False)]
    mean = (step_ends[-1] - step_ends[WARM_STEPS]) / len(steps)
    return {
        "steps": len(step_ends),
        "first_step_s": round(step_ends[0], 2),
        "total_s": round(total_s, 2),
        "step_s_median": median(steps),
        "step_s_mean": round(mean, 4),
        "responses_per_s": round(RESPONSES / mean, 1),
    }


def trl_side(python: str, steps: int, out: Path, device: str) -> dict[str, Any]:
    """Run TRL in its own environment."""
    command = [python, "-m", "benchmarks.peer_trl.trl_side", "--steps", str(steps), "--out", str(out)]
    command += ["--device", device]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run(command, check=True, env=environment | {"PYTHONPATH": os.getcwd()}, stdout=subprocess.DEVNULL)
    result = json.loads(out.read_text())
    return line(result["step_ends"], result["total_s"]) | {"reward_last": result["rewards"][-1:]}


def our_side(steps: int, name: str, root: Path, device: str) -> dict[str, Any]:
    """Run `bapo train` with the same work."""
    overrides = ["--run.num_steps", str(steps), *(ON_ONE_GPU if device == "cuda" else [])]
    finished = train("benchmarks/peer_trl/grpo.toml", name, overrides, root=root)
    ends = [row["time"] - finished.started_at for row in finished.metrics]
    return line(ends, finished.wall_s) | {"reward_last": [finished.metrics[-1]["reward_mean"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--root", type=Path, default=Path("outputs/peer"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rounds = []
    for index in range(args.rounds):
        ours = our_side(args.steps, f"ours-{index}", args.root, args.device)
        trl = trl_side(args.trl_python, args.steps, args.root / f"trl-{index}.json", args.device)
        rounds.append({"bapo": ours, "trl": trl, "ratio": ours["responses_per_s"] / trl["responses_per_s"]})
        result = {"rounds": rounds, "ratio": median([entry["ratio"] for entry in rounds])}
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
