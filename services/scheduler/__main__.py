"""`python -m services.scheduler --config RUN/config.toml --run-dir RUN [--buffer-url URL]`."""

from __future__ import annotations

import argparse

from bapo.algorithms.composers.registry import load_composer
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry, serve_health
from bapo.runtime.process import Flags, run_process
from bapo.tasks.images import keep_images
from bapo.tasks.registry import task_of
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url
from services.scheduler.loop import Scheduler
from services.scheduler.plan import FreshPlan
from services.scheduler.proposals import make_pool, make_proposals

START_TIMEOUT_S = 60.0


def main(flags: Flags) -> None:
    """Check the data, wait for the buffer, then enqueue requests until the run is finished."""
    config = flags.config
    telemetry = Telemetry(Process.SCHEDULER, run=config.run.name)
    task = task_of(config)
    prompts = task.prompts("train")
    buffer = BufferClient(flags.extra.buffer_url or buffer_url(config, flags.run))
    proposals = make_proposals(config, make_pool(task, prompts), buffer)
    plan = FreshPlan(config, prompts, proposals)
    is_up = False
    flags.run.write_port(
        "scheduler", serve_health(telemetry, config.scheduler.port, lambda: is_up, tokens=config.security.tokens)
    )
    keep_images(task, prompts, flags.run.images)
    buffer.wait_ready(START_TIMEOUT_S)
    is_up = True
    Scheduler(config, plan, load_composer(config.algorithm), buffer, telemetry, proposals=proposals).run()


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--buffer-url", help="URL of the buffer service (default: from the config and RUN/ports)")


if __name__ == "__main__":
    run_process("services.scheduler", main, add_flags=_add_flags)
