"""One of three ranks, of which the last is lost: run as a process by `test_learner_ranks.py`.

    python -m tests.support.lost_rank exits|hangs

Prints, as JSON, what the rank says about it.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from bapo.config.learner import LearnerConfig
from learner.distributed.world import join, lost_rank
from tests.support.learner import CPU

DEADLINE_S = 3.0


def main(how: str) -> None:
    world = join(LearnerConfig(num_ranks=3, collective_timeout_min=DEADLINE_S / 60), CPU, 60.0)
    world.meet()
    found = None
    if world.rank == 2:
        assert world.roll_call is not None
        world.roll_call.stop()  # as that of a stopped process
        time.sleep(5 * DEADLINE_S if how == "hangs" else 0)
    else:
        try:
            world.sum(torch.ones(1))
        except RuntimeError as error:
            found = str(lost_rank(error, world.rank, world.roll_call))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if world.rank == 0:
        time.sleep(4 * DEADLINE_S)  # its store serves the others
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
