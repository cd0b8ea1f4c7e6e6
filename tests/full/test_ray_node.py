"""A Ray node of our own: GPUs that are not there, and its death; in processes, as Ray reads its settings once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
BEGIN = """
import json, os, sys, threading
from rollout_server.fleet import ray_environment
ray_environment.apply()
import psutil, ray
from bapo.config.tree import Config
from bapo.core.errors import BapoError, UnavailableError
from rollout_server.fleet import ray_node
from rollout_server.fleet.ray_node import RayNode, room_of

def rollout(num_workers, **resources):
    return Config.model_validate({"rollout": {"num_workers": num_workers, "worker_resources": resources}}).rollout
"""
REFUSED = """
try:
    RayNode(rollout(2, GPU=1))
except UnavailableError as error:
    print(json.dumps(str(error)))
"""
ARGUMENTS = """
told = []
ray_node.ray.init = lambda **arguments: told.append(arguments)
ray_node.ray.nodes = lambda: [{"Alive": True, "Resources": {"GPU": 3.0}}]
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
RayNode(rollout(1, CPU=2, place=1)).stop()
for visible in (None, "1,2,3", "MIG-a,MIG-b,MIG-c"):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    RayNode(rollout(3, GPU=1)).stop()
print(json.dumps([[each["num_cpus"], each["num_gpus"], each["resources"]] for each in told]))
"""
SEEN = """
@ray.remote
def seen():
    return os.environ.get("CUDA_VISIBLE_DEVICES")

node = RayNode(rollout(2, GPU=1))
asking = [seen.options(num_cpus=0, num_gpus=number).remote() for number in (1, 2, 0)]
print(json.dumps([sorted(each.split(",")) for each in ray.get(asking)]))
node.stop()
"""


KILLED = """
node = RayNode(Config().rollout)
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
    RayNode(Config().rollout)
except BapoError as error:
    print(json.dumps([isinstance(error, UnavailableError), error.exit_code, str(error)]))
"""


def printed(program: str, **environment: str) -> Any:
    """What a process prints in its last line, as JSON."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        env=variables | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_workers_that_need_more_gpus_than_ray_sees_are_refused_at_once() -> None:
    words = printed(REFUSED, CUDA_VISIBLE_DEVICES="")
    assert "Ray sees 0 GPUs on this machine (CUDA_VISIBLE_DEVICES: )" in words
    assert "room for 0 workers with {'GPU': 1.0}, but rollout.num_workers = 2" in words


def test_ray_counts_gpus_itself_and_is_told_of_slices_which_it_cannot_count() -> None:
    # max_workers is 8: eight GPUs would be more than there are, and eight places of a resource that Ray does not know.
    assert printed(ARGUMENTS) == [[16, None, {"place": 8}], [1, None, None], [1, None, None], [1, 3, None]]


def test_a_worker_sees_its_own_slices_alone_and_one_that_asks_for_none_sees_none() -> None:
    one, two, none = printed(SEEN, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b")
    assert one in (["MIG-a"], ["MIG-b"])
    assert two == ["MIG-a", "MIG-b"]
    assert none == [""]


def test_a_killed_raylet_is_told_at_once_as_an_accident() -> None:
    exit_code, message, pid = printed(KILLED)
    assert exit_code == 1  # from 2 on the launcher would end the run
    assert message == f"Ray's raylet (pid {pid}) has died: no more workers can start"


def test_a_node_that_dies_while_it_starts_is_an_accident_too() -> None:
    assert printed(STARTED_IN_VAIN) == [
        False,
        1,
        "Ray did not start (local node): The current node timed out during startup.",
    ]
