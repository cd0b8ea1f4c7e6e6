"""A run under way that faults may befall: the real launcher and all its processes, their ledgers, the links between."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import redis

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.types import Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from buffer_service.store.redis.keys import Keys
from rollout_server.delivery import NUM_GRADERS
from services.launcher.embedded_redis import _socket_path, url_of
from tests.full.chaos.evidence import Evidence, Stored, read_store
from tests.full.chaos.faults import ACTOR, GRADER, GUARD, NODE, ROLLOUT_SERVER
from tests.full.chaos.launcher import ROUTES
from tests.full.chaos.ledger import read_ledgers
from tests.full.chaos.part import LEDGER_FOLDER, SABOTAGE
from tests.support.buffer import new_store
from tests.support.launch import REPOSITORY, family, kill_family, train_arguments
from tests.support.network import Network
from tests.support.redis_server import RedisServer, free_port
from tests.support.small_disk import fill

OVERRIDES: Mapping[str, object] = {
    # Leases and attempts are those of every run: a lease that nobody gives back costs two minutes, and is seen by that.
    "supervision.max_restarts": 1_000_000,  # faults come once a second
    "supervision.window_s": 0.5,
    "supervision.restart_backoff_s": 0.05,
    "checkpoint.every": 3,  # not a multiple of the re-evaluation period: a round may lie on either side of it
    "evaluation.every": 16,
    "evaluation.num_prompts": 4,
    "evaluation.num_prompts_final": 4,
    "task.options.num_train": 48,
    "algorithm.max_reevaluated": 4,
    "rollout.engine_options.skill_start": 0.2,
    "rollout.engine_options.skill_gain": 0.002,
}
BELOW_THE_FLEET = {GRADER: "bapo.tasks.grading.process", NODE: "raylet/raylet", ACTOR: "ray::WorkerActor"}
"""Processes of the rollout server's own, and words of their command lines."""
ONE_EACH = (
    "valkey-server ",
    "part buffer_service",
    "part rollout_server",
    "part services.scheduler",
    "part services.evaluator",
    BELOW_THE_FLEET[NODE],
)
"""Words of the command lines of what a run has one of."""
ACTOR_SITE = Path(__file__).with_name("actor_site")
"""Where Ray's workers find what makes them keep ledgers."""
END_S = 40.0
FIND_S = 60.0
STORAGE = 3
"""Exit code of a run that cannot write; it names the command that goes on with it."""


