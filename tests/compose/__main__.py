"""`python -m tests.compose [--engine vllm] [--steps N] [--monitoring]`: docker-compose.yml, brought up for real.

It builds the images, lets a run train in them, scales the rollout servers while it goes on, kills one process after the
other, waits for the end of the run, checks that nothing was lost or trained twice, and takes everything down. About ten
minutes on two cores that others use, too; the first build takes as long again.

Needs a Docker engine with Compose on this Linux host, and root: processes are killed from outside, as the kernel would.
The scripted engine takes the same time whatever the machine does, so that what a second server adds can be judged; with
vLLM both share the cores. Exit code 0: all of it holds; 1: what does not is on the last line; 2: no engine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.compose.evidence import complaints, hosts_of
from tests.compose.stack import CheckError, Stack, get, status_of, wait_for

RUN = "check"
START_S, STEP_S, END_S = 600.0, 300.0, 1800.0
WINDOW_S = 60.0
"""Over which tokens per second are measured."""
LEAST_GAIN = 1.3
"""Tokens per second of two servers over those of one, where sampling is what the run waits for (scripted engine)."""
VICTIMS = ("buffer", "rollout", "redis", "learner", "scheduler")
OURS = ("buffer", "rollout", "learner", "scheduler", "evaluator", "redis")


class Check:
    """One run in containers; the methods are its chapters."""

    def __init__(self, stack: Stack, *, engine: str, num_steps: int) -> None:
        self._stack, self._engine, self._num_steps = stack, engine, num_steps
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

    def scale(self) -> None:
        """Another rollout server makes the run sample faster, while nothing else is started again."""
        before = self.tokens_per_s()
        self._stack.compose("up", "-d", "--no-recreate", "--no-build", "--scale", "rollout=2")
        seconds = wait_for("two rollout servers are healthy", START_S, lambda: self.healthy("rollout", 2))
        after = self.tokens_per_s()
        gain = after / before
        say(f"tokens per second: {before:.0f} with one rollout server, {after:.0f} with two ({gain:.2f} times); "
            f"the second one was healthy after {seconds:.0f} s")  # fmt: skip
        if self._engine == "scripted" and gain < LEAST_GAIN:
            raise CheckError(f"two rollout servers sample {gain:.2f} times as fast as one, not {LEAST_GAIN} times")

    def kill_all(self) -> None:
        """Each process is killed; its container starts again by itself and the learner goes on."""
        for victim in VICTIMS:
            step, before = self.step(), self._stack.kill(victim)
            if step > self._num_steps - 2:
                raise CheckError(f"the run is over before {victim} was killed: give it more --steps")
            wait_for(f"{victim} was started again", STEP_S, lambda v=victim, b=before: self._stack.restarts(v) > b)
            seconds = wait_for(
                f"{victim} is healthy", START_S, lambda v=victim: set(self._stack.health(v)) == {"healthy"}
            )
            wait_for(f"a step after {victim} was killed", STEP_S, lambda s=step: self.step() > s + 1)
            say(f"killed {victim} in step {step}: healthy again after {seconds:.0f} s, the learner is in {self.step()}")

    def finish(self) -> None:
        """The run ends by itself, and its records and its buffer are whole."""
        wait_for("the learner has finished", END_S, lambda: self._exit_codes("learner") == [0])
        for service in ("scheduler", "evaluator"):
            wait_for(f"{service} has ended with 0", STEP_S, lambda s=service: self._exit_codes(s) == [0])
        verify = ("exec", "-T", "-e", f"BAPO_TOKEN={self._viewer}", "buffer", "python", "-m", "bapo.cli")
        say("bapo buffer verify: " + self._stack.compose(*verify, "buffer", "verify", "--url", "http://127.0.0.1:8700"))
        with tempfile.TemporaryDirectory(prefix="bapo-compose-") as folder:
            self._stack.compose("cp", f"buffer:/bapo/outputs/{RUN}", folder)
            run = Path(folder) / RUN
            if found := complaints(run, num_steps=self._num_steps):
                raise CheckError("the records are not whole: " + "; ".join(found))
            hosts = dict(hosts_of(run))
            say(f"{self._num_steps} steps, each once, with B fresh groups each, none fresh twice; by host: {hosts}")
            if len(hosts) < 2:
                raise CheckError("the second rollout server has sampled nothing that was trained")

    def look_at_prometheus(self) -> None:
        """It finds every process of ours, scaled ones one by one."""
        port = os.environ.get("BAPO_PROMETHEUS_PORT", "9090")
        url = f"http://127.0.0.1:{port}/api/v1/query?query=count(up%7Bjob=~%22.%2B%22%7D==1)"
        seconds = wait_for("prometheus scrapes 6 targets", STEP_S, lambda: '"6"' in get(url, ""))
        say(f"prometheus scrapes buffer, learner, scheduler, evaluator and two rollout servers after {seconds:.0f} s")

    def step(self) -> int:
        """Where the learner is."""
        found = get(f"http://{self._stack.address(self._stack.containers('learner')[0])}:8702/metrics", self._viewer)
        return int(total(found, "bapo_learner_step"))

    def tokens_per_s(self) -> float:
        """Of all rollout servers, over `WINDOW_S`."""
        began, before = time.monotonic(), self._tokens()
        time.sleep(WINDOW_S)
        return (self._tokens() - before) / (time.monotonic() - began)

    def healthy(self, service: str, num: int) -> bool:
        """Whether so many containers are there, all healthy."""
        return self._stack.health(service) == ["healthy"] * num

    def _tokens(self) -> float:
        pages = [
            get(f"http://{self._stack.address(container)}:8710/metrics", self._viewer)
            for container in self._stack.containers("rollout")
        ]
        return sum(total(page, "bapo_rollout_tokens_total") for page in pages)

    def _exit_codes(self, service: str) -> list[int | None]:
        states = [self._stack.inspect(container)["State"] for container in self._stack.containers(service)]
        return [None if state["Running"] or state["Restarting"] else int(state["ExitCode"]) for state in states]


def total(page: str, name: str) -> float:
    """Sum of a metric over its labels; 0 where it is not there yet."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return float(sum(sample.value for sample in samples if sample.name == name))


