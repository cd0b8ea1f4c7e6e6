"""`python -m services.evaluator --config RUN/config.toml --run-dir RUN [--buffer-url URL] [--once]`."""

from __future__ import annotations

import argparse
import logging

from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry, serve_health
from bapo.runtime.process import Flags, run_process
from bapo.tasks.registry import task_of
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url
from services.evaluator.loop import Evaluator
from services.evaluator.plan import BASE_VERSION, Target

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


def main(flags: Flags) -> None:
    """Wait for the buffer, then run evaluations until the final weights are evaluated; end at once without splits."""
    config = flags.config
    task = task_of(config)
    config.evaluation.require_splits(task.held_out_splits, config.rollout.temperature)
    if not task.held_out_splits:  # before it is scraped: the alert BapoProcessGone would miss it
        log.info("task %s has no held-out split: nothing to evaluate", task.name)
        return
    telemetry = Telemetry(Process.EVALUATOR, run=config.run.name)
    buffer = BufferClient(flags.extra.buffer_url or buffer_url(config, flags.run))
    is_up = False
    flags.run.write_port(
        "evaluator", serve_health(telemetry, config.evaluation.port, lambda: is_up, tokens=config.security.tokens)
    )
    buffer.wait_ready(START_TIMEOUT_S)
    is_up = True
    evaluator = Evaluator(config, task, buffer, flags.run, telemetry)
    if flags.extra.once:
        evaluator.measure(Target(version=BASE_VERSION, num_prompts=config.evaluation.num_prompts_final))
    else:
        evaluator.run()


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--buffer-url", help="URL of the buffer service (default: from the config and RUN/ports)")
    parser.add_argument("--once", action="store_true", help="evaluate the current weights of the workers, then exit")


if __name__ == "__main__":
    run_process("services.evaluator", main, add_flags=_add_flags)
