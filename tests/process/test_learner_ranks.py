"""`python -m learner` with two ranks and no launcher, as in a container: it starts both, and they end together."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support import learner_process
from tests.support.learner_peers import Peers
from tests.support.learner_process import environment_of_no_rank, make_run

TIMEOUT_S = 240.0


def start(run: RunDirectory, peers: Peers, *flags: str) -> subprocess.Popen[str]:
    environment = environment_of_no_rank()
    return learner_process.start(run, peers, *flags, environment=environment)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    return learner_process.end_of(process, TIMEOUT_S)


def test_killing_one_rank_ends_both_and_restart_goes_on(tmp_path: Path, peers: Peers) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2})
    peers.withheld.add(3)
    process = start(run, peers)
    try:
        assert peers.asked.wait(TIMEOUT_S), "the learner never asked for batch 3"
        ranks = psutil.Process(process.pid).children()
        (second,) = [rank for rank in ranks if rank.environ()["RANK"] == "1"]
        second.send_signal(signal.SIGKILL)
    finally:
        code, log = end_of(process)
    assert code == 128 + signal.SIGKILL, log
    assert "learner: rank 1 exited with signal 9" in log
    assert "[rank 0] " in log
    assert not any(rank.is_running() for rank in ranks)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]

    peers.withheld.clear()
    code, log = end_of(start(run, peers, "--restart"))
    assert code == 0, log
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert run.latest_checkpoint() == 3
