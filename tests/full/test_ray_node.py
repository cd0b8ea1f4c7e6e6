"""A Ray node of our own that dies: whoever started it hears of it, instead of waiting for workers that cannot come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BEGIN = """
import json, sys, threading
from rollout_server.fleet import ray_environment
ray_environment.apply()
import psutil
from bapo.config.tree import Config
from bapo.core.errors import BapoError, UnavailableError
from rollout_server.fleet import ray_node
from rollout_server.fleet.ray_node import RayNode

rollout = Config.model_validate({}).rollout
"""
KILLED = """
node = RayNode(rollout)
heard, ended = [], threading.Event()
told = threading.Event()
node.watch(ended, lambda error: (heard.append(error), told.set()))
raylet = next(child for child in psutil.Process().children() if child.name() == "raylet")
raylet.kill()
assert told.wait(60)
ended.set()
node.stop()
print(json.dumps([heard[0].exit_code, str(heard[0]), raylet.pid]))
"""
STARTED_IN_VAIN = """
def die(**_):
    raise Exception("The current node timed out during startup.")

ray_node.ray.init = die
try:
    RayNode(rollout)
except BapoError as error:
    print(json.dumps([isinstance(error, UnavailableError), error.exit_code, str(error)]))
"""


def said(words: str) -> list[object]:
    """What the program prints at its end."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + words], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_a_killed_raylet_is_told_at_once_as_an_accident() -> None:
    exit_code, message, pid = said(KILLED)
    assert exit_code == 1  # from 2 on the launcher would end the run
    assert message == f"Ray's raylet (pid {pid}) has died, and no worker can start any more"


def test_a_node_that_dies_while_it_starts_is_an_accident_too() -> None:
    assert said(STARTED_IN_VAIN) == [
        False,
        1,
        "Ray did not start (own node): The current node timed out during startup.",
    ]
