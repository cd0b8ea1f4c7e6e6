"""A run whose workers Ray's own autoscaler (v2) makes room for: nodes of its fake provider on one machine. Root, Linux.

    sudo unshare --pid --fork --mount-proc --net python -m benchmarks.autoscaling.ray_run

As on Kubernetes (deploy/k8s/overlays/gpu), where KubeRay's provider makes pods: the fleet asks for Ray actors, those
that fit nowhere make the autoscaler add nodes, and nodes that stay empty go. Real Redis, services and learner, the
scripted engine in Ray actors; groups take 1.5 s at policy versions 1 to 16 and 10 ms from then on. It must be the first
process of namespaces of its own: Ray's processes end with it, and it can reach nobody else's.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.autoscaling.real_run import LINE
from benchmarks.multi_host.__main__ import consumed, problems

REPOSITORY = Path(__file__).resolve().parents[2]
HOST = "10.231.79.1"
"""Ray asks the way to the Internet for its own address: here it ends at this one."""
ADDRESS = f"{HOST}:6379"
PATIENCE_S = 270.0
MOST = 2
IDLE_MINUTES = 0.25
HEAD_ID = "f" * 56
"""What the fake provider takes for the head."""
CLUSTER = {
    "cluster_name": "bapo",
    "max_workers": MOST,
    "idle_timeout_minutes": IDLE_MINUTES,
    "upscaling_speed": 1.0,
    "provider": {
        "type": "fake_multinode",
        "head_node_id": HEAD_ID,
        "gcs_address": ADDRESS,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "foreground_node_launch": True,
        "worker_liveness_check": False,
    },
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "rollout": {
            "resources": {"CPU": 1, "rollout": 1, "object_store_memory": 80 << 20},
            "node_config": {},
            "min_workers": 1,
            "max_workers": MOST,
        },
    },
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
HEAD = (
    f"ray start --head --node-ip-address {HOST} --port 6379 --num-cpus 0 --object-store-memory 83886080 "
    "--include-dashboard false --autoscaling-config "
)
ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(REPOSITORY),
}
"""Of the head, from which the autoscaler has it, and of the run."""
SETTINGS = {
    "run.name": "run", "run.num_steps": 100_000, "algorithm.batch_size": 8, "learner.minibatch_size": 4,
    "cadence.max_steps_ahead": 3, "checkpoint.every": 1, "rollout.engine": "scripted_actor", "rollout.num_workers": 1,
    "rollout.max_workers": MOST, "rollout.max_groups_in_flight": 8, "rollout.worker_resources": "{rollout = 1}",
    "rollout.start_timeout_s": 240, "rollout.drain_s": 5, "evaluation.every": 0, "evaluation.num_prompts_final": 4,
    "autoscaling.actuator": "fleet", "autoscaling.min_workers": 1, "autoscaling.max_workers": MOST,
    "autoscaling.window_s": 5, "autoscaling.up_cooldown_s": 5, "autoscaling.down_cooldown_s": 10,
    "rollout.engine_options": "{latency_s = 0.01, slow_versions = [1, 16], slow_times = 150.0}",
}  # fmt: skip


def main() -> int:
    """The run until nodes have come and gone again: what happened when, and the state of its records."""
    if os.getpid() != 1:
        sys.stderr.write(str(__doc__))
        return 2
    folder = Path(tempfile.mkdtemp(prefix="bapo-ray-run-"))
    (folder / "outputs").mkdir()
    run = RunDirectory(folder / "outputs" / "run")
    try:
        os.environ.update(ENVIRONMENT)  # Ray reads it when it is imported
        settle(folder)
        head = subprocess.Popen(["bash", "-c", f"{HEAD} {folder}/cluster.json --block"], **logged(folder, "head"))
        words = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
        base = str(REPOSITORY / "deploy/configs/smoke.toml")
        train = [sys.executable, "-m", "bapo.cli", "train", base, "--run.root", str(run.path.parent), *words]
        connect()
        launcher = subprocess.Popen(train, env=os.environ | {"RAY_ADDRESS": ADDRESS}, **logged(folder, "run"))
        watch(run, lambda: (head.poll(), launcher.poll()) == (None, None))
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
        rows = run.read_metrics()
        wrong = problems(rows, consumed(run), batch_size=8)
        print(f"{len(rows)} steps; problems: {wrong or 'none'}")
        return 1 if wrong else 0
    finally:
        if "--keep" in sys.argv:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def settle(folder: Path) -> None:
    """A network and places of our own, and the defaults of the fake provider, which Ray's wheel lacks."""
    import ray

    provider = Path(ray.__file__).parent / "autoscaler/_private/fake_multi_node"
    copy = folder / "fake_multi_node"
    shutil.copytree(provider, copy)
    text = json.dumps(CLUSTER)  # JSON is YAML
    (copy / "example.yaml").write_text(text)
    (folder / "cluster.json").write_text(text)
    Path("/tmp/ray").mkdir(exist_ok=True)
    for command in (
        "ip link set lo up",
        f"ip address add {HOST}/24 dev lo",
        f"ip route add default dev lo src {HOST}",
        "mount -t tmpfs -o size=2g tmpfs /tmp/ray",
        "mount -t tmpfs -o size=1g tmpfs /dev/shm",
        f"mount --bind {copy} {provider}",
    ):
        subprocess.run(command.split(), check=True)


def logged(folder: Path, name: str) -> dict[str, Any]:
    """Where the output of a process goes."""
    return {"stdout": (folder / f"{name}.log").open("wb"), "stderr": subprocess.STDOUT}


def connect() -> None:
    """As a driver that only looks. Raises: ConnectionError when the head does not come up."""
    import ray

    deadline = time.monotonic() + PATIENCE_S / 2
    while subprocess.run(["ray", "health-check", "--address", ADDRESS], capture_output=True).returncode != 0:
        if time.monotonic() > deadline:
            raise ConnectionError("the head did not come up")
        time.sleep(0.5)
    ray.init(address=ADDRESS, log_to_driver=False, configure_logging=False)


def watch(run: RunDirectory, is_alive: Callable[[], bool]) -> None:
    """Print a line whenever nodes or workers change, until nodes have come and one alone is left.

    Raises: SystemExit when that does not happen in time.
    """
    import ray

    began, most, shown = time.monotonic(), 0, ""
    print("| s | nodes for workers | workers wanted | because | step |\n|---|---|---|---|---|")
    while True:
        seconds = time.monotonic() - began
        nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("rollout"))
        desired, reason = scaling(run)
        most = max(most, nodes)
        state = f"{nodes} | {desired} | {reason} |"
        if state != shown:
            print(f"| {seconds:.0f} | {state} {len(run.read_metrics()) if run.path.exists() else 0} |", flush=True)
            shown = state
        if most > 1 and nodes == 1 and desired == "1":
            return
        if seconds > PATIENCE_S or not is_alive():
            raise SystemExit(f"nodes did not come and go; at most there were {most}")
        time.sleep(0.5)


def scaling(run: RunDirectory) -> tuple[str, str]:
    """(workers wanted, why) of the last line of the rollout server's log that changes them."""
    log = run.log_path("rollout_server") if run.path.exists() else None
    if log is None or not log.exists():
        return "-", "-"
    found = [match for match in map(LINE.match, log.read_text(errors="replace").splitlines()) if match]
    return (found[-1][2], found[-1][5]) if found else ("-", "-")


if __name__ == "__main__":
    sys.exit(main())
