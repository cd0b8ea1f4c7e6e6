"""`python -m learner` as a process: a small run, a start with peers that answer for the other services, its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo.config.load import dump_toml
from bapo.runtime.rank_environment import inherited
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.learner import learner_config
from tests.support.learner_peers import Peers
from tests.support.tiny_model import write_tiny_model


def environment_of_no_rank() -> dict[str, str]:
    """This process' own, without what names a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks}


def make_run(tmp_path: Path, **sections: Mapping[str, Any]) -> RunDirectory:
    """Three steps of a tiny model, with a checkpoint after each."""
    write_tiny_model(tmp_path / "model")
    values = {"run": {"num_steps": 3}, "checkpoint": {"every": 1}, **sections}
    config = learner_config(tmp_path / "model", **values)
    return RunDirectory.create(tmp_path / "run", dump_toml(config))


def start(run: RunDirectory, peers: Peers, *flags: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """The process, with its log in a pipe and this environment alone."""
    command = [sys.executable, "-m", "learner", "--config", str(run.config_path), "--run-dir", str(run.path)]
    urls = ["--buffer-url", peers.url, "--rollout-url", peers.url]
    return subprocess.Popen(
        [*command, *urls, *flags],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=inherited(environment),
    )


def end_of(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and log."""
    try:
        _, log = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, log
