"""The ranks of a learner that starts them itself end together, and the first failure is what is told."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo.core.errors import ConfigError
from bapo.runtime.rank_environment import LISTENER, free_port, nodes_of, rank_environments
from bapo.runtime.run_directory.layout import RunDirectory
from learner.distributed import spawn_ranks
from learner.distributed.spawn_ranks import exit_code, run_ranks
from services.launcher.processes import Starter
from tests.support.learner import learner_config

REPOSITORY = Path(__file__).parents[2]
FOREVER = "import time; time.sleep(600)"


def run(*scripts: str) -> tuple[int, list[str]]:
    """Exit code and lines of ranks that each run one of these."""
    choose = f"import os; exec({scripts!r}[int(os.environ['RANK'])])"
    out = io.BytesIO()
    code = run_ranks([sys.executable, "-c", choose], rank_environments(len(scripts), 1), out)
    return code, out.getvalue().decode().splitlines()


def test_one_rank_alone_meets_nobody() -> None:
    (alone,) = rank_environments(1, 2)
    assert alone["OMP_NUM_THREADS"] == "2"
    assert not alone.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


TWO_HOSTS = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1"}
"""The second of two."""


def test_each_host_starts_its_own_ranks_which_meet_at_host_0() -> None:
    third, fourth = rank_environments(4, 1, nodes=nodes_of(TWO_HOSTS))
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in (third, fourth)] == [("2", "0"), ("3", "1")]
    (only,) = rank_environments(2, 1, nodes=nodes_of(TWO_HOSTS | {"PET_MASTER_PORT": "4000"}))
    assert (only["RANK"], only["WORLD_SIZE"], only["LOCAL_WORLD_SIZE"]) == ("1", "2", "1")
    assert (only["MASTER_ADDR"], only["MASTER_PORT"], third["MASTER_PORT"]) == ("10.0.0.1", "4000", "29500")
    assert "GLOO_SOCKET_IFNAME" not in only, "not the loopback"


@pytest.mark.parametrize(
    "wrong", [{"PET_NODE_RANK": "2"}, {"PET_NODE_RANK": ""}, {"PET_MASTER_ADDR": ""}, {"PET_NNODES": "1:2"}]
)
def test_a_host_without_its_place_among_the_hosts_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the number of this one from 0"):
        nodes_of(TWO_HOSTS | wrong)


def test_every_host_has_the_same_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match=r"learner\.num_ranks = 3"):
        rank_environments(3, 1, nodes=nodes_of(TWO_HOSTS))


def test_the_launcher_holds_the_place_where_ranks_meet_for_all_their_starts(tmp_path: Path) -> None:
    starter = Starter(learner_config(learner={"num_ranks": 2}), RunDirectory.create(tmp_path / "run"))
    first, second = starter.learner(resume=False)
    place = (first.env["MASTER_ADDR"], int(first.env["MASTER_PORT"]))
    assert place == (second.env["MASTER_ADDR"], int(second.env["MASTER_PORT"]))
    assert (list(first.pass_fds), list(second.pass_fds)) == ([int(first.env[LISTENER])], [])
    with socket.socket() as other:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(place)
        starter.close()
        other.bind(place)


def test_the_launcher_starts_the_ranks_of_its_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TWO_HOSTS | {"PET_NODE_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    starter = Starter(
        learner_config(learner={"num_ranks": 4, "minibatch_size": 4}), RunDirectory.create(tmp_path / "run")
    )
    specs = starter.learner(resume=False)
    assert [(spec.name, spec.env["RANK"], spec.env["WORLD_SIZE"]) for spec in specs] == [
        ("learner", "0", "4"),
        ("learner-1", "1", "4"),
    ]
    assert {spec.env["MASTER_ADDR"] for spec in specs} == {"10.0.0.1"}
    starter.close()


def test_lines_name_their_rank_and_all_well_is_zero() -> None:
    script = "import os, sys; print('of', os.environ['WORLD_SIZE'], file=sys.stderr); sys.stdout.write('no newline')"
    code, lines = run(script, script)
    assert code == 0
    assert sorted(lines) == ["[rank 0] no newline", "[rank 0] of 2", "[rank 1] no newline", "[rank 1] of 2"]


@pytest.mark.parametrize(
    ("failing", "code", "words"),
    [
        ("raise SystemExit(4)", 4, "learner: rank 1 exited with exit code 4"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "learner: rank 1 exited with signal 9"),
    ],
)
def test_one_that_fails_ends_the_others_and_gives_the_exit_code(failing: str, code: int, words: str) -> None:
    found, lines = run(FOREVER, failing, FOREVER)
    assert found == code
    assert words in lines
    assert {"learner: rank 0 exited with signal 15", "learner: rank 2 exited with signal 15"} < set(lines)


def test_one_that_does_not_heed_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn_ranks, "END_S", 0.5)
    told = str(tmp_path / "deaf")
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({told!r}, 'w'); {FOREVER}"
    fails = f"import os, time\nwhile not os.path.exists({told!r}): time.sleep(0.05)\nraise SystemExit(3)"
    code, lines = run(deaf, fails)
    assert code == 3
    assert lines[-1] == "learner: rank 0 exited with signal 9"


@pytest.mark.parametrize(
    ("ends", "was_asked", "code"),
    [
        ([0, 0], False, 0),
        ([1, 4], False, 4),  # it lost its peer, and ended sooner
        ([134, 2], False, 2),  # gloo aborted where it lost its peer
        ([5, 4], False, 5),
        ([137, 1], False, 137),
        ([1, 137], False, 1),
        ([0, 1], False, 1),
        ([0, 1], True, 0),  # rank 0 left as it was asked to
        ([143, 143], True, 143),  # with --restart, or before they listened
        ([143, 1], True, 143),
        ([1, 3], True, 3),
        ([6, 1], False, 1),  # it says that it lost its peer
        ([6, 137], False, 137),
        ([6, 3], False, 3),
        ([0, 6], False, 6),
        ([6, 0], True, 0),
    ],
)
def test_a_verdict_of_ours_counts_before_what_follows_from_a_lost_peer(
    ends: list[int], was_asked: bool, code: int
) -> None:
    assert exit_code(ends, was_asked=was_asked) == code


PARENT = """
import sys
from bapo.runtime.rank_environment import rank_environments
from learner.distributed.spawn_ranks import run_ranks
SCRIPT = '''
import os, signal, sys, time
def leave(number, frame):
    print("heard", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print("listens", os.getpid(), flush=True)
time.sleep(600)
'''
sys.exit(run_ranks([sys.executable, "-c", SCRIPT], rank_environments(2, 1)))
"""


@pytest.fixture
def parent() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PARENT], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def pids_of(parent: subprocess.Popen[str]) -> list[int]:
    """Of its two ranks, once both listen."""
    assert parent.stderr is not None
    return [int(parent.stderr.readline().split()[-1]) for _ in range(2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_each(parent: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        pids_of(parent)
        parent.send_signal(number)
        _, lines = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode == 0
    assert sorted(lines.splitlines()) == [f"[rank 0] heard {number}", f"[rank 1] heard {number}"]


def test_ranks_do_not_outlive_the_process_that_started_them(parent: subprocess.Popen[str]) -> None:
    ranks = pids_of(parent)
    parent.kill()
    parent.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, ranks))


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_free_port_is_none_that_an_outgoing_connection_may_take_before_its_server_starts() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first <= 11_000:
        pytest.skip(f"outgoing connections may take any port from {first} here")
    assert not {free_port() for _ in range(200)} & set(range(first, last + 1))
