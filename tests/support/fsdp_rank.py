"""One rank of a learner with fake neighbours: run as a process by `test_fsdp.py`, as torchrun would.

    python -m tests.support.fsdp_rank MODEL RUN NUM_RANKS FIRST_STEP LAST_STEP MINIBATCH_SIZE SHARD_RANKS LORA

Prints one JSON line: loss and gradient norm of every mini-batch, in order. The process of rank 0 writes the run
directory, and METER_FILE with the theorem meter of every step. FIRST_STEP > 1 resumes from the newest checkpoint;
FIRST_STEP > LAST_STEP saves it again as that of LAST_STEP. LORA = 1: only an adapter trains.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bapo.config.tree import Config
from bapo.core.types import Batch
from learner.distributed.world import join, leave
from learner.startup import newest_checkpoint, republish
from tests.support.learner import (
    CPU,
    FakeBuffer,
    FakeFleet,
    learner_config,
    make_test_learner,
    random_batch,
    with_one_token,
)

METER_FILE = "meter.json"


def config_of(model: str, num_ranks: int, num_steps: int, minibatch_size: int, shard_ranks: int, lora: bool) -> Config:
    """Small budgets, so that every mini-batch has several micro-batches on each rank, and uneven ones."""
    adapter = {"model": {"path": model, "dtype": "float32", "lora": {"rank": 4, "alpha": 8.0}}} if lora else {}
    return learner_config(
        model,
        **adapter,
        run={"num_steps": num_steps},
        learner={
            "num_ranks": num_ranks,
            "lr": 1e-3,
            "microbatch_tokens": 80,
            "minibatch_size": minibatch_size,
            "shard_ranks": shard_ranks,
        },
        loss={"ratio_mode": "official", "kl_ref": "reference", "kl_coef": 0.01},
        checkpoint={"background": True},
    )


def batch_of(step: int) -> Batch:
    """7 groups: by 3, three mini-batches of 3, 2 and 2. Step 2 has one group, so that a rank is sometimes idle.

    All responses of step 2 have one token, and a third of those of step 4, which pack none: with the lengths of this
    seed, two ranks share a group that has more such responses than parts.
    """
    if step == 4:
        return with_one_token(random_batch(num_groups=7, step=4, seed=67), every=3)
    batch = random_batch(num_groups=1 if step == 2 else 7, step=step)
    return with_one_token(batch, every=1) if step == 2 else batch


def main(model: str, run: str, *numbers: str) -> None:
    num_ranks, first_step, last_step, minibatch_size, shard_ranks, lora = map(int, numbers)
    config = config_of(model, num_ranks, last_step, minibatch_size, shard_ranks, bool(lora))
    world = join(config.learner, CPU, 60.0)
    resumes = first_step > 1
    checkpoint = newest_checkpoint(Path(run) / "checkpoints") if resumes else None
    learner = make_test_learner(
        config,
        Path(run),
        buffer=FakeBuffer(batch_of),
        fleet=FakeFleet(),
        resume=resumes,
        world=world,
    )
    if world.size > 1:
        replicas = world.size // shard_ranks
        placement = next(learner.policy.parameters()).placements  # type: ignore[attr-defined]
        assert [part.is_shard() for part in placement] == ([False, True] if replicas > 1 else [True])
    if checkpoint:
        checkpoint.load(learner.updater)
        republish(learner, checkpoint)
    if first_step > last_step:
        learner.save_checkpoint(last_step)
        learner.finish_checkpoint(wait=True)
    sys.stdout.write(json.dumps(_losses(learner, first_step)) + "\n")
    if world.leads:
        rows = [{key: row[key] for key in ("divergences", "bounds")} for row in learner.records.rows]
        (Path(run) / METER_FILE).write_text(json.dumps(rows))
    leave(world, together=True)


def _losses(learner: Any, first_step: int) -> list[list[float]]:
    found: list[list[float]] = []
    run_update = learner.updater.run

    def noted(batch: Batch) -> Any:
        report = run_update(batch)
        found.extend([result.loss, result.grad_norm] for result in report.minibatches)
        return report

    learner.updater.run = noted
    learner.run(first_step)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
