"""The processes of a run on one machine, and how to start them. Services are referenced by name, never imported."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import urllib3

from bapo.config.tree import Config
from bapo.core.addresses import http_url, reachable
from bapo.runtime import build_info
from bapo.runtime.auth.api_tokens import ACCEPTED, TOKEN, TOKEN_FILE
from bapo.runtime.auth.redis_password import PASSWORD, VARIABLES, without_password
from bapo.runtime.auth.token_store import TokenSet, set_of_run
from bapo.runtime.rank_environment import inherited, meeting_place, nodes_of, rank_environments
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.endpoints import AGENTS, BUFFER, DASHBOARD, ROLLOUT_SERVER
from services.launcher.gpus.plan import GpuPlan
from services.launcher.supervision import subreaper
from services.launcher.supervision.child_process import ProcessSpec, Restarts

LEARNER = "learner"
SCHEDULER = "scheduler"
EVALUATOR = "evaluator"
TRACKER = "tracker"

PROBE_TIMEOUT_S = 0.5
LOADING_S = 1800.0
"""Maximum time for the embedded Redis to load its append-only file. A crash is noticed earlier."""
LOOPBACK = "127.0.0.1"
PRIVATE = {TOKEN, TOKEN_FILE, ACCEPTED, *VARIABLES}
"""Variables that are not passed to every child."""
HUB_OFFLINE = "HF_HUB_OFFLINE"

VLLM_HINT = "vLLM engine loading, takes about 30-60 s on a CPU"
ENGINE_HINT = "starting workers"
LEARNER_HINT = "importing torch, loading the model"

NO_GPUS = GpuPlan()


class Starter:
    def __init__(self, config: Config, run: RunDirectory, gpus: GpuPlan = NO_GPUS) -> None:
        self._config = config
        self._gpus = gpus
        self._run = run
        self._env = base_environment(config)
        self._tokens = tokens_of(run)
        self._http = urllib3.PoolManager(retries=False, timeout=PROBE_TIMEOUT_S)
        self._ports = {name: port for name, _, port in configured_ports(config)}
        self._meeting: socket.socket | None = None

    def close(self) -> None:
        """Close what is kept open for restarted children."""
        if self._meeting is not None:
            self._meeting.close()

    @property
    def env(self) -> Mapping[str, str]:
        return self._env

    def buffer(self, redis_url: str) -> ProcessSpec:
        """The buffer service. A password in the URL is passed as a variable, because arguments are public."""
        given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        url, password = without_password(redis_url)
        # Only the embedded Redis has a password in its URL; the environment's password is for another Redis.
        env = {PASSWORD: password} if password else given
        flags = ["--redis-url", url, *(["--redis-timeout-s", f"{LOADING_S:.0f}"] if password else [])]
        spec = self._spec(BUFFER, BUFFER, *flags, host=self._config.buffer.host, env=env)
        return replace(spec, restarts=Restarts.CRASHED, again=lambda: self._same_port(BUFFER))

    def fleet(self) -> ProcessSpec:
        """The rollout server: a Ray node and its engines, below a subreaper that kills what Ray leaves behind."""
        hint = VLLM_HINT if self._config.rollout.engine == "vllm" else ENGINE_HINT
        env = self._gpus.worker_environment()
        spec = self._spec(ROLLOUT_SERVER, ROLLOUT_SERVER, hint=hint, host=self._config.rollout.host, env=env)
        argv = (sys.executable, "-I", subreaper.__file__, *spec.argv)
        return replace(
            spec,
            argv=argv,
            death_signal=subreaper.LAUNCHER_DIED,
            restarts=Restarts.CRASHED,
            again=lambda: self._same_port(ROLLOUT_SERVER),
        )

    def scheduler(self) -> ProcessSpec:
        return replace(self._spec(SCHEDULER, "services.scheduler", may_end=True), restarts=Restarts.CRASHED)

    def evaluator(self, *, once: bool = False) -> ProcessSpec:
        spec = self._spec(EVALUATOR, "services.evaluator", *(["--once"] if once else []), may_end=True)
        return replace(spec, restarts=Restarts.CRASHED)

    def agents(self) -> list[ProcessSpec]:
        """Processes that run the config's agents; none for a run without, or with agents outside only."""
        settings = self._config.agents
        number = settings.num_processes if settings is not None and settings.rollout is not None else 0
        names = [f"{AGENTS}-{i}" for i in range(number)]
        return [
            replace(self._spec(name, "services.agents", "--name", name, has_health=False), restarts=Restarts.USER_CODE)
            for name in names
        ]

    def dashboard(self) -> ProcessSpec:
        spec = self._spec(DASHBOARD, "services.dashboard", host=self._config.dashboard.host)
        return replace(spec, restarts=Restarts.CRASHED, again=lambda: self._same_port(DASHBOARD), is_optional=True)

    def trackers(self) -> list[ProcessSpec]:
        """One process per tracker, so that they fail independently."""
        own = {name: value for name, value in self._env.items() if name != HUB_OFFLINE or name in os.environ}
        return [
            replace(
                self._spec(f"{TRACKER}-{name}", "services.trackers", "--to", name, may_end=True, has_health=False),
                env=own,  # no token: it calls no BAPO service
                restarts=Restarts.CRASHED,
                is_optional=True,
            )
            for name in self._config.tracking.to
        ]

    def learner(self, *, resume: bool) -> list[ProcessSpec]:
        """One process per rank; rank 0 is probed for readiness. Ranks are restarted together."""
        specs = self._ranks(*(["--resume"] if resume else []))
        return [
            replace(
                spec,
                restarts=Restarts.KILLED,  # its own error would recur at the same step
                again=lambda: ("--restart",),
                team=LEARNER,
                milestone=lambda: self._run.latest_checkpoint() or 0,
            )
            for spec in specs
        ]

    def _ranks(self, *flags: str) -> list[ProcessSpec]:
        settings = self._config.learner
        gpus = self._gpus.learner_environment()
        if settings.num_ranks > 1 and self._meeting is None:
            self._meeting = meeting_place()
        # Host 0 of several: each other host runs `python -m learner`.
        environments = rank_environments(settings.num_ranks, settings.num_threads, self._meeting, nodes_of())
        return [
            replace(
                self._spec(
                    LEARNER if rank == 0 else f"{LEARNER}-{rank}",
                    LEARNER,
                    *flags,
                    env=environment | gpus,
                    hint=LEARNER_HINT,
                    may_end=True,
                    has_health=rank == 0,
                ),
                pass_fds=inherited(environment),
            )
            for rank, environment in enumerate(environments)
        ]

    def _spec(
        self,
        name: str,
        package: str,
        *flags: str,
        host: str = LOOPBACK,
        env: Mapping[str, str] | None = None,
        hint: str = "",
        may_end: bool = False,
        has_health: bool = True,
    ) -> ProcessSpec:
        paths = ("--config", str(self._run.config_path), "--run-dir", str(self._run.path))
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", package, *paths, *flags),
            env={**self._env, **self._tokens.variables_of(package), **(env or {})},
            log_path=self._run.log_path(name),
            is_ready=(lambda: self._answers(name, host)) if has_health else (lambda: True),
            hint=hint,
            may_end=may_end,
        )

    def _same_port(self, process: str) -> tuple[str, ...]:
        """Port argument of a restarted service, whose clients have looked up its port only once."""
        port = self._run.read_port(process)
        return ("--port", str(port)) if port else ()

    def _answers(self, process: str, host: str) -> bool:
        """Whether /readyz succeeds; a port chosen by the service is in RUN/ports."""
        port = self._ports[process] or self._run.read_port(process)
        if not port:
            return False
        try:
            return self._http.request("GET", f"{http_url(reachable(host), port)}/readyz").status == 200
        except urllib3.exceptions.HTTPError:
            return False