def say(text: str) -> None:
    """A line of the protocol."""
    print(f"{time.strftime('%H:%M:%S')} {text.strip()}", flush=True)


def main() -> int:
    """All chapters, and the end of everything in any case."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--steps", type=int, help="default: 40, with vLLM 150")
    parser.add_argument("--monitoring", action="store_true", help="also Prometheus")
    parser.add_argument("--keep", action="store_true", help="leave everything as it is after a failure")
    flags = parser.parse_args()
    num_steps = flags.steps or {"scripted": 40, "vllm": 150}[flags.engine]
    if shutil.which("docker") is None:
        say("there is no docker here: nothing was checked")
        return 2
    stack = Stack(
        f"bapo-check-{os.getpid()}",
        {
            "BAPO_RUN": RUN,
            "BAPO_STEPS": str(num_steps),
            "BAPO_CONFIGS": "./tests/compose/configs",
            "BAPO_CONFIG": f"deploy/configs/{flags.engine}.toml",
            "BAPO_BUFFER_PORT": os.environ.get("BAPO_BUFFER_PORT", "0"),
        },
    )
    check, failed = Check(stack, engine=flags.engine, num_steps=num_steps), True
    try:
        check.start()
        check.look_at_rights()
        check.scale()
        if flags.monitoring:
            stack.compose("up", "-d", "--no-deps", "prometheus")
            check.look_at_prometheus()
        check.kill_all()
        check.finish()
        failed = False
    except (CheckError, OSError) as error:
        say(f"FAILED: {error}; is the run over already? Then it needs more --steps")
    finally:
        if not (failed and flags.keep):
            stack.down()
    if not failed and (left := stack.leftovers()):
        say(f"FAILED: left behind: {left}")
        return 1
    say("all of it holds, and nothing is left" if not failed else f"project {stack.project}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
