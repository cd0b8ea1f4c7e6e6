"""Tiers, their order and their time, and the fixtures that several tiers share.

unit        no process, no socket, no sleep
contrib     the methods and tasks of `contrib/`, by hand
contract    every plug-in; the store and the HTTP API against one real Redis per xdist worker
process     one or two real processes
smoke       whole stories, most of them on one shared run
full        everything else: variants, chaos, fuzz, browser, manifests (`make test-full`)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import settings

from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.runtime.auth.token_store import TokenSet
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.torchvision_build import complete_torchvision
from tests.support.browser import chromium
from tests.support.launch import Start, kill_family, start
from tests.support.redis_server import RedisServer
from tests.support.rollout_process import Server, StartServer
from tests.support.small_disk import NoMountError, mounted

if TYPE_CHECKING:
    from tests.support.learner_peers import Peers
    from tests.support.rollout import MemoryBuffer

complete_torchvision()  # where one is installed: modules of tests import transformers
TIERS = ("smoke", "process", "contract", "contrib", "unit", "full")
"""In the order in which they run: what takes long begins first, so that no worker waits for another at the end."""
TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
STARTED = time.monotonic()

# A busy machine is no failure: how long an example takes belongs in benchmarks.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of CI: both tell what was not run instead of running out of time."""
    parser.addoption("--stop-after", type=float, metavar="SECONDS", help="begin no test later than this")
    parser.addoption("--since", metavar="COMMIT", help="begin with the files that changes since this commit touch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by tier, what the change touches first; skip what takes minutes unless `-m long` asks for it."""
    for item in items:
        if tier_of(item.path) is None:
            raise pytest.UsageError(f"{item.path} belongs to no tier: move it to one of {', '.join(sorted(TIERS))}")
        if item.get_closest_marker("long") and "long" not in config.option.markexpr:
            command = f"python -m pytest -m long {item.path.relative_to(REPOSITORY)}"
            item.add_marker(pytest.mark.skip(reason=f"left out, takes minutes: {command}"))
    changed = changed_modules(config.option.since) if config.option.since else set()
    scores = {path: touched(path, changed) for path in {item.path for item in items}}
    items.sort(key=lambda item: (TIERS.index(str(tier_of(item.path))), -scores[item.path]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin nothing after the time is up; name the file, which the summary counts."""
    stop_after = item.config.option.stop_after
    if stop_after is not None and time.monotonic() - STARTED > stop_after:
        pytest.skip(f"NOT RUN, out of time: python -m pytest {item.path.relative_to(REPOSITORY)}")


def tier_of(path: Path) -> str | None:
    """The folder below tests/, if it is a tier."""
    folder = path.relative_to(TESTS).parts[0]
    return folder if folder in TIERS else None


def changed_modules(commit: str) -> set[str]:
    """Dotted names of the Python files that differ from a commit."""
    command = ["git", "diff", "--name-only", commit, "--", "*.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {dotted(Path(line)) for line in done.stdout.splitlines()}


def touched(test: Path, changed: set[str]) -> int:
    """How near a test file is to a change: itself, the changed modules that it names, those of their packages."""
    if dotted(test.relative_to(REPOSITORY)) in changed:
        return 1000
    if not changed:
        return 0
    names = set(re.findall(r"[a-z_]+(?:\.\w+)+", test.read_text(encoding="utf-8")))
    return 10 * len(names & changed) + len(set(map(package_of, names)) & set(map(package_of, changed)))


def dotted(path: Path) -> str:
    """a/b.py as a.b."""
    return ".".join(path.with_suffix("").parts)


def package_of(module: str) -> str:
    """a.b of a.b.c."""
    return module.rpartition(".")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tiers were not asked for."""
    asked = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    left = [tier for tier in sorted(TIERS) if not asked & {TESTS / tier, TESTS, REPOSITORY}]
    if len(left) < len(TIERS):
        paths = " ".join(f"tests/{tier}" for tier in left)
        terminalreporter.line(f"left out: {paths or 'no tier'}" + "; make test-full runs tests/full" * ("full" in left))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One real server for the whole xdist worker; use `redis_url` unless a test needs the process."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of a real server without any keys."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; nobody writes to it."""
    from tests.support.tiny_model import write_tiny_model  # here: it imports torch

    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


@pytest.fixture
def made(tmp_path: Path) -> TokenSet:
    """Tokens of all roles."""
    found = TokenSet(tmp_path / "tokens")
    found.create()
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose disk is soon full."""
    try:
        with mounted(tmp_path / "disk") as folder:
            yield folder
    except NoMountError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    with chromium() as found:
        yield found


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test appends; those that still run at its end are killed with their descendants."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        kill_family(process)


@pytest.fixture
def started(processes: list[subprocess.Popen[str]]) -> Start:
    """Starts `bapo` commands and leaves nothing of them behind."""

    def begin(arguments: Sequence[str]) -> subprocess.Popen[str]:
        processes.append(start(arguments))
        return processes[-1]

    return begin


@pytest.fixture
def peers() -> Iterator[Peers]:
    """What a learner process calls: a batch of four groups for each step."""
    from tests.support.learner import random_batch  # here: it imports torch
    from tests.support.learner_peers import Peers, serve

    with serve(Peers(lambda step: random_batch(step=step, num_groups=4))) as running:
        yield running


@pytest.fixture
def memory_buffer() -> Iterator[tuple[MemoryBuffer, str]]:
    """A buffer in memory behind a real socket, and its URL."""
    from tests.support.rollout import MemoryBuffer, Served, buffer_app  # here: they import the rollout server

    memory = MemoryBuffer()
    served = Served(buffer_app(memory))
    yield memory, served.url
    served.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts rollout servers and leaves nothing of them behind."""
    servers: list[Server] = []

    def begin(config: Config, buffer_url: str) -> Server:
        run = RunDirectory.create(tmp_path / f"run-{len(servers)}", dump_toml(config))
        log = tmp_path / f"server-{len(servers)}.log"
        command = [sys.executable, "-m", "rollout_server", "--config", str(run.config_path)]
        command += ["--run-dir", str(run.path), "--buffer-url", buffer_url]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
        servers.append(Server(process=process, run=run, log=log))
        return servers[-1]

    yield begin
    for server in servers:
        left = server.descendants()
        server.process.kill()
        server.process.wait()
        for process in left:
            if process.is_running():
                process.kill()
