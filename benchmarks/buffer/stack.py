"""A buffer service on a Redis of its own, as processes: what every measurement of this folder talks to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import redis

from bapo.config.buffer import BufferConfig
from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from services.launcher.embedded_redis import KEEPS_MEMORY, REWRITE_MIN_SIZE, flushed, server_binary

START_TIMEOUT_S = 60.0


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of processes so far, dead threads included, to the nanosecond."""
    # The kernel's number for the CPU clock of another process: CPUCLOCK_SCHED of ~pid (clock_getcpuclockid(3)).
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def resident_bytes(pid: int) -> int:
    """Memory of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class RedisProcess:
    """The embedded Redis' binary on a unix socket, as the launcher starts it; `aof` as in a run, or off.

    With `tcp`, `client` goes through TCP, as all that is not on the same machine must.
    """

    def __init__(self, folder: Path, *, aof: bool, max_memory_mb: int = 4096, tcp: bool = False) -> None:
        folder.mkdir(parents=True)
        self.socket = folder / "redis.sock"
        self.port = free_port() if tcp else 0
        command = [server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        command += ["--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "yes" if aof else "no", "--appendfsync", "everysec"]
        command += ["--auto-aof-rewrite-min-size", REWRITE_MIN_SIZE]
        command += ["--maxmemory", str(BufferConfig(max_memory_mb=max_memory_mb).maxmemory)]
        command += ["--maxmemory-policy", "noeviction"]
        env = {**KEEPS_MEMORY, **os.environ}
        self.process = subprocess.Popen([*command, "--logfile", str(folder / "redis.log")], env=env)
        self._alongside = ExitStack()
        if aof:
            self._alongside.enter_context(flushed(folder))
        self.client = redis.Redis(port=self.port) if tcp else redis.Redis(unix_socket_path=str(self.socket))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no Redis: see {folder / 'redis.log'}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    @property
    def url(self) -> str:
        """For the buffer service."""
        return f"unix://{self.socket}"

    def stop(self) -> None:
        """End it."""
        self.client.close()
        self.process.kill()
        self.process.wait()
        self._alongside.close()


class Stack:
    """Redis, one buffer service, and a client of it in this process."""

    def __init__(
        self,
        folder: Path,
        *,
        aof: bool,
        batch_size: int = 64,
        max_memory_mb: int = 4096,
        profile: Path | None = None,
        direct: bool = True,
    ) -> None:
        """
        Args:
            direct: frames go to and from Redis itself; else through the service.
            profile: where py-spy writes a flame graph of the service, or None.
        """
        config = bench_config(folder.name, batch_size)
        folder.mkdir(parents=True)
        self.redis = RedisProcess(folder / "redis", aof=aof, max_memory_mb=max_memory_mb)
        run = RunDirectory.create(folder / "run", dump_toml(config))
        command = [sys.executable, "-m", "buffer_service", "--config", str(run.config_path), "--run-dir", str(run.path)]
        command += ["--redis-url", self.redis.url, "--port", "0"]
        log = (folder / "service.log").open("wb")
        self.service = subprocess.Popen(command, stderr=log)
        self.url = f"http://127.0.0.1:{self._port(run)}"
        self.client = BufferClient(self.url, direct="auto" if direct else "off")
        self.client.wait_ready(START_TIMEOUT_S)
        self._spy = _spy(self.service.pid, profile) if profile else None

    def _port(self, run: RunDirectory) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (port := run.read_port("buffer_service")) is None:
            if self.service.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no buffer service: see {run.path.parent / 'service.log'}")
            time.sleep(0.02)
        return port

    @property
    def pids(self) -> Sequence[int]:
        """Service and Redis."""
        return self.service.pid, self.redis.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spy is not None:
            self._spy.send_signal(signal.SIGINT)
            self._spy.wait()
        self.service.terminate()
        self.service.wait()
        self.redis.stop()


def bench_config(name: str, batch_size: int) -> Config:
    """The composer `bapo` as it runs, with no re-evaluation rounds to wait for."""
    return Config.model_validate(
        {
            "run": {"name": name},
            "algorithm": {"batch_size": batch_size},
            "learner": {"minibatch_size": min(64, batch_size)},
            "cadence": {"max_steps_ahead": 1, "wait_for_reevaluation": False},
            "buffer": {"port": 0, "lease_s": 600.0},
        }
    )


def _spy(pid: int, path: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "py-spy"), "record", "--pid", str(pid), "--rate", "500", "--native"]
    command += ["--format", "raw", "--output", str(path), "--duration", "600"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
