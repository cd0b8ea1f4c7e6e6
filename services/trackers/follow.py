"""`bapo track`: the numbers of one run to one tracker, all so far and new ones until the run ends."""

from __future__ import annotations

import argparse
import sys
import time

from bapo.config.load import load_resolved
from bapo.config.tracking import TrackingConfig
from bapo.core.errors import BapoError
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.standard_streams import print_any_text
from services.trackers.sender import send_run


def main() -> int:
    """Send; returns the exit code."""
    print_any_text()
    parser = argparse.ArgumentParser(prog="python -m services.trackers.follow", description=__doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", required=True, help="name of the tracker")
    parser.add_argument("--project", help="overrides tracking.project")
    parser.add_argument("--offline", action="store_true")
    flags = parser.parse_args()
    try:
        _follow(RunDirectory.open(flags.run), flags)
    except BapoError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _follow(run: RunDirectory, flags: argparse.Namespace) -> None:
    config = load_resolved(run.config_path)
    own = config.tracking
    changes = {"offline": flags.offline or own.offline, "project": flags.project or own.project}
    rows = 0
    try:
        settings = TrackingConfig.model_validate(own.model_dump() | changes)
        for sent in send_run(run, flags.to, settings, config.model_dump(mode="json"), _wait):
            rows += sent
            if sent:
                sys.stderr.write(f"{rows} rows sent\n")
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run it again to send the rest\n")
    sys.stdout.write(f"{run.path}: {rows} rows sent to {flags.to}\n")


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


if __name__ == "__main__":
    sys.exit(main())
