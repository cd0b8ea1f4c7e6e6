"""`python -m tests.full.compose [--engine vllm] [--monitoring]`: docker-compose.yml, brought up for real.

It builds the images, lets a run train in them, scales the rollout servers out and in while it goes on, kills one
process after the other, stops everything and goes on, waits for the end of the run or, with vLLM, ends it, checks that
nothing was lost or trained twice, and takes everything down. More than a quarter of an hour on two cores that others
use, too; the first build takes five minutes more.

Needs a Docker engine with Compose on this Linux host, and root: processes are killed from outside, as the kernel does.
The scripted engine takes the same time whatever the machine does, so that what more servers add can be judged; with
vLLM all share the cores. Exit code 0: all of it holds; 1: what does not is on the last line; 2: no engine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys

from tests.full.compose.chapters import RUN, Check
from tests.full.compose.stack import CheckError, Stack, say

STEPS = {"scripted": 75, "vllm": 5000}
"""A scripted run ends by itself. One with vLLM outlasts the check however fast the machine is, and is ended by it."""


def main() -> int:
    """All chapters, and the end of everything in any case."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.full.compose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(STEPS), default="scripted")
    parser.add_argument("--steps", type=int, help=f"length of the run; default: {STEPS}")
    parser.add_argument(
        "--servers", type=int, default=4, help="of rollout, at the most; each with vLLM takes 2.3 GiB; default: 4"
    )
    parser.add_argument("--monitoring", action="store_true", help="also Prometheus and Grafana")
    parser.add_argument("--keep", action="store_true", help="leave everything as it is after a failure")
    flags = parser.parse_args()
    if shutil.which("docker") is None:
        say("there is no docker here: nothing was checked")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell has told a background process to ignore Ctrl-C
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if flags.servers < 2:
        parser.error("--servers: two at the least, as the chapters behind the one that scales have two")
    num_steps = flags.steps or STEPS[flags.engine]
    stack = Stack(f"bapo-check-{os.getpid()}", variables(flags.engine, num_steps))
    failed = True
    try:
        check = Check(stack, engine=flags.engine, num_steps=num_steps, num_servers=flags.servers)
        play(check, monitoring=flags.monitoring)
        failed = False
    except (CheckError, OSError) as error:
        say(f"FAILED: {error}")
    finally:
        if not (failed and flags.keep):
            stack.down()
    if not failed and (left := stack.leftovers()):
        say(f"FAILED: left behind: {left}")
        return 1
    say("all of it holds, and nothing is left" if not failed else f"project {stack.project}")
    return int(failed)


def variables(engine: str, num_steps: int) -> dict[str, str]:
    """Of docker-compose.yml; ports that are free, unless the caller names them."""
    ports = ("BAPO_BUFFER_PORT", "BAPO_DASHBOARD_PORT", "BAPO_PROMETHEUS_PORT", "BAPO_GRAFANA_PORT")
    return {
        "COMPOSE_FILE": "docker-compose.yml",
        "COMPOSE_PROFILES": "cpu",
        "BAPO_RUN": RUN,
        "BAPO_STEPS": str(num_steps),
        "BAPO_CONFIGS": "./tests/full/compose/configs",
        "BAPO_CONFIG": f"deploy/configs/{engine}.toml",
        **{name: os.environ.get(name, "0") for name in ports},
    }


def play(check: Check, *, monitoring: bool) -> None:
    """The chapters in their order."""
    check.start()
    check.look_at_rights()
    check.look_at_page()
    check.scale()
    if monitoring:
        check.add_monitoring()
    check.kill_all()
    if monitoring:
        check.look_at_monitoring()
    check.stop_and_go_on()
    check.finish()


if __name__ == "__main__":
    sys.exit(main())
