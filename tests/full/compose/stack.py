"""The compose file of this repository as one project of its own, driven from the host of its Docker engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
HTTP_TIMEOUT_S = 5.0
POLL_S = 1.0
QUIET_S = 30.0
"""Between two lines that say that a command of Docker goes on: images take minutes to build."""


class CheckError(Exception):
    """What the check was to show does not hold."""


class Stack:
    """`docker compose` with a project name and variables."""

    def __init__(self, project: str, variables: Mapping[str, str]) -> None:
        self.project = project
        self.env = {**os.environ, **variables, "COMPOSE_PROJECT_NAME": project}
        """What every command of it finds in its environment; a profile is added here."""

    def compose(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """What it prints. Raises: CheckError with its last lines."""
        return self._run("docker", "compose", "--env-file", ".env.example", *arguments, timeout_s=timeout_s)

    def docker(self, *arguments: str) -> str:
        """What `docker` prints. Raises: CheckError."""
        return self._run("docker", *arguments, timeout_s=60.0)

    def containers(self, service: str) -> list[str]:
        """Ids of those that exist."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """All that the engine knows of one."""
        found = json.loads(self.docker("inspect", container))[0]
        assert isinstance(found, dict)
        return found

    def address(self, container: str) -> str:
        """Its address in the project's default network, which the host of the engine reaches."""
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        return str(networks[f"{self.project}_default"]["IPAddress"])

    def port(self, service: str, inner: int) -> int:
        """Where the host listens, on its loopback, for a port of a service."""
        host, _, port = self.compose("port", service, str(inner)).strip().rpartition(":")
        if host != "127.0.0.1":
            raise CheckError(f"{service} listens on {host or 'nothing'}, not on the loopback")
        return int(port)

    def secret(self, role: str) -> str:
        """A role's token, as the operator of the host takes it."""
        path = f"/bapo/secrets/{role}/token"
        return self.compose("run", "--rm", "--no-deps", "--entrypoint", "cat", "-T", "secrets", path).strip()

    def kill(self, service: str) -> int:
        """SIGKILL to the process of a service, as the kernel would: `docker kill` would count as stopped by hand, and
        the restart policy would not fire. Returns: how often the engine had started it again before."""
        container = self.containers(service)[0]
        state = self.inspect(container)
        init = int(state["State"]["Pid"])
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        # Without `init: true` the process is the container's first one itself.
        os.kill(int(children[0]) if children else init, signal.SIGKILL)
        return int(state["RestartCount"])

    def restarts(self, service: str) -> int:
        """How often the engine has started the first container of a service again."""
        return int(self.inspect(self.containers(service)[0])["RestartCount"])

    def health(self, service: str) -> list[str]:
        """healthy, unhealthy, starting or exited, by container."""
        states = [self.inspect(container)["State"] for container in self.containers(service)]
        return [state.get("Health", {}).get("Status", "") if state["Running"] else "exited" for state in states]

    def exit_codes(self, service: str) -> list[int | None]:
        """Of its containers; None for one that runs or is about to."""
        states = [self.inspect(container)["State"] for container in self.containers(service)]
        return [None if state["Running"] or state["Restarting"] else int(state["ExitCode"]) for state in states]

    def down(self) -> None:
        """Nothing of the project is left: containers, networks, volumes."""
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "10")

    def leftovers(self) -> list[str]:
        """What carries the project's label."""
        label = f"label=com.docker.compose.project={self.project}"
        found = [self.docker(*what, "--quiet", "--filter", label).split() for what in
                 (("ps", "--all"), ("volume", "ls"), ("network", "ls"))]  # fmt: skip
        return [name for names in found for name in names]

    def _run(self, *command: str, timeout_s: float) -> str:
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            while True:
                try:
                    output, errors = process.communicate(timeout=QUIET_S)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - began
                    if seconds > timeout_s:
                        process.kill()
                        raise CheckError(f"{' '.join(command)} has not ended after {timeout_s:.0f} s") from None
                    say(f"{' '.join(command)} goes on: {seconds:.0f} s")
        if process.returncode != 0:
            tail = "\n".join((output + errors).splitlines()[-15:])
            raise CheckError(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
        return output


def say(text: str) -> None:
    """A line of the protocol."""
    print(f"{time.strftime('%H:%M:%S')} {text.strip()}", flush=True)


def get(url: str, token: str) -> str:
    """One GET with a token. Raises: OSError."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def status_of(url: str) -> int:
    """What a GET without a token is answered with. Raises: OSError."""
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def wait_for(what: str, limit_s: float, holds: Any) -> float:
    """Seconds until `holds()` was true; an answer that does not come is a no. Raises: CheckError."""
    began = time.monotonic()
    while True:
        try:
            if holds():
                return time.monotonic() - began
        except OSError:
            pass
        if time.monotonic() - began > limit_s:
            raise CheckError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(POLL_S)