class Stage:
    """One run directory; the run can be started, ended and started again."""

    def __init__(
        self, folder: Path, overrides: Mapping[str, object], *, sabotage: str = "", disk: Path | None = None
    ) -> None:
        """`disk`: a small file system that holds the run alone, to be filled."""
        self._disk = disk
        self._was_filled = False
        self._ledgers = folder / "ledgers"
        self._ledgers.mkdir(parents=True, exist_ok=True)
        self._sabotage = sabotage
        self.network = Network()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._output = folder / "launcher.log"
        self._said_before = 0
        """Bytes of the output that earlier launchers have written."""
        ports = {name: free_port() for name in ("buffer", "rollout")}
        place = {} if disk is None else {"run.root": disk}
        settings = {**OVERRIDES, **overrides, **place, **{f"{name}.port": port for name, port in ports.items()}}
        tokens = [token for key, value in settings.items() for token in (f"--{key}", str(value))]
        arguments = train_arguments(folder, *tokens, num_steps=1_000_000)
        made = subprocess.run(
            [sys.executable, "-m", "bapo.cli", "create", *arguments[1:]],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        self.run = RunDirectory(Path(str(settings.get("run.root", folder / "outputs"))) / "run")
        self.config: Config = load_resolved(self.run.config_path)
        self._routes = self._make_routes(ports, folder)

    def _make_routes(self, ports: Mapping[str, int], folder: Path) -> dict[str, str]:
        routes = {}
        for link in ("workers", "learner", "scheduler", "evaluator", "fleet"):
            target = ports["rollout" if link == "fleet" else "buffer"]
            host, port = self.network.add(link, ("127.0.0.1", target))
            routes[link] = f"http://{host}:{port}"
        if self.config.buffer.redis_url is not None:
            return routes
        socket_path = folder / "r.sock"
        self.network.add("redis", self._redis_socket, socket_path)
        return {**routes, "redis": f"unix://{socket_path}"}

    @property
    def _redis_socket(self) -> Path:
        return _socket_path(self.run.redis_path.resolve())

    @property
    def redis_url(self) -> str:
        """Straight to Redis, past its proxy."""
        return url_of(self.run)

    def start(self, *, resume: bool = False) -> None:
        """Start the launcher; returns at once."""
        flags = ["--resume"] if resume else []
        environment = {
            ROUTES: json.dumps(self._routes),
            LEDGER_FOLDER: str(self._ledgers),
            SABOTAGE: self._sabotage,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{ACTOR_SITE}",
            "OMP_NUM_THREADS": "1",
        }
        with self._output.open("ab") as output:
            self._said_before = output.tell()
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "tests.full.chaos.launcher", "train", "--run-dir", str(self.run.path), *flags],
                cwd=REPOSITORY,
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Of the launcher; None while the run goes on."""
        assert self._launcher is not None
        return self._launcher.poll()

    def fill_disk(self, seconds: float) -> None:
        """Nothing more fits for so long, or until the run has ended by that."""
        assert self._disk is not None, "this run has no disk of its own"
        self._was_filled = True
        filler = self._disk / "filler"
        fill(filler)
        end = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < end:
            time.sleep(0.05)
        filler.unlink()

    def resumed_on_free_disk(self) -> bool:
        """Whether the run had ended because its disk was full, with advice; it is started again then, as advised."""
        words = self.last_words
        if self.exit_code != STORAGE or not self._was_filled or "bapo train --resume" not in words:
            return False
        self._was_filled = False
        self.start(resume=True)
        return True

    @property
    def words(self) -> str:
        """What the user sees."""
        return self._output.read_text(errors="replace")

    @property
    def ready_parts(self) -> set[str]:
        """Those that this launcher has called ready: who kills another one ends the run, by the launcher's rule."""
        said = self._output.read_bytes()[self._said_before :].decode(errors="replace")
        return set(re.findall(r"^(\S+) is ready after", said, re.MULTILINE))

    @property
    def last_words(self) -> str:
        """The end of it."""
        return "\n".join(self.words.splitlines()[-12:])

    def logs(self) -> list[Path]:
        """Where the launcher and all processes of the run have written."""
        return [self._output, *sorted((self.run.path / "logs").iterdir())]

    def process(self, whom: str) -> psutil.Process:
        """The process that has this part now, waiting for it while it starts again."""
        deadline = time.monotonic() + FIND_S
        while time.monotonic() < deadline and self.exit_code is None:
            try:
                return self._find(whom)
            except (psutil.NoSuchProcess, KeyError, IndexError):
                time.sleep(0.05)
        raise psutil.NoSuchProcess(0, whom)

    def has(self, whom: str) -> bool:
        """Whether this part runs now: some have ended before the run has."""
        with suppress(psutil.NoSuchProcess, KeyError, IndexError):
            return self._find(whom).is_running()
        return False

    def _find(self, whom: str) -> psutil.Process:
        facts = self.run.read_run()["processes"]
        process = psutil.Process(facts[ROLLOUT_SERVER if whom in (GUARD, *BELOW_THE_FLEET) else whom]["pid"])
        if whom in (ROLLOUT_SERVER, *BELOW_THE_FLEET):  # the launcher knows their guard
            process = process.children()[0]
        if whom in BELOW_THE_FLEET:
            process = random.choice([child for child in process.children(recursive=True) if _is(child, whom)])
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid)
        return process

    def twins(self) -> list[str]:
        """What runs more often than a run needs it: whatever dies must leave nothing that its successor finds beside
        it. Looked at twice, because a process that forks stands there twice for a moment."""
        most = dict.fromkeys(ONE_EACH, 1) | {
            "part learner": self.config.learner.num_ranks,
            BELOW_THE_FLEET[GRADER]: NUM_GRADERS * self.config.rollout.num_workers,
        }
        first = self._running(most)
        time.sleep(1.0)
        again = self._running(most)
        return [
            f"{name} runs {first[name]} and {again[name]} times, at most {number}"
            for name, number in most.items()
            if min(first[name], again[name]) > number
        ]

    def _running(self, names: Mapping[str, int]) -> Counter[str]:
        found: Counter[str] = Counter()
        assert self._launcher is not None
        for member in family(self._launcher):
            with suppress(psutil.Error):
                words = " ".join(member.cmdline())
                found.update(name for name in names if name in words and "subreaper.py" not in words)
        return found

    def end(self) -> int:
        """Ctrl-C; returns the exit code of the launcher."""
        assert self._launcher is not None
        members = family(self._launcher) if self._launcher.poll() is None else []
        self._launcher.send_signal(signal.SIGINT)
        try:
            return self._launcher.wait(END_S)
        finally:
            kill_family(self._launcher)
            left = [member for member in members if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
            assert not left, f"the launcher left {left}"

    def kill(self) -> None:
        """SIGKILL to the launcher, and with it to everything: a power failure, but for what the kernel still writes."""
        assert self._launcher is not None
        members = family(self._launcher)
        self._launcher.kill()
        self._launcher.wait()
        psutil.wait_procs(members, timeout=END_S)

    def close(self) -> None:
        """Whatever happened: nothing is left running."""
        if self._launcher is not None:
            kill_family(self._launcher)
        self.network.close()

    def evidence(self, redis_url: str = "") -> Evidence:
        """Ledgers and Redis of a run that has ended; its own Redis, unless it had another one."""
        stored = read_store(redis_url, self.config.run.name) if redis_url else self._read_redis()
        return Evidence(self.config, read_ledgers(self._ledgers), stored)

    def _read_redis(self) -> Stored:
        server = RedisServer(self.run.redis_path, aof=True).start()
        try:
            return read_store(server.url, self.config.run.name)
        finally:
            server.stop()

    def leases_that_stay(self) -> Mapping[str, int]:
        """Purpose -> requests that are still leased when nobody has renewed them for `buffer.lease_s`, which is not
        waited for: every lease is made to end so much earlier."""
        server = RedisServer(self.run.redis_path, aof=True).start()
        try:
            age_leases(server.url, self.config.run.name, self.config.buffer.lease_s + 0.5)
            store = new_store(server.url, run=self.config.run.name, max_attempts=1_000_000)
            return {purpose: number for purpose, number in store.status().leased.items() if number}
        finally:
            server.stop()


def age_leases(url: str, run: str, seconds: float) -> None:
    """As if so much time had passed."""
    keys = Keys(run)
    with redis.Redis.from_url(url) as client:
        for purpose in Purpose:
            key = keys[f"leases_{purpose.value}"]
            for member, _ in client.zrange(key, 0, -1, withscores=True):
                client.zincrby(key, -1000 * seconds, member)


def _is(process: psutil.Process, whom: str) -> bool:
    return BELOW_THE_FLEET[whom] in " ".join(process.cmdline())


class Tail:
    """The lines that ledgers have got since the last look."""

    def __init__(self, stage: Stage) -> None:
        self._folder = stage._ledgers
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """New whole lines."""
        found: list[dict[str, Any]] = []
        for path in self._folder.glob("learner-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found += [json.loads(line) for line in whole.splitlines()]
        return found


def commits(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """When steps were finished."""
    return [line["at"] for line in lines if line["event"] == "commit"]
