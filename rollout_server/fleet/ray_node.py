"""Ray: the node that runs the workers, and the actor of one worker. Nothing else imports Ray.

One actor per worker, with the engine's environment variables set before it imports anything. The fleet restarts dead
actors itself (`max_restarts=0`) under new ids, so that their leases are not mixed up.

With RAY_ADDRESS set the workers run in that cluster (with its RAY_AUTH_TOKEN, and the project and the model at the same
paths on every host), spread over hosts with free `rollout.worker_resources`; otherwise a local node is started. Ray's
ports are open on all interfaces: a token of this run protects the local node (`ray_environment.py`, to be applied
before this file is imported).
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import BapoError, NodeDiedError, UnavailableError
from bapo.core.types import WeightTransfer, WeightUpdate
from bapo.runtime.auth.api_tokens import own_token
from bapo.runtime.logs import bound_log
from bapo.runtime.machine import worker_resources, workers_on
from bapo.runtime.process import LOG_FORMAT, watch_parent
from rollout_server.calls import Finished
from rollout_server.engines.base import Completion, engine_module
from rollout_server.fleet.worker_handle import LOG_TAIL_LINES, WorkerDiedError, make_worker
from rollout_server.worker_report import WorkerReport

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum: nothing large travels through Ray, weights are files."""
NODE_PROCESSES = ("raylet", "gcs_server")
"""Without one of them no actor can start, and Ray waits silently."""
WATCH_S = 1.0
COLLECT_TIMEOUT_S = 60.0
"""Longest time that a collection of calls takes besides its wait: the engine may be loading weights."""
ACTOR_THREADS = 8
"""Reports must be available while weights are loading or a drain waits."""
PREFIX, LOCK = "bapo-ray-", "bapo.lock"
SHORT = Path("/tmp")  # noqa: S108 - folders in it are created by mkdtemp
"""Paths of unix sockets have at most 107 bytes, most of which Ray uses."""
YOUNG_S = 10.0
"""A folder younger than this may not be locked yet."""


class RayNode:
    """A local Ray node, or a connection to a cluster."""

    def __init__(self, rollout: RolloutConfig) -> None:
        """Start or connect; takes some seconds. Raises: UnavailableError; NodeDiedError."""
        self._needs = worker_resources(rollout)
        self._folder: RayFolder | None = None
        address = os.environ.get("RAY_ADDRESS")
        self.is_cluster = address is not None
        self.is_bounded = self.is_cluster or "GPU" in self._needs
        """Whether `room` limits the number of workers: a local node does not count CPUs."""
        try:
            if address:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            else:
                self._start(rollout)
        except (RayError, ConnectionError, RuntimeError, OSError, ValueError) as error:
            self.stop()
            raise UnavailableError(f"Ray did not start ({address or 'local node'}): {error}") from error
        except Exception as error:  # Ray raises a bare Exception when one of its processes dies
            self.stop()
            raise NodeDiedError(f"Ray did not start ({address or 'local node'}): {error}") from error
        if self.is_bounded and not self.is_cluster:
            self._check_room(rollout.num_workers)

    @property
    def address(self) -> str:
        """Address of this host in the cluster."""
        return str(ray.util.get_node_ip_address())

    def room(self) -> int:
        """Number of workers that fit on the live hosts. Raises: UnavailableError."""
        try:
            hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except (RayError, ConnectionError, RuntimeError) as error:
            raise UnavailableError(f"cannot list the hosts of the Ray cluster: {error}") from error
        return sum(room_of(host, self._needs) for host in hosts)

    def watch(self, ended: threading.Event, on_death: Callable[[NodeDiedError], None]) -> None:
        """Call `on_death` when a process of the local node dies, until `ended`."""
        if not self.is_cluster:
            children = {child.name(): child for child in psutil.Process().children()}
            processes = {name: children[name] for name in NODE_PROCESSES if name in children}
            threading.Thread(target=_watch, args=(processes, ended, on_death), name="node-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop all actors, and the local node."""
        ray.shutdown()
        if self._folder is not None:
            self._folder.remove()

    def _start(self, rollout: RolloutConfig) -> None:
        self._folder = RayFolder()
        most = rollout.max_workers
        total: dict[str, float] = {name: math.ceil(most * amount) for name, amount in self._needs.items()}
        total.pop("GPU", None)
        ray.init(
            num_cpus=int(total.pop("CPU", 1)),
            num_gpus=gpus_to_declare(os.environ.get("CUDA_VISIBLE_DEVICES")),
            resources=total or None,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self._folder.path),
        )

    def _check_room(self, num_workers: int) -> None:
        """Raises: UnavailableError for more workers than fit on the GPUs: they would wait forever."""
        if (room := self.room()) >= num_workers:
            return
        found = sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        self.stop()
        raise UnavailableError(
            f"Ray sees {found} GPUs on this machine (CUDA_VISIBLE_DEVICES: {visible}), room for {room} workers with "
            f"{self._needs}, but rollout.num_workers = {num_workers}: lower rollout.num_workers, or the GPU fraction "
            "per worker in rollout.worker_resources; `bapo doctor` shows the GPUs"
        )


