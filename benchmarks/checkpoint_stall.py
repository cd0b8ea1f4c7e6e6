"""Seconds for which a checkpoint blocks the learner: shards in the background, shards in line, whole tensors in line.

    python -m benchmarks.checkpoint_stall --parameters 100 --repeats 3

The tensors are random: weights and two moments of `--parameters` million parameters, in float32. `whole` is what the
learner did before it wrote shards: the full weights and moments in two safetensors files, written and made durable in
line. Paused: time for which a write in the background keeps the training thread from running, beyond 10 ms at a time.
The first checkpoint in the background, which allocates its copy, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bapo.runtime.run_directory.files import to_disk
from learner.distributed.shard_files import ShardWriter
from learner.distributed.world import World

LAYER = 4_000_000
"""Parameters of one tensor."""
POLL_S, LATE_S = 0.001, 0.01
Seconds = tuple[float, float, float]
"""Blocked, paused afterwards, and until the checkpoint is on the disk."""


def make_tensors(parameters: int) -> dict[str, Tensor]:
    """Weights and moments by name."""
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {f"{kind}/{layer}": torch.randn(LAYER) for kind in kinds for layer in range(max(1, parameters // LAYER))}


def whole(tensors: dict[str, Tensor], folder: Path) -> Seconds:
    """As the learner did."""
    start = time.perf_counter()
    for part in ("model", "optimizer"):
        path = folder / f"{part}.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if name.startswith(part)}, path)
        to_disk(path)
    blocked_s = time.perf_counter() - start
    return blocked_s, 0.0, blocked_s


def shards(writer: ShardWriter, tensors: dict[str, Tensor], folder: Path) -> Seconds:
    """As the learner does."""
    (folder / "learner").mkdir()
    start = time.perf_counter()
    writer.start(tensors, folder / "learner")
    last = time.perf_counter()
    blocked_s, pause_s = last - start, 0.0
    while not writer.is_done:
        time.sleep(POLL_S)
        now = time.perf_counter()
        pause_s, last = pause_s + max(0.0, now - last - LATE_S), now
    error = writer.wait()
    if error is not None:
        raise error
    return blocked_s, pause_s, time.perf_counter() - start


def main() -> None:
    """Print the medians; the ways take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100.0, help="in millions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    options = parser.parse_args()
    tensors = make_tensors(int(options.parameters * 1e6))
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    ways: dict[str, Callable[[dict[str, Tensor], Path], Seconds]] = {
        "whole, in line": whole,
        "shards, in line": partial(shards, ShardWriter(alone, background=False)),
        "shards, background": partial(shards, ShardWriter(alone, background=True)),
    }
    seconds: dict[str, list[Seconds]] = {way: [] for way in ways}
    for _ in range(1 + options.repeats):
        for way, run in ways.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                seconds[way].append(run(tensors, Path(folder)))
    for way, found in seconds.items():
        blocked_s, pause_s, total_s = (statistics.median(values) for values in zip(*found[1:], strict=True))
        sys.stdout.write(
            f"{way:<20} blocked {blocked_s:7.3f} s   paused {pause_s:6.3f} s   on the disk after {total_s:7.3f} s\n"
        )


if __name__ == "__main__":
    main()
