"""`python -m learner` as a process: a small run, a start with peers that answer for the other services, its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo.config.load import dump_toml
from bapo.runtime.rank_environment import inherited
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.learner import learner_config, random_batch
from tests.support.learner_peers import Peers, serve
from tests.support.tiny_model import write_tiny_model


@contextmanager
def small_batches() -> Iterator[Peers]:
    """Peers with a batch of four groups for each step."""
    with serve(Peers(lambda step: random_batch(step=step, num_groups=4))) as running:
        yield running


def make_run(tmp_path: Path, **sections: Mapping[str, Any]) -> RunDirectory:
    """Three steps of a tiny model, with a checkpoint after each."""
    write_tiny_model(tmp_path / "model")
    values = {"run": {"num_steps": 3}, "checkpoint": {"every": 1}, **sections}
    config = learner_config(tmp_path / "model", **values)
    return RunDirectory.create(tmp_path / "run", dump_toml(config))


def start(run: RunDirectory, peers: Peers, *flags: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """The process, with its log in a pipe and this environment alone."""
    command = [sys.executable, "-m", "learner", "--config", str(run.config_path), "--run-dir", str(run.path)]
    urls = ["--buffer-url", peers.url, "--fleet-url", peers.url]
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