def _watch(
    processes: Mapping[str, psutil.Process], ended: threading.Event, on_death: Callable[[NodeDiedError], None]
) -> None:
    while not ended.wait(WATCH_S):
        for name, process in processes.items():
            if not _is_alive(process):
                on_death(NodeDiedError(f"Ray's {name} (pid {process.pid}) has died: no more workers can start"))
                return


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class RayFolder:
    """Temporary directory of a local node. The kernel releases its lock when the process ends."""

    def __init__(self, parent: Path = SHORT) -> None:
        """Create it, and delete those of dead processes."""
        _delete_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self.path / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete it with everything Ray has left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or without a lock file
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG_S:
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def room_of(host: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Number of workers with these needs that fit on a host with these resources."""
    return min(
        workers_on(int(host.get(name, 0)), amount) if name == "GPU" else int(host.get(name, 0) // amount)
        for name, amount in needs.items()
    )


def gpus_to_declare(visible: str | None) -> int | None:
    """`num_gpus` for Ray; None: Ray counts the GPUs of CUDA_VISIBLE_DEVICES itself.

    Ray cannot count MIG slices, only the GPUs that contain them; for whole GPUs its own count is reliable.
    """
    ids = (visible or "").split(",")
    return len(ids) if all(entry.startswith("MIG-") for entry in ids) else None


class WorkerActor:
    """A worker in an actor process; arguments and results are plain maps."""

    def __init__(
        self, worker_id: str, config_json: str, buffer_url: str, log_path: str, token: str | None, server_url: str = ""
    ) -> None:
        self._log_path = Path(log_path)
        _log_to(log_path)
        # Ray checks the raylet by its pid, which a zombie keeps: the actor would outlive it.
        watch_parent(lambda: os._exit(1))
        config = Config.model_validate_json(config_json)
        # The log is in RUN/logs. On a host without the shared RUN, segments stay on that host.
        run_path = Path(log_path).parents[1]
        self._worker = make_worker(worker_id, config, buffer_url, token, run_path=run_path, server_url=server_url)

    def load(self) -> None:
        """Load the engine; an error shows in the report."""
        try:
            self._worker.load()
        except Exception:  # no caller waits for this; the fleet reads the error in the report
            log.exception("%s failed to load", self._worker.worker_id)

    def report(self) -> WorkerReport:
        """State and counts. Called once a second, so it also bounds the log on this host."""
        bound_log(self._log_path)
        return self._worker.report()

    def begin(self, update: WeightUpdate | None) -> None:
        """Load the newest weights and start to claim."""
        self._worker.begin(update)

    def update_weights(self, update: WeightUpdate) -> float:
        """Returns: seconds."""
        return self._worker.update_weights(update)

    def transfer_weights(self, transfer: WeightTransfer) -> float | None:
        """Returns: seconds; None if the engine declined."""
        return self._worker.transfer_weights(transfer)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Begin calls for agents."""
        self._worker.calls.submit(completions)

    def collect(self, wait_s: float) -> list[Finished]:
        """Calls that have finished."""
        return self._worker.calls.collect(wait_s)

    def abort(self, call_ids: Sequence[str]) -> None:
        """Stop sampling calls."""
        self._worker.calls.abort(call_ids)

    def drain(self, timeout_s: float) -> None:
        """Finish what is in flight, then stop."""
        self._worker.drain(timeout_s)


class RayHandle:
    """A worker in an actor."""

    def __init__(self, worker_id: str, config: Config, buffer_url: str, log_path: Path, server_url: str = "") -> None:
        self._log_path = log_path
        environment = {**engine_module(config.rollout.engine).ENVIRONMENT, "PYTHONPATH": _python_path()}
        needs = worker_resources(config.rollout)
        self._make = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                resources=needs,
                scheduling_strategy="SPREAD",
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=ACTOR_THREADS,
                runtime_env={"env_vars": environment},
            )
            .remote
        )
        # The token is an argument: Ray exposes the environment of actors. On this host the worker reads its file.
        token = None if "RAY_ADDRESS" not in os.environ else own_token()()
        self._arguments = (worker_id, config.model_dump_json(), buffer_url, str(log_path.resolve()), token, server_url)
        self._actor: Any = None

    def start(self) -> None:
        """Create the actor; it loads when resources are free."""
        self._actor = self._make(*self._arguments)
        self._actor.load.remote()

    def report(self, timeout_s: float) -> WorkerReport:
        """Raises: WorkerDiedError; TimeoutError if it does not respond."""
        report: WorkerReport = self._call("report", timeout_s=timeout_s)
        return report

    def begin(self, update: WeightUpdate | None, timeout_s: float) -> None:
        """Raises: what the worker raised; WorkerDiedError; TimeoutError."""
        self._call("begin", update, timeout_s=timeout_s)

    def update_weights(self, update: WeightUpdate, timeout_s: float) -> float:
        """Raises: what the worker raised; WorkerDiedError; TimeoutError."""
        return float(self._call("update_weights", update, timeout_s=timeout_s))

    def transfer_weights(self, transfer: WeightTransfer, timeout_s: float) -> float | None:
        """Raises: what the worker raised; WorkerDiedError; TimeoutError."""
        seconds = self._call("transfer_weights", transfer, timeout_s=timeout_s)
        return None if seconds is None else float(seconds)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Returns immediately."""
        self._actor.submit.remote(completions)

    def collect(self, wait_s: float) -> list[Finished]:
        """Raises: WorkerDiedError; TimeoutError."""
        found: list[Finished] = self._call("collect", wait_s, timeout_s=wait_s + COLLECT_TIMEOUT_S)
        return found

    def abort(self, call_ids: Sequence[str]) -> None:
        """Returns immediately."""
        self._actor.abort.remote(call_ids)

    def drain(self, timeout_s: float) -> None:
        """Raises: WorkerDiedError; TimeoutError."""
        self._call("drain", timeout_s, timeout_s=timeout_s + 5.0)

    def kill(self) -> None:
        """SIGKILL through Ray."""
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)

    def log_tail(self) -> str:
        """The last lines of its log, if it is on this host."""
        if not self._log_path.is_file():
            return ""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(f"no response to {method} within {timeout_s:g} s") from error
        except RayTaskError as error:
            # A RayTaskError has a traceback as its message; its cause is the worker's error.
            raise error.cause if isinstance(error.cause, BapoError) else UnavailableError(str(error.cause)) from error
        except RayError as error:
            raise WorkerDiedError(f"the worker process has died: {str(error).splitlines()[0]}") from error


def _python_path() -> str:
    """PYTHONPATH of actors: this process's, including a user's task next to the config."""
    return os.pathsep.join(filter(None, sys.path))


def _log_to(path: str) -> None:
    """Redirect all output of this process, C++ included, to a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
