"""`bapo up buffer`: Redis and the buffer service alone, as a user of another framework starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import urllib3

from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.token_store import TokenSet, token_for_run
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient
from services.launcher.embedded_redis import url_of
from tests.support.factories import make_request
from tests.support.launch import REPOSITORY, alive, family, kill_family, start
from tests.support.wait import wait_until

NUM_STEPS = 120
"""Of the example, of which Redis misses the sixth and the service the twenty-first."""
NEW = ["--algorithm.batch_size", "4", "--buffer.port", "0"]


@contextmanager
def buffer_up(run: Path, *tokens: str) -> Iterator[tuple[subprocess.Popen[str], BufferClient]]:
    process = start(["up", "buffer", "--run", str(run), *tokens])
    try:
        wait_until(lambda: status(run) == "running" or process.poll() is not None, what="it runs")
        port = RunDirectory(run).read_port("buffer_service")
        yield process, BufferClient(f"http://127.0.0.1:{port}", retry_s=30.0, token=token_for_run(run))
    finally:
        kill_family(process)


def status(run: Path) -> str:
    return str(RunDirectory(run).read_run().get("status"))


def operator(run: Path) -> str:
    return TokenSet(run / "tokens").path_of(Role.OPERATOR).read_text().strip()


def stopped(process: subprocess.Popen[str]) -> str:
    """Ctrl-C; returns what was printed."""
    below = family(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert alive(below) == []
    return output


def stopped_by_command(run: Path, process: subprocess.Popen[str]) -> str:
    """`bapo stop RUN`, which returns when every process has ended; returns what it printed."""
    below = family(process)
    stop = start(["stop", str(run)])
    output, _ = stop.communicate(timeout=60)
    assert (stop.returncode, process.wait(1.0)) == (0, 130)
    assert alive(below) == []
    return output


def test_the_buffer_alone_says_where_it_is_and_keeps_everything_over_a_restart(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    with buffer_up(run, *NEW) as (process, client):
        assert [Path(child.exe()).name for child in family(process)].count("valkey-server") == 1
        assert len(family(process)) == 2
        assert client.enqueue([make_request(prompt_id=name) for name in "ab"], cursor=2) == 2
        assert len(client.claim("w", limit=1, policy_version=1)) == 1
        first = stopped(process)
    token = f"{run}/tokens/operator/token"
    for said in (f"up at {client.url}", f"{run}/redis", token, f"bapo buffer stats {run}", "Ctrl-C"):
        assert said in first
    with buffer_up(run) as (process, client):
        now = client.status()
        assert (now.cursor, now.queued["fresh"], now.leased["fresh"]) == (2, 1, 1)
        seen = urllib3.request("GET", f"{client.url}/metrics", headers={"Authorization": f"Bearer {operator(run)}"})
        _, _, found = seen.data.decode().partition('bapo_run_disk_size_bytes{run="mine"} ')
        assert float(found.split()[0]) == shutil.disk_usage(run).total
        said = stopped_by_command(run, process)
        second, _ = process.communicate(timeout=60)
    assert "started by process" in said
    assert f"it stores: bapo up buffer --run {run}" in said
    assert "  stores step" not in first
    assert "  stores step 0, 2 open requests, 0 fresh groups\n" in second


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


def test_a_finished_run_stays_finished_when_its_buffer_was_looked_at(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "done", "[buffer]\nport = 0\n")
    (run.path / "run.json").write_text(json.dumps({"status": "finished"}))
    with buffer_up(run.path) as (process, client):
        assert client.status().cursor == 0
        stopped(process)
    assert status(run.path) == "finished"


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


def test_a_service_that_was_started_beside_it_knows_the_password_after_the_next_start(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "mine")
    with buffer_up(run.path, *NEW) as (process, _):
        first = url_of(run)
        stopped(process)
    with buffer_up(run.path) as (process, _):
        with redis.Redis.from_url(first) as client:
            assert client.ping()
        stopped(process)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--buffer.url", "http://127.0.0.1:1"], "a running service: there is nothing to start"),
        (["--algorithm.batch_sizes", "4"], "batch_size"),
    ],
)
def test_what_cannot_be_started_is_one_clear_message(tmp_path: Path, tokens: list[str], message: str) -> None:
    process = start(["up", "buffer", "--run", str(tmp_path / "new"), *tokens])
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, message in output, "Traceback" in output) == (2, True, False)
    assert not (tmp_path / "new").exists()


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
