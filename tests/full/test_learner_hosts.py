"""A learner of two ranks on two hosts, which are network namespaces: it trains, and a rank that is lost ends both."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.multi_host.hosts import Hosts, HostsError, address
from tests.support.learner import random_batch
from tests.support.learner_peers import Peers, serve
from tests.support.learner_process import environment_of_no_rank, make_run

TIMEOUT_S = 240.0
CLONE_NEWNET = 0x40000000


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as held:
        try:
            found = held.enter_context(Hosts(2))
        except HostsError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found


@pytest.fixture
def peers(hosts: Hosts) -> Iterator[Peers]:
    """Buffer service and rollout server on host 1, for rank 0."""

    def enter() -> None:
        with hosts.namespace(1).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        held.enter_context(serve(peers))  # a socket stays in the network in which it was made

    peers = Peers(lambda step: random_batch(num_groups=4, step=step))
    with ExitStack() as held, ThreadPoolExecutor(1) as thread:
        thread.submit(enter).result()
        yield peers


class Learner:
    """`python -m learner` on each host."""

    def __init__(self, hosts: Hosts, run: RunDirectory, url: str) -> None:
        self._hosts, self._run, self._url = hosts, run, url
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, i: int, *flags: str, torchrun: bool = False) -> None:
        """On host `i` of 1 and 2."""
        nodes = {"PET_NNODES": "2", "PET_NODE_RANK": str(i - 1), "PET_MASTER_ADDR": address(1)}
        paths = ["--config", str(self._run.config_path), "--run-dir", str(self._run.path)]
        urls = ["--buffer-url", self._url, "--rollout-url", self._url]
        # As a host's name, that of this machine is of no use in a namespace.
        env = environment_of_no_rank() | nodes | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        launcher = ["-m", "torch.distributed.run"] if torchrun else []
        command = [sys.executable, *launcher, "-m", "learner", *paths, *urls, *flags]
        self._log(i).unlink(missing_ok=True)
        self._processes[i] = self._hosts.start(i, command, env=env, log=self._log(i))

    def end(self, i: int) -> tuple[int, str]:
        """Exit code and log of host `i`."""
        return self._processes[i].wait(TIMEOUT_S), self._log(i).read_text()

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, whose environment says which it is."""
        for process in psutil.Process(self._processes[number + 1].pid).children(recursive=True):
            if process.environ().get("RANK") == str(number):
                return process
        raise AssertionError(f"no rank {number}")

    def _log(self, i: int) -> Path:
        return self._run.path.parent / f"host-{i}.log"


def test_ranks_that_torchrun_starts_on_two_hosts_train(hosts: Hosts, peers: Peers, tmp_path: Path) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2})
    learner = Learner(hosts, run, peers.url)
    learner.start(2, torchrun=True)  # the second waits for the first
    learner.start(1, torchrun=True)
    ends = [learner.end(1), learner.end(2)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]


def test_a_killed_rank_ends_both_hosts_is_named_and_both_resume_whatever_the_second_was_started_with(
    hosts: Hosts, peers: Peers, tmp_path: Path
) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2})
    learner = Learner(hosts, run, peers.url)
    peers.withheld.add(3)
    learner.start(1)
    learner.start(2)
    assert peers.asked.wait(TIMEOUT_S), learner.end(1)
    learner.rank(1).kill()
    (code, log), (second, second_log) = learner.end(1), learner.end(2)
    assert (code, second) == (6, 137), (log, second_log)
    assert "rank 0 lost rank 1 of the learner" in log
    assert "learner: rank 1 exited with signal 9" in second_log

    peers.withheld.clear()
    learner.start(1, "--restart")
    learner.start(2)
    ends = [learner.end(1), learner.end(2)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]


def test_a_host_that_is_cut_off_is_named_and_ends_the_run_at_the_deadline_also_during_a_wait_for_a_batch(
    hosts: Hosts, peers: Peers, tmp_path: Path
) -> None:
    run = make_run(tmp_path, learner={"num_ranks": 2, "collective_timeout_min": 0.6})
    learner = Learner(hosts, run, peers.url)
    peers.withheld.add(2)
    learner.start(1)
    learner.start(2)
    assert peers.asked.wait(TIMEOUT_S), learner.end(1)
    hosts.cut(2)
    code, log = learner.end(1)
    assert code == 6, log
    assert "rank 1 of the learner is silent for 30 s" in log
    assert "rank 1 of the learner is lost" in log
