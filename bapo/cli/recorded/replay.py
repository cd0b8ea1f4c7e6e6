"""`bapo replay`: replay a learner step exactly, without rollout workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import Run, open_run
from bapo.cli.buffer.target import AsJson
from bapo.config.load import load_resolved
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.replayable import plan_replay, plan_replay_of

Step = Annotated[int | None, typer.Option("--step", metavar="N", min=1, help="Step to replay.")]
Frame = Annotated[
    Path | None, typer.Option("--frame", metavar="FILE", help="File of a recorded batch, instead of --step.")
]


TokenRecords = Annotated[bool, typer.Option("--token-records", help="Write the token records of these steps to RUN.")]


def replay(
    run: Run,
    step: Step = None,
    frame: Frame = None,
    token_records: TokenRecords = False,
    as_json: AsJson = False,
) -> None:
    """Replay a learner step on its recorded batch, and compare loss, gradient norm and weights with the run.

    The learner starts from the latest checkpoint before the step and replays the steps in between. Nothing is sampled,
    and RUN is not changed, except for token records on request. Exit code 4: the step diverges.

    Examples:

      bapo replay outputs/demo-001 --step 17
      bapo replay outputs/demo-001 --step 17 --token-records
      bapo replay latest --frame outputs/mine/diverged/step-000117.frame
    """
    directory = open_run(run)
    if (step is None) == (frame is None):
        raise ConfigError(
            "no step given. For example: bapo replay RUN --step 17, or --frame RUN/diverged/step-000117.frame"
        )
    # Planned here, too: a step that cannot be replayed is rejected before torch is loaded.
    plan = plan_replay_of(directory, frame) if frame else plan_replay(directory, step or 0)
    flags = ["--frame", str(frame)] if frame else ["--step", str(plan.step)]
    flags += ["--token-records"] if token_records else []
    flags += ["--json"] if as_json else []
    # As set by the launcher: the number of threads determines the order of sums.
    os.environ["OMP_NUM_THREADS"] = str(load_resolved(directory.config_path).learner.num_threads)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = ["--config", str(directory.config_path), "--run-dir", str(directory.path), *flags]
    os.execv(sys.executable, [sys.executable, "-m", "learner.replay", *arguments])  # noqa: S606 - no shell
