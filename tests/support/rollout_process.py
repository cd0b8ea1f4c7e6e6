"""`python -m rollout_server` as a process of a test, and everything that it has ever started."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.rollout_client import RolloutClient
from tests.support.wait import PATIENCE_S, has_ended, wait_until

ENGINE_S = 240.0
"""Until a vLLM engine samples: a minute of a core that nobody else wants."""


@dataclass
class Server:
    """One process of the rollout server, and everything that it has ever started."""

    process: subprocess.Popen[bytes]
    run: RunDirectory
    log: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def client(self, timeout_s: float = PATIENCE_S) -> RolloutClient:
        wait_until(lambda: self.run.read_port("rollout_server") is not None, timeout_s=timeout_s)
        return RolloutClient(f"http://127.0.0.1:{self.run.read_port('rollout_server')}")

    def descendants(self) -> set[psutil.Process]:
        if self.process.poll() is None:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.seen

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return self.log.read_text()


StartServer = Callable[..., Server]


def assert_all_gone(processes: set[psutil.Process], timeout_s: float = PATIENCE_S) -> None:
    wait_until(lambda: all(map(has_ended, processes)), timeout_s=timeout_s)
