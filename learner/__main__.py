"""`python -m learner --config RUN/config.toml --run-dir RUN [--resume]`: the learner, or one rank of it."""

from __future__ import annotations

import argparse
import os
import sys

from bapo.runtime.process import Flags, run_process
from bapo.runtime.rank_environment import RANK, WORLD_SIZE, meeting_place, nodes_of, rank_environments
from learner.distributed.spawn_ranks import run_ranks

EXAMPLES = """\
All ranks:   python -m learner --config RUN/config.toml --run-dir RUN
Resume:      python -m learner --config RUN/config.toml --run-dir RUN --resume
One of two:  RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m learner ... &
             RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m learner ...
Two hosts:   PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=10.0.0.1 python -m learner ...    on 10.0.0.1
             PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=10.0.0.1 python -m learner ...    on the other
With learner.num_ranks > 1 and no WORLD_SIZE it starts all ranks of this machine; they exit together. The PET variables
are those of torchrun, which also starts it: torchrun --nnodes 2 ... -m learner ..., with exit code 1 for every error.
Exit codes:  0 finished or stopped (143 with --restart: stopped before the end of the run), 2 configuration, 3 storage
             or service unavailable, or out of memory, 4 divergence, 5 deadline, 6 lost another rank (see its log)
"""


def main(flags: Flags) -> None:
    """Run this rank, or all ranks of this host if RANK and WORLD_SIZE are not set."""
    settings = flags.config.learner
    if settings.num_ranks > 1 and not {RANK, WORLD_SIZE} & os.environ.keys():
        command = [sys.executable, "-m", "learner", *sys.argv[1:]]
        with meeting_place() as meeting:
            ranks = rank_environments(settings.num_ranks, settings.num_threads, meeting, nodes_of())
            sys.exit(run_ranks(command, ranks))
    # Imported late: torch takes seconds and 250 MB, which the parent of the ranks does not need.
    from learner.startup import train

    train(flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--buffer-url", help="URL of the buffer service (default: from the config and RUN/ports)")
    parser.add_argument("--rollout-url", help="URL of the rollout server (default: from the config and RUN/ports)")
    parser.add_argument("--resume", action="store_true", help="resume from the latest checkpoint of the run")
    parser.add_argument(
        "--restart", action="store_true", help="like --resume, but the other processes of the run are still running"
    )


if __name__ == "__main__":
    run_process("learner", main, add_flags=_add_flags)
