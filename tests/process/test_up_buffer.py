"""`bapo up buffer`: Redis and the buffer service alone, as a user of another framework starts them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import urllib3

from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.token_store import TokenSet, token_for_run
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from services.launcher.embedded_redis import url_of
from tests.support.factories import make_request
from tests.support.launch import alive, family, kill_family, start
from tests.support.wait import wait_until

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
        redis_url = url_of(RunDirectory(run))
        first = stopped(process)
    token = f"{run}/tokens/operator/token"
    for said in (f"up at {client.url}", f"{run}/redis", token, f"bapo buffer stats {run}", "Ctrl-C"):
        assert said in first
    with buffer_up(run) as (process, client):
        now = client.status()
        assert (now.cursor, now.queued["fresh"], now.leased["fresh"]) == (2, 1, 1)
        with redis.Redis.from_url(redis_url) as beside:
            assert beside.ping(), "its password is that of the first start"
        seen = urllib3.request("GET", f"{client.url}/metrics", headers={"Authorization": f"Bearer {operator(run)}"})
        _, _, found = seen.data.decode().partition('bapo_run_disk_size_bytes{run="mine"} ')
        assert float(found.split()[0]) == shutil.disk_usage(run).total
        said = stopped_by_command(run, process)
        second, _ = process.communicate(timeout=60)
    assert "started by process" in said
    assert f"it stores: bapo up buffer --run {run}" in said
    assert "  stores step" not in first
    assert "  stores step 0, 2 open requests, 0 fresh groups\n" in second


def test_a_finished_run_stays_finished_when_its_buffer_was_looked_at(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "done", "[buffer]\nport = 0\n")
    (run.path / "run.json").write_text(json.dumps({"status": "finished"}))
    with buffer_up(run.path) as (process, client):
        assert client.status().cursor == 0
        stopped(process)
    assert status(run.path) == "finished"


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
