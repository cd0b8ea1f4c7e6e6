"""Ranks of the learner as processes of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bapo.runtime.rank_environment import free_port

TIMEOUT_S = 600
"""Of one start of the ranks: on a loaded machine, gloo waits for the slower one at every layer."""


def run_ranks(
    model: Path,
    run: Path,
    num_ranks: int,
    first: int,
    last: int,
    *,
    minibatch_size: int = 3,
    shard_ranks: int | None = None,
    lora: bool = False,
) -> list[list[list[float]]]:
    """Losses and gradient norms of every mini-batch, per rank."""
    given = (model, run, num_ranks, first, last, minibatch_size, shard_ranks or num_ranks, int(lora))
    arguments = [str(argument) for argument in given]
    return spawn_ranks("fsdp_rank", arguments, num_ranks)


def assert_same_numbers(found: list[list[float]], want: list[list[float]]) -> None:
    """Losses and gradient norms of the same mini-batches on other ranks. Before the first update they differ by
    rounding alone; later by more, because AdamW's first steps have the sign of a gradient, however small it is."""
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=1e-4)


def spawn_ranks(module: str, arguments: list[str], num_ranks: int) -> list[Any]:
    """What each rank printed as its last line, as JSON."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.support.{module}", *arguments],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
