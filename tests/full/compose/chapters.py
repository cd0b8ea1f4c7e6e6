"""The chapters of the check: each does one thing to a run in containers and says what it saw, or raises."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.full.compose.evidence import complaints, hosts_of, last_step
from tests.full.compose.monitoring import EXPECTED, look_at_grafana, look_at_prometheus
from tests.full.compose.stack import CheckError, Stack, get, say, status_of, wait_for

RUN = "check"
START_S, STEP_S, END_S = 900.0, 600.0, 3600.0
WINDOW_S = 60.0
"""Over which tokens per second are measured."""
MIN_GAIN = 1.5
"""Tokens per second of all servers over those of one, where sampling is what the run waits for (scripted engine)."""
VICTIMS = ("buffer", "rollout", "redis", "learner", "scheduler", "evaluator", "dashboard")
OURS = ("buffer", "rollout", "learner", "scheduler", "evaluator", "dashboard", "redis")
ENDED = {0, 143}
"""Exit codes behind SIGTERM: 143 of what has nothing to save and ends at once. 137 would be SIGKILL, after its time."""
TWO = ("--scale", "rollout=2")
"""Behind the chapter that scales."""
COMMANDS = "http://buffer:8700"
"""The buffer service, for commands inside of another container."""


class Check:
    """One run in containers."""

    def __init__(self, stack: Stack, *, engine: str, num_steps: int, num_servers: int) -> None:
        """`num_servers`: of rollout at the most, two or more."""
        self._stack, self._engine, self._num_steps, self._num_servers = stack, engine, num_steps, num_servers
        self._viewer = ""

    def start(self) -> None:
        """Everything is healthy, and the learner has trained."""
        began = time.monotonic()
        self._stack.compose("up", "-d", "--build", "--wait", "--wait-timeout", f"{START_S:.0f}", timeout_s=2 * START_S)
        say(f"up and healthy after {time.monotonic() - began:.0f} s, images built before or within")
        self._viewer = self._stack.secret("viewer")
        seconds = wait_for("the learner has begun step 3", STEP_S, lambda: self.step() >= 3)
        say(f"the learner is in step {self.step()} after {seconds:.0f} s more")

    def look_at_rights(self) -> None:
        """No process may write to its image or has a capability; no port answers without a token."""
        for service in OURS:
            container = self._stack.containers(service)[0]
            shell = "touch /x 2>/dev/null && echo wrote; id -u; grep CapEff /proc/1/status"
            found = self._stack.docker("exec", container, "sh", "-c", shell).split()
            if found[0] != "10001" or int(found[-1], 16) != 0:
                raise CheckError(f"{service} has more rights than it should: {found}")
        url = f"http://{self._stack.address(self._stack.containers('buffer')[0])}:8700/status"
        if status_of(url) != 401:
            raise CheckError(f"{url} answers without a token")
        say(f"read-only, user 10001, no capabilities: {', '.join(OURS)}; the buffer answers 401 without a token")

    def look_at_page(self) -> None:
        """The image of the services can read records and write Parquet files."""
        url = f"http://127.0.0.1:{self._stack.port('dashboard', 8704)}/api/v1/overview"

        def has_steps() -> bool:
            found = json.loads(get(url, self._viewer))
            if found["problem"]:
                raise CheckError(f"the web page: {found['problem']}")
            return bool(found["num_steps"] >= 2)

        wait_for("the web page shows two steps", STEP_S, has_steps)
        groups = self._bapo("buffer", "export", COMMANDS, "/tmp/groups.parquet", role="operator")
        say(f"the web page reads the groups of every step; bapo buffer export: {groups}")

    def scale(self) -> None:
        """More rollout servers make the run sample faster, and with all but two of them gone it goes on."""
        before, began = self.tokens_per_s(), time.monotonic()
        num = self._num_servers
        self._stack.compose("up", "-d", "--no-recreate", "--no-build", "--scale", f"rollout={num}")
        wait_for(f"{num} rollout servers are healthy", START_S, lambda: self.is_healthy("rollout", num))
        seconds = time.monotonic() - began
        after = self.tokens_per_s()
        gain = after / before
        is_judged = self._engine == "scripted"
        remark = "" if is_judged else "; not judged, they share the cores"
        say(f"tokens per second: {before:.0f} with one server, {after:.0f} with {num} ({gain:.2f} times{remark}), "
            f"healthy after {seconds:.0f} s")  # fmt: skip
        if is_judged and gain < MIN_GAIN:
            raise CheckError(f"{num} rollout servers sample {gain:.2f} times as fast as one, not {MIN_GAIN} times")
        if num > 2:
            self._scale_in()

    def _scale_in(self) -> None:
        """What the servers that are taken away had leased is sampled by others."""
        step, began = self.step_now(), time.monotonic()
        self._stack.compose("up", "-d", "--no-recreate", "--no-build", *TWO)
        wait_for("two rollout servers are left", STEP_S, lambda: self.is_healthy("rollout", 2))
        wait_for("a step of two rollout servers", STEP_S, lambda: self.step() > step + 1)
        say(f"all but two rollout servers taken away in step {step}: in step {self.step_now()} "
            f"after {time.monotonic() - began:.0f} s")  # fmt: skip

    def add_monitoring(self) -> None:
        """Prometheus and Grafana come to a run that goes on: no other container is made anew."""
        before = {service: self._stack.containers(service) for service in OURS}
        self._stack.env["COMPOSE_PROFILES"] = "cpu,monitoring"
        self._stack.compose("build", "prometheus", "grafana")
        began = time.monotonic()
        self._stack.compose("up", "-d", "--no-build", *TWO)
        for service in ("prometheus", "grafana"):
            wait_for(f"{service} is healthy", START_S, lambda s=service: self.is_healthy(s, 1))
        seconds = time.monotonic() - began
        if before != {service: self._stack.containers(service) for service in OURS}:
            raise CheckError("another profile has made containers of the run anew")
        say(f"profile monitoring added: healthy after {seconds:.0f} s, all other containers are the same as before")
        self.look_at_monitoring()

    def look_at_monitoring(self) -> None:
        """Prometheus reaches everything; Grafana shows its dashboards and gets an answer to each of their queries."""
        say(look_at_prometheus(self._stack, EXPECTED))
        say(look_at_grafana(self._stack))

    def kill_all(self) -> None:
        """Each process is killed; its container starts again by itself and the learner goes on."""
        for victim in VICTIMS:
            step = self.step_now()
            if step > self._num_steps - 2:
                raise CheckError(f"the run is over before {victim} was killed: give it more --steps")
            others = {service: self._stack.restarts(service) for service in OURS if service != victim}
            began, before = time.monotonic(), self._stack.kill(victim)
            wait_for(f"{victim} was started again", STEP_S, lambda v=victim, b=before: self._stack.restarts(v) > b)
            wait_for(f"{victim} is healthy", START_S, lambda v=victim: set(self._stack.health(v)) == {"healthy"})
            healed = time.monotonic() - began
            wait_for(f"a step after {victim} was killed", STEP_S, lambda s=step: self.step() > s + 1)
            trained = time.monotonic() - began
            if others != (now := {service: self._stack.restarts(service) for service in others}):
                raise CheckError(f"with {victim} others have ended; how often they were started again: {others}, {now}")
            say(f"killed {victim} in step {step}: healthy again after {healed:.0f} s, "
                f"the learner in step {self.step_now()} after {trained:.0f} s, and no other has ended")  # fmt: skip
        self._look_at_redis()

    def stop_and_go_on(self) -> None:
        """`docker compose stop` ends every process in order, and `up -d` goes on where it was."""
        step, began = self.step_now(), time.monotonic()
        self._stack.compose("stop")
        self._expect_end(OURS)
        stopped = time.monotonic() - began
        self._stack.compose("up", "-d", "--no-build", "--no-recreate", *TWO, timeout_s=2 * START_S)
        self._look_at_redis()
        wait_for("the learner is beyond the step in which it was stopped", START_S, lambda: self.step() > step + 1)
        say(f"docker compose stop in step {step}: all ended as asked after {stopped:.0f} s; "
            f"up -d: in step {self.step_now()} after {time.monotonic() - began - stopped:.0f} s")  # fmt: skip

    def finish(self) -> None:
        """A scripted run ends by itself, one with vLLM is stopped; either way its records and its buffer are whole."""
        whole = self._engine == "scripted"
        if whole:
            wait_for("the learner has finished", END_S, lambda: self._stack.exit_codes("learner") == [0])
            for service in ("scheduler", "evaluator"):
                wait_for(f"{service} has ended with 0", STEP_S, lambda s=service: self._stack.exit_codes(s) == [0])
        else:
            self._stack.compose("stop", "learner", "scheduler", "evaluator", "rollout")
            self._expect_end(("learner", "scheduler", "evaluator", "rollout"))
        say("bapo buffer verify: " + self._bapo("buffer", "verify", COMMANDS, role="viewer"))
        with tempfile.TemporaryDirectory(prefix="bapo-compose-") as folder:
            self._stack.compose("cp", f"buffer:/bapo/outputs/{RUN}", folder)
            run = Path(folder) / RUN
            if not (run / "inputs.json").is_file():
                raise CheckError("the service check has recorded no digests of data, reward and model")
            num_steps = self._num_steps if whole else last_step(run)
            if found := complaints(run, num_steps=num_steps, is_whole=whole):
                raise CheckError("the records are not whole: " + "; ".join(found))
            hosts = dict(hosts_of(run))
            say(f"{num_steps} steps, each once, with B fresh groups each, none fresh twice; by host: {hosts}")
            if len(hosts) < self._num_servers:
                raise CheckError(f"{self._num_servers - len(hosts)} rollout servers sampled nothing that was trained")

    def _look_at_redis(self) -> None:
        """It has taken all of its append-only file, each time that it started."""
        log = self._stack.compose("logs", "--no-color", "--no-log-prefix", "redis")
        if refused := [line for line in log.splitlines() if "CRITICAL" in line or "Bad file format" in line]:
            raise CheckError(f"Redis has dropped {len(refused)} commands of its append-only file: {refused[0][:300]}")

    def step(self) -> int:
        """Where the learner is. Raises: OSError while it does not answer."""
        containers = self._stack.containers("learner")
        found = get(f"http://{self._stack.address(containers[0])}:8702/metrics", self._viewer)
        return int(total(found, "bapo_learner_step"))

    def step_now(self) -> int:
        """As `step`, of a learner that may be too busy to answer at once."""
        found: list[int] = []
        wait_for("the learner says its step", STEP_S, lambda: found.append(self.step()) is None)
        return found[0]

    def tokens_per_s(self) -> float:
        """Of all rollout servers, over `WINDOW_S`."""
        before, began = self._tokens_now(), time.monotonic()
        time.sleep(WINDOW_S)
        return (self._tokens_now() - before) / (time.monotonic() - began)

    def is_healthy(self, service: str, num: int) -> bool:
        """Whether so many containers are there, all healthy."""
        return self._stack.health(service) == ["healthy"] * num

    def _tokens_now(self) -> float:
        """Of servers that may be too busy to answer at once."""
        found: list[float] = []
        wait_for("the rollout servers say their tokens", STEP_S, lambda: found.append(self._tokens()) is None)
        return found[0]

    def _tokens(self) -> float:
        pages = [
            get(f"http://{self._stack.address(container)}:8710/metrics", self._viewer)
            for container in self._stack.containers("rollout")
        ]
        return sum(total(page, "bapo_rollout_tokens_total") for page in pages)

    def _expect_end(self, services: tuple[str, ...]) -> None:
        codes = {service: self._stack.exit_codes(service) for service in services}
        if wrong := {service: found for service, found in codes.items() if not set(found) <= ENDED}:
            raise CheckError(f"docker compose stop: not ended as asked: {wrong}")

    def _bapo(self, *words: str, role: str) -> str:
        token = self._stack.secret(role)
        given = ("-e", f"BAPO_TOKEN={token}", "-e", "BAPO_TOKEN_FILE=")
        inside = ("exec", "-T", *given, "dashboard", "python", "-m", "bapo.cli")
        return self._stack.compose(*inside, *words).strip()


def total(page: str, name: str) -> float:
    """Sum of a metric over its labels; 0 where it is not there yet, or is NaN because its process does not know it."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return float(sum(sample.value for sample in samples if sample.name == name and not math.isnan(sample.value)))
