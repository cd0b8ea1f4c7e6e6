"""One rank that trains three steps and says what it held: run as a process by `test_learner_memory.py`.

    python -m tests.integration.memory_rank MODEL RUN NUM_RANKS SECTIONS

SECTIONS: JSON that overrides sections of the configuration. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bapo.types import Batch
from learner.distributed import join, leave
from tests.learner_setup import CPU, FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch


def batch_of(step: int) -> Batch:
    """7 groups: three mini-batches of 3, 2 and 2, so that one rank is sometimes idle."""
    return random_batch(num_groups=7, step=step)


def main(model: str, run: str, num_ranks: str, sections: str) -> None:
    overrides: dict[str, dict[str, Any]] = json.loads(sections)
    learner_section = {"num_ranks": int(num_ranks), "microbatch_tokens": 80, **overrides.pop("learner", {})}
    config = learner_config(model, run={"num_steps": 3}, learner=learner_section, **overrides)
    world = join(config.learner.num_ranks, CPU, 60.0)
    learner = make_test_learner(config, Path(run), buffer=FakeBuffer(batch_of), fleet=FakeFleet(), world=world)
    losses: list[list[float]] = []
    run_update = learner.updater.run

    def noted(batch: Batch) -> Any:
        report = run_update(batch)
        losses.extend([result.loss, result.grad_norm] for result in report.minibatches)
        return report

    learner.updater.run = noted  # type: ignore[method-assign]
    learner.run(1)
    sys.stdout.write(json.dumps({"losses": losses}) + "\n")
    leave(world, together=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
