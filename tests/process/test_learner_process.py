"""`python -m learner` as a process: it starts, shows its health, trains, ends on SIGTERM and goes on with --resume."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support import learner_process
from tests.support.learner_peers import Peers
from tests.support.learner_process import make_run

TIMEOUT_S = 120.0


def start(run: RunDirectory, peers: Peers, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"}
    return learner_process.start(run, peers, *flags, environment=environment)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    return learner_process.end_of(process, TIMEOUT_S)


def test_a_learner_ends_on_sigterm_while_it_waits_and_goes_on_with_resume_without_a_lost_record(
    tmp_path: Path, peers: Peers
) -> None:
    run = make_run(tmp_path)
    peers.withheld.add(3)
    peers.hold_s = 60.0
    process = start(run, peers)
    try:
        assert peers.asked.wait(TIMEOUT_S), "the learner never asked for batch 3"
        port = run.read_port("learner")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b'bapo_learner_step{run="bapo"} 2.0' in answer.read()
        asked_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
    finally:
        code, log = end_of(process)
    assert code == 0, log
    assert time.monotonic() - asked_at < peers.hold_s / 2, "it did not sit out the open question"
    assert "SIGTERM while waiting; resume with --resume" in log
    assert "waiting for its batch: 3/4 groups, 1 leased" in log
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert run.latest_checkpoint() == 2

    os.truncate(run.path / "groups" / "step-000002.parquet", 0)  # as a power failure leaves it
    peers.withheld.clear()
    peers.calls.clear()
    code, log = end_of(start(run, peers, "--resume"))
    assert code == 0, log
    assert "prompts of step 2 are not counted" in log
    posted = [call for call in peers.calls if call.startswith("POST")]
    assert posted[:3] == ["POST /resume", "POST /weights", "POST /batches/3"]
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert run.latest_checkpoint() == 3
    sent = [(update["version"], update["rollback"]) for update in peers.weights]
    assert sent == [(1, False), (2, False), (2, True), (4, False)]


@pytest.mark.parametrize(
    ("sections", "code", "words"),
    [
        ({"learner": {"batch_timeout_s": 0.5}}, 5, "DeadlineError: batch 1 is not ready, no progress for"),
        ({"learner": {"lr": 1e30, "grad_clip": 1e-3}}, 4, "DivergenceError: step 1, mini-batch 2 of 2"),
    ],
)
def test_a_failure_is_one_clear_line_and_its_exit_code(
    sections: Mapping[str, Any], code: int, words: str, tmp_path: Path, peers: Peers
) -> None:
    if code == 5:
        peers.withheld.add(1)
    got, log = end_of(start(make_run(tmp_path, **sections), peers))
    assert got == code, log
    assert words in log
    assert "Traceback" not in log
