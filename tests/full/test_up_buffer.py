"""`bapo up buffer` beside a shared Redis, and while Redis and the service die under it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bapo.runtime.auth.token_store import token_for_run
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_admin import BufferAdmin
from tests.process.test_up_buffer import NEW, buffer_up, status, stopped
from tests.support.factories import make_request
from tests.support.launch import REPOSITORY, family, kill_family, start
from tests.support.wait import wait_until

NUM_STEPS = 120
"""Of the example, of which Redis misses the sixth and the service the twenty-first."""


def test_a_name_that_a_shared_redis_knows_is_served_again_and_said(tmp_path: Path, redis_url: str) -> None:
    """Two users who both call their run `mine`: the second one reads that its buffer is not empty."""
    shared = [*NEW, "--buffer.redis_url", redis_url]
    (tmp_path / "one").mkdir()
    with buffer_up(tmp_path / "one" / "mine", *shared) as (process, client):
        client.enqueue([make_request(prompt_id="a")])
        assert "  stores step" not in stopped(process)
    (tmp_path / "other").mkdir()
    with buffer_up(tmp_path / "other" / "mine", *shared) as (process, client):
        assert client.status().queued["fresh"] == 1
        said = (
            "  stores step 0, 1 open requests, 0 fresh groups, under this run's name: use another name or another Redis"
        )
        assert said in stopped(process)


def test_redis_that_dies_while_an_existing_run_starts_is_started_again(tmp_path: Path) -> None:
    """The launcher watches its children also while it waits for the buffer's first answer."""
    run = tmp_path / "mine"
    with buffer_up(run, *NEW) as (process, _):
        stopped(process)
    process = start(["up", "buffer", "--run", str(run)])
    try:
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("buffer_service is ready"))
        next(child for child in family(process) if Path(child.exe()).name == "valkey-server").kill()
        for line in process.stdout:
            said += line
            if "redis failed with signal SIGKILL; restarting" in line:
                break
        wait_until(lambda: status(run) == "running" or process.poll() is not None, timeout_s=30, what="it runs")
        said += stopped(process)
    finally:
        kill_family(process)
    assert "mine is up at http://" in said


def test_a_training_loop_goes_on_while_redis_and_the_service_are_killed_under_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "mine")
    with buffer_up(run.path, "--algorithm.batch_size", "16", "--buffer.port", "0") as (process, client):
        token = token_for_run(run.path)
        example = [sys.executable, str(REPOSITORY / "examples" / "other_framework.py"), client.url, str(NUM_STEPS)]
        assert token is not None
        env = os.environ | {"BAPO_TOKEN": str(token()), "PYTHONPATH": str(REPOSITORY)}
        with subprocess.Popen(example, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as loop:
            for step, part in ((5, "valkey-server"), (20, "buffer_service")):
                wait_until(
                    lambda step=step: client.progress().step > step or loop.poll() is not None, what=f"step {step}"
                )
                assert loop.poll() is None, loop.communicate()[0][-2000:]
                next(child for child in family(process) if part in " ".join(child.cmdline())).kill()
            output, _ = loop.communicate(timeout=200)
            assert loop.returncode == 0, output[-2000:]
        steps = [int(line.split()[1]) for line in output.splitlines()]
        assert steps == list(range(1, NUM_STEPS + 1))
        assert BufferAdmin(client.url, token=token).verify().violations == []
        assert "redis failed with signal SIGKILL; restarting" in stopped(process)
