"""Seconds and memory of a weight update into the real vLLM: an adapter of LoRA, merged there, next to all weights.

    python -m benchmarks.lora_update [--updates 20] [--dtype bfloat16] [--tiny]

A Qwen2 of 100 M random parameters on the CPU (--tiny: of 0.1 M). Every update changes what trains, is published as in a
run, and is loaded and verified as by a worker: digest, weights, kernels, canary. Each way is a process of its own, one
after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

from bapo.config.tree import Config
from bapo.core.types import WeightUpdate
from learner.publish_weights import WeightPublisher
from rollout_server.engines import vllm
from rollout_server.weights.canary import Agreement
from rollout_server.weights.receive import check_file, load_verified
from tests.support.learner import ALONE, FakeFleet, learner_config, tiny_policy
from tests.support.lora import write_model
from tests.support.tiny_model import VOCAB_SIZE

SHAPE = {
    "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 16000, "tie_word_embeddings": True,
}  # fmt: skip
TINY = SHAPE | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCAB_SIZE,
}  # fmt: skip
STEP = 1e-3
LORA = {"rank": 16, "alpha": 32.0}


def measure(config: Config, folder: Path, updates: int) -> dict[str, Any]:
    """Medians of the seconds of learner and worker, and resident memory of both in this one process, in MiB."""
    os.environ.update(vllm.ENVIRONMENT)
    policy, engine, agreement = tiny_policy(config), vllm.make_engine(config), Agreement()
    fleet, worker_s, learner_s, undecided, memory = FakeFleet(), [], [], 0, []
    began, rng = 0.0, torch.Generator().manual_seed(1)

    def load(update: WeightUpdate) -> None:
        nonlocal undecided
        learner_s.append(time.perf_counter() - began)
        start = time.perf_counter()
        check_file(update)
        undecided += bool(load_verified(engine, update, agreement))
        worker_s.append(time.perf_counter() - start)

    fleet.on_update = load
    publisher = WeightPublisher(config=config, policy=policy, world=ALONE, folder=folder / "weights", fleet=fleet)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for version in range(1, updates + 1):
        with torch.no_grad():
            for parameter in trained:
                mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                mine.add_(torch.randn(mine.shape, generator=rng).sign(), alpha=STEP)
        began = time.perf_counter()
        publisher.publish(version)
        publisher.wait()
        memory.append(psutil.Process().memory_info().rss >> 20)
    engine.close()
    return {
        "file_mb": fleet.updates[-1].num_bytes / 1e6,
        "learner_s": statistics.median(learner_s[1:]),
        "worker_s": statistics.median(worker_s[1:]),
        "undecided": undecided,
        "memory_mib": [memory[min(9, len(memory) - 1)], memory[-1]],
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--way", choices=("adapter", "weights"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.way:
        model = {"path": str(arguments.folder / "model"), "dtype": arguments.dtype}
        lora = {"lora": LORA} if arguments.way == "adapter" else {}
        config = learner_config(arguments.folder / "model", model=model | lora, cadence={"max_steps_ahead": 0})
        print(json.dumps(measure(config, arguments.folder / arguments.way, arguments.updates)))
        return
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name) / "model", Qwen2Config(**(TINY if arguments.tiny else SHAPE)))
        for way in ("weights", "adapter"):
            command = [sys.executable, "-m", "benchmarks.lora_update", *sys.argv[1:], "--way", way, "--folder", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{way:<8} {found['parameters'] / 1e6:6.1f} M parameters, file {found['file_mb']:7.2f} MB, learner "
                f"{found['learner_s']:.3f} s, worker {found['worker_s']:.3f} s, undecided {found['undecided']} of "
                f"{arguments.updates}, memory after 10 and {arguments.updates} updates "
                f"{' and '.join(map(str, found['memory_mib']))} MiB"
            )


if __name__ == "__main__":
    main()
