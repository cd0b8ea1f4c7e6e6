"""Seconds that the learner is blocked by a weight update: one after the other against in the background.

    python -m benchmarks.publish_stall [--dtype bfloat16] [--updates 5] [--step-s 4]

A model of 100 M random parameters on the CPU; a step is a matrix product that is repeated for `--step-s` seconds. The
fleet is one worker in this process that hashes the file, as a worker of another process would. Both ways alternate, and
both begin with the canary: a forward pass of 32 tokens, which on a CPU is most of what is left.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from bapo.config.tree import Config
from bapo.core.types import WeightUpdate
from bapo.runtime.file_digest import digest_of
from learner.canary import make_canary
from learner.distributed.world import World
from learner.model.policy import Policy, load_policy
from learner.publish_weights import WeightPublisher, gather_weights
from tests.support.learner import FakeFleet, learner_config

SHAPE = {
    "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 16000, "tie_word_embeddings": True,
}  # fmt: skip


def serial_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_serially(policy: Policy, dtype: str, path: Path) -> None:
    """The learner waits for everything: gather, canary, write, digest, and the worker's digest."""
    tensors = gather_weights(policy, getattr(torch, dtype))
    make_canary(policy, tuple(range(4, 36)), dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    assert serial_sha256(path) == serial_sha256(path), "by the learner, then by the worker"


def train(policy: Policy, seconds: float) -> int:
    """Change every parameter, then compute. Returns: the number of products."""
    end, products = time.perf_counter() + seconds, 0
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1e-3)
        matrix = torch.ones(512, 512)
        while time.perf_counter() < end:
            matrix @ matrix
            products += 1
    return products


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(config: Config, folder: Path, updates: int, step_s: float) -> None:
    policy = load_policy(config.model.path, config, World(rank=0, size=1, device=torch.device("cpu")))
    fleet = FakeFleet()

    def verify(update: WeightUpdate) -> None:
        assert digest_of(Path(update.path)) == update.digest

    fleet.on_update = verify
    world = World(rank=0, size=1, device=torch.device("cpu"))
    publisher = WeightPublisher(config=config, policy=policy, world=world, folder=folder / "weights", fleet=fleet)
    publisher.publish(1)
    before, after, canary, alone, together, phases = [], [], [], [], [], []
    for version in range(2, updates + 2):
        canary.append(timed(lambda: make_canary(policy, tuple(range(4, 36)), config.model.dtype)))
        before.append(timed(lambda: publish_serially(policy, config.model.dtype, folder / "serial.safetensors")))
        alone.append(train(policy, step_s))
        after.append(timed(lambda version=version: publisher.publish(version)))  # type: ignore[misc]
        together.append(train(policy, step_s))
        after[-1] += timed(publisher.wait)  # as the next update would
        phases.append(publisher.take_seconds())
    num = sum(parameter.numel() for parameter in policy.parameters())
    old, new, both = (statistics.median(each) for each in (before, after, canary))
    print(f"{num / 1e6:.0f} M parameters, {config.model.dtype}, {updates} updates, medians")
    print(f"blocked, one after the other   {old:.3f} s")
    print(f"blocked, in the background     {new:.3f} s   {old / new:.1f} times less")
    less = (old - both) / (new - both)
    print(f"without the canary             {old - both:.3f} s, {new - both:.3f} s   {less:.1f} times less")
    for phase in phases[0]:
        print(f"    {phase:<8} {statistics.median(each[phase] for each in phases):.3f} s")
    print(f"products in the step meanwhile {statistics.median(together) / statistics.median(alone):.2f} of those alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=4.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE)).save_pretrained(folder / "model")
        config = learner_config(folder / "model", model={"dtype": arguments.dtype})
        measure(config, folder, arguments.updates, arguments.step_s)


if __name__ == "__main__":
    main()
