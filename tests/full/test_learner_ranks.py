"""`python -m learner` with two ranks and no launcher, as in a container: it starts both, and they end together."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from bapo.runtime.rank_environment import meeting_place, rank_environments
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support import learner_process
from tests.support.learner_peers import Peers
from tests.support.learner_process import environment_of_no_rank, make_run
from tests.support.spawn_ranks import spawn_ranks

TIMEOUT_S = 240.0


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    return learner_process.end_of(process, TIMEOUT_S)


def start_by_hand(
    run: RunDirectory, peers: Peers, *flags: str, meeting: socket.socket | None = None
) -> list[subprocess.Popen[str]]:
    """Each rank as a process of its own, as on two hosts: nobody ends one for the other's sake."""
    given = environment_of_no_rank()
    environments = rank_environments(2, 1, meeting)
    return [learner_process.start(run, peers, *flags, environment=given | found) for found in environments]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_whose_peer_was_killed_says_so_in_one_line(tmp_path: Path, peers: Peers, killed: int) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2})
    peers.withheld.add(2)
    ranks = start_by_hand(run, peers)
    try:
        assert peers.asked.wait(TIMEOUT_S), "the learner never asked for batch 2"
        ranks[killed].kill()
        end_of(ranks[killed])
    finally:
        code, log = end_of(ranks[1 - killed])
    assert code == 6, log
    assert f"RankLostError: rank {1 - killed} lost rank {killed} of the learner" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("how", ["exits", "hangs"])
def test_the_other_ranks_name_the_lost_one_also_if_only_the_deadline_reveals_it(how: str) -> None:
    *found, _ = spawn_ranks("lost_rank", [how], 3)
    assert [text.partition(" of the learner")[0] for text in found] == ["rank 0 lost rank 2", "rank 1 lost rank 2"]


def listened(process: subprocess.Popen[str]) -> set[str]:
    """Addresses at which a process listens."""
    found = psutil.Process(process.pid).net_connections("tcp")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_ranks_that_start_again_meet_where_they_met_before_and_nobody_else_can_take_the_place(
    tmp_path: Path, peers: Peers
) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2})
    peers.withheld.add(2)
    with meeting_place() as meeting:
        ranks = start_by_hand(run, peers, meeting=meeting)
        assert peers.asked.wait(TIMEOUT_S), "the learner never asked for batch 2"
        assert {address for rank in ranks for address in listened(rank)} == {"127.0.0.1"}, "nobody else can join"
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            end_of(rank)
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(meeting.getsockname())
        peers.withheld.clear()
        ends = [end_of(rank) for rank in start_by_hand(run, peers, "--restart", meeting=meeting)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]


def test_sigterm_ends_both_ranks_and_is_no_end_of_the_run_for_what_starts_them_again(
    tmp_path: Path, peers: Peers
) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2})
    peers.withheld.add(2)
    process = learner_process.start(run, peers, "--restart", environment=environment_of_no_rank())
    try:
        assert peers.asked.wait(TIMEOUT_S), "the learner never asked for batch 2"
        process.send_signal(signal.SIGTERM)
    finally:
        code, log = end_of(process)
    assert code == 143, log
    assert "SIGTERM while waiting; resume with --resume" in log
