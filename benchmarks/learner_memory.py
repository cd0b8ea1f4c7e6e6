"""What `learner.gradient_checkpointing` saves and costs: peak memory and time of a learner's step, with and without.

    python -m benchmarks.learner_memory [--layers 8] [--width 256] [--budget 4096] [--rounds 3] [--out FILE]

Each figure comes from a fresh process on the CPU in float32, the settings by turns, so that a busy machine hits both
alike. A process makes one step to warm up (AdamW's moments are there then), resets the kernel's mark of its peak
resident memory, and makes another one on the same batch. `activations_mb` is that peak less what was resident before:
activations, gradients and what the log-probs of a chunk need. Seconds are CPU seconds of the second step. Both settings
must give the same loss to the last bit, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from bapo.config.tree import Config
from benchmarks.learner_throughput import WORLD, make_batch
from learner.distributed.stopping import StopFlag
from learner.model.policy import load_policy
from learner.update.update import Updater

VOCAB_SIZE = 218
NUM_GROUPS = 8


def make_model(folder: str, layers: int, width: int) -> None:
    """A random Llama with as much MLP for its width as Qwen2.5 of 1.5 B parameters has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=width, intermediate_size=width * 35 // 6, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def one_step(folder: str, budget: int, *, recompute: bool) -> Mapping[str, Any]:
    """In this process: loss, CPU seconds and memory of the second step."""
    torch.set_num_threads(1)
    config = Config.model_validate(
        {
            "model": {"path": folder},
            "algorithm": {"batch_size": NUM_GROUPS, "group_size": 8},
            "rollout": {"max_response_tokens": 96, "max_prompt_tokens": 32},
            "loss": {"ratio_mode": "direct"},
            "learner": {
                "minibatch_size": NUM_GROUPS, "microbatch_tokens": budget, "device": "cpu",
                "gradient_checkpointing": recompute,
            },
        }
    )  # fmt: skip
    policy = load_policy(folder, config, WORLD)
    updater = Updater(config=config, policy=policy, world=WORLD, stop=StopFlag(), run_path=Path(folder))
    batch = make_batch(NUM_GROUPS, VOCAB_SIZE)
    updater.run(batch)
    updater.optimizer.zero_grad(set_to_none=True)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status_mb("VmRSS"), time.process_time()
    report = updater.run(batch)
    seconds = time.process_time() - start
    return {
        "activations_mb": status_mb("VmHWM") - before,
        "resident_mb": before,
        "seconds": seconds,
        "losses": [result.loss for result in report.minibatches],
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
    }


def status_mb(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024 / 1e6


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """Medians over the rounds, and the ratio of with to without in each."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, args.layers, args.width)
        rounds = [{key: child(folder, args.budget, key) for key in ("without", "with")} for _ in range(args.rounds)]
    losses = {tuple(found["losses"]) for row in rounds for found in row.values()}
    if len(losses) != 1:
        raise SystemExit(f"the losses differ: {losses}")
    return {
        "layers": args.layers,
        "width": args.width,
        "parameters": rounds[0]["with"]["parameters"],
        "microbatch_tokens": args.budget,
        "rounds": args.rounds,
        **{name: figures(rounds, name) for name in ("activations_mb", "resident_mb", "seconds")},
    }


def figures(rounds: list[dict[str, Any]], name: str) -> Mapping[str, Any]:
    """Medians of both, and median, least and most of their ratio."""
    ratios = [row["with"][name] / row["without"][name] for row in rounds]
    medians = {key: round(statistics.median(row[key][name] for row in rounds), 2) for key in ("without", "with")}
    return {**medians, "ratio": [round(f(ratios), 3) for f in (statistics.median, min, max)]}


def child(folder: str, budget: int, setting: str) -> Mapping[str, Any]:
    """`one_step` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learner_memory", "--child", folder, setting, "--budget", str(budget)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--budget", type=int, default=4096, help="packed tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SETTING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    disable_progress_bar()
    if args.child:
        found = one_step(args.child[0], args.budget, recompute=args.child[1] == "with")
        print(json.dumps(found))
        return
    result = json.dumps(measure(args), indent=2)
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