def tokens_of(run: RunDirectory) -> TokenSet:
    """The token set of the run, created if missing, or that of BAPO_TOKEN_SET. Raises: StorageError."""
    tokens = set_of_run(run.path)
    tokens.create()
    return tokens


def base_environment(config: Config) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in PRIVATE}
    env |= {
        # More threads than cores contend by spinning: one per process unless configured otherwise.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A custom task or reward may be next to the config or in the working directory.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    if Path(config.model.path).is_dir():
        env[HUB_OFFLINE] = "1"
    # Pin the code version: a process restarted later must report the same commit.
    known = build_info.commit()
    return env | ({build_info.VARIABLE: known} if known else {})


def configured_ports(config: Config) -> list[tuple[str, str, int]]:
    """(process, key, port) of all listening processes; port 0: a free one."""
    page = [(DASHBOARD, "dashboard.port", config.dashboard.port)] if config.dashboard.enabled else []
    return [
        (BUFFER, "buffer.port", config.buffer.port),
        (SCHEDULER, "scheduler.port", config.scheduler.port),
        (LEARNER, "learner.port", config.learner.port),
        (EVALUATOR, "evaluation.port", config.evaluation.port),
        (ROLLOUT_SERVER, "rollout.port", config.rollout.port),
        *page,
    ]
