"""`python -m learner --config RUN/config.toml --run-dir RUN [--resume]`: the learner, or one rank of it."""

from __future__ import annotations

import argparse
import os
import sys

from bapo.runtime.process import Flags, run_process
from bapo.runtime.rank_environment import RANK, WORLD_SIZE, meeting_place, rank_environments
from learner.distributed.spawn_ranks import run_ranks

EXAMPLES = """\
All ranks:   python -m learner --config RUN/config.toml --run-dir RUN
Resume:      python -m learner --config RUN/config.toml --run-dir RUN --resume
One of two:  RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m learner ... &
             RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m learner ...
With learner.num_ranks > 1 and no WORLD_SIZE it starts all ranks on this machine; they exit together.
Exit codes:  0 finished or stopped (143 with --restart: stopped before the end of the run), 2 configuration, 3 storage
             or service unavailable, or out of memory, 4 divergence, 5 deadline, 6 lost another rank (see its log)
"""


def main(flags: Flags) -> None:
    """Run this rank, or all ranks if RANK and WORLD_SIZE are not set."""
    settings = flags.config.learner
    if settings.num_ranks > 1 and not {RANK, WORLD_SIZE} & os.environ.keys():
        command = [sys.executable, "-m", "learner", *sys.argv[1:]]
        with meeting_place() as meeting:
            sys.exit(run_ranks(command, rank_environments(settings.num_ranks, settings.num_threads, meeting)))
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
