"""`python -m services.trackers --config RUN/config.toml --run-dir RUN --to NAME`: a run's numbers to one tracker.

The launcher starts one per name of `tracking.to`. It ends with the run, or by SIGTERM, after it has sent the last rows.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading

from bapo.runtime.process import Flags, run_process
from services.trackers.sender import send_run

log = logging.getLogger(__name__)
_is_asked_to_end = threading.Event()


def main(flags: Flags) -> None:
    """Send until the run ends. Raises: ConfigError for a missing package; what the tracker raises."""
    signal.signal(signal.SIGTERM, lambda number, frame: _is_asked_to_end.set())
    config, name, rows = flags.config, flags.extra.to, 0
    for sent in send_run(flags.run, name, config.tracking, config.model_dump(mode="json"), _is_asked_to_end.wait):
        rows += sent
    log.info("run=%s %d rows sent to %s", config.run.name, rows, name)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="name of the tracker")


if __name__ == "__main__":
    run_process("services.trackers", main, add_flags=_add_flags)
