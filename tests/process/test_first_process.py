"""As process 1, which is what the command of a container is, a process without a SIGTERM of its own ends by it too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bapo.config.load import dump_toml
from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.buffer_app import small_config
from tests.support.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process in a namespace of its own")


def child_of(pid: int) -> int | None:
    """The process that a process has started, once it has."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(found[0]) if found else None


@pytest.mark.parametrize("module", ["services.scheduler", "services.evaluator"])
def test_sigterm_ends_it_with_the_code_of_an_asked_for_end(module: str, tmp_path: Path) -> None:
    config = small_config(run={"name": "first"}, scheduler={"port": 0}, evaluation={"port": 0})
    run = RunDirectory.create(tmp_path / "run", dump_toml(config))
    flags = ["--config", str(run.config_path), "--run-dir", str(run.path)]
    nobody = f"http://127.0.0.1:{free_port()}"
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-m",
        module,
        *flags,
        "--buffer-url",
        nobody,
    ]
    outer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        name = module.removeprefix("services.")
        wait_until(lambda: run.read_port(name) is not None or outer.poll() is not None, what=f"{name} listens")
        first = child_of(outer.pid)
        assert first is not None
        os.kill(first, signal.SIGTERM)

        assert outer.wait(PATIENCE_S) == 128 + signal.SIGTERM
    finally:
        outer.kill()
        outer.communicate()
