"""Redis on another host, as far as the kernel can tell: in a network namespace, behind a cable that is pulled.

Unlike a proxy, a link that is down leaves both ends with open connections that hear nothing, and TCP repeats what was
lost when it comes back. Needs root; skipped with a reason elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.chaos.invariants import violations
from tests.full.chaos.stage import Stage
from tests.full.chaos.trial import EAGER, PATIENCE_S, START_S, Trial, Watch
from tests.support.redis_server import BINARY

pytestmark = [pytest.mark.long]

NAME = f"bapo{os.getpid() % 10_000}"
HERE, THERE = "10.231.77.1", "10.231.77.2"
PORT = 6379


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[str]:
    """A namespace with one address and a cable to it; yields the far end of the cable.

    The far end, because our own end would take its route with it, and who knows where packets go then.
    """
    made = ip("netns", "add", NAME)
    if made.returncode != 0:
        pytest.skip(f"cannot make a network namespace here: {made.stderr.strip()}")
    try:
        ours, theirs = f"{NAME}a", f"{NAME}b"
        for words in (
            ("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", NAME),
            ("addr", "add", f"{HERE}/30", "dev", ours),
            ("link", "set", ours, "up"),
            ("-n", NAME, "addr", "add", f"{THERE}/30", "dev", theirs),
            ("-n", NAME, "link", "set", theirs, "up"),
        ):
            done = ip(*words)
            assert done.returncode == 0, done.stderr
        yield theirs
    finally:
        ip("netns", "del", NAME)


@pytest.fixture
def far_redis(cable: str, tmp_path: Path) -> Iterator[str]:
    """A server in the namespace; yields its URL."""
    options = ["--port", str(PORT), "--bind", THERE, "--protected-mode", "no", "--appendonly", "yes", "--save", ""]
    command = ["ip", "netns", "exec", NAME, str(BINARY), *options, "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        yield f"redis://{THERE}:{PORT}/0"
        server.kill()


def test_a_run_goes_on_when_the_cable_to_its_redis_was_pulled(cable: str, far_redis: str, tmp_path: Path) -> None:
    overrides = EAGER | {"buffer.redis_url": far_redis, "security.open_redis": "true"}
    stage = Stage(tmp_path / "stage", overrides)
    try:
        stage.start()
        watch = Watch(stage, Trial(seed=0, overrides=overrides))
        watch.wait_for_commits(3, START_S)
        for seconds in (1.0, 8.0):
            ip("-n", NAME, "link", "set", cable, "down")
            time.sleep(seconds)
            ip("-n", NAME, "link", "set", cable, "up")
            watch.wait_for_commits(3, PATIENCE_S)
        assert stage.end() == 130, stage.last_words
        assert violations(stage.evidence(far_redis)) == []
    finally:
        stage.close()
